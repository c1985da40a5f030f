"""A plain script with the agent inside behaves as without it, and its session tells what it did."""

import subprocess
import sys

import pytest

from .conftest import TRAIN

pytestmark = pytest.mark.integration


def plain(path, environment, *args):
    """The script without us."""
    return subprocess.run(
        [sys.executable, str(path), *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=path.parent,
    )


def test_a_thousand_steps_have_exactly_the_same_losses(launch, script_path, environment):
    script = TRAIN + "for _ in range(1000): print(repr(step().item()))\n"
    run = launch(script)
    alone = plain(script_path, environment)
    assert run.result.exit_code == 0
    assert run.output() == alone.stdout
    assert [repr(loss) for loss in run.result.ranks[0].losses] == alone.stdout.split()
    assert run.output("stderr") == alone.stderr == ""


def test_the_session_tells_what_the_script_did(launch):
    run = launch(TRAIN + "for _ in range(3): step(accumulate=2)\n", "--lr", "1")
    (hello,) = run.of("hello")
    assert hello["argv"][1:] == ["--lr", "1"]
    assert hello["identity"]["rank"] == 0
    assert [record["step"] for record in run.of("step")] == [0, 1, 2]
    assert {record["micro_steps"] for record in run.of("step")} == {2}
    assert all(record["peak_allocated_bytes"] is None for record in run.of("step"))
    (model,) = run.of("model")
    assert model["parameters_bytes"] == 4 * (8 * 16 + 16 + 16 + 1)
    assert model["gradients_bytes"] == model["parameters_bytes"]
    assert model["optimizer"] == "AdamW"
    assert run.of("bye")[0]["steps"] == 3
    assert not run.of("agent_error")
    (rank,) = run.result.ranks
    assert (rank.state, rank.steps) == ("done", 3)
    assert rank.peak_rss_bytes > 50 << 20
    assert run.attempt.result()["exit_code"] == 0


def test_the_job_ends_after_the_steps_that_were_asked_for(launch):
    script = TRAIN + "import atexit; atexit.register(print, 'cleaned up')\nwhile True: step()\n"
    run = launch(script, steps=3, detail=True)
    assert run.result.exit_code == 0
    assert run.result.ranks[0].steps == 3
    assert run.output("stderr") == ""
    assert run.output() == "cleaned up\n"
    assert {"forward", "backward", "optimizer"} <= {record["phase"] for record in run.of("phase")}
    assert all(record["input_numel"] == 32 for record in run.of("step"))


def test_an_exception_is_recorded_and_shown_as_without_us(launch, script_path, environment):
    run = launch(TRAIN + "step()\nmodel(torch.ones(1, 3))\n", detail=True)
    alone = plain(script_path, environment)
    assert run.result.exit_code == alone.returncode == 1
    assert run.output("stderr") == alone.stderr
    (record,) = run.of("exception")
    assert record["type"] == "RuntimeError"
    assert "\n".join(record["traceback"]) + "\n" == alone.stderr
    assert record["frames"][-1][0] == str(script_path)
    assert run.result.first_failing_rank == 0
    assert not run.result.oom


def test_a_script_that_fails_before_torch_leaves_no_rank(launch):
    run = launch("raise ValueError('early')\n")
    assert run.result.exit_code == 1
    assert run.result.ranks == []
    assert "ValueError: early" in run.output("stderr")


def test_a_script_that_fails_before_training_is_recorded(launch):
    run = launch("import torch\nraise torch.OutOfMemoryError('CUDA out of memory.')\n")
    assert run.result.oom
    assert run.result.ranks[0].state == "oom"
    assert run.result.ranks[0].steps == 0


def test_a_script_that_never_steps_is_done(launch):
    run = launch("import torch\nprint(torch.ones(2).sum().item())\n")
    assert run.result.exit_code == 0
    assert (run.result.ranks[0].state, run.result.ranks[0].steps) == ("done", 0)


def test_a_kill_costs_at_most_the_last_half_second(launch):
    """All steps are on the disk without an end of the process that could flush them."""
    script = TRAIN + (
        "import glob, os, time\nfor _ in range(5): step()\n"
        "files = os.environ['OOMSCOPE_ATTEMPT'] + '/procs/r*.jsonl'\n"
        'while not all(open(name).read().count(\'"k":"step"\') == 5 for name in glob.glob(files)): time.sleep(0.05)\n'
        "os.kill(os.getpid(), 9)\n"
    )
    run = launch(script)
    assert (run.result.exit_code, run.result.signal) == (137, 9)
    assert (run.result.ranks[0].state, run.result.ranks[0].steps) == ("lost", 5)
    assert run.result.first_failing_rank == 0


def test_a_full_disk_does_not_harm_the_job(launch):
    script = (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
        + TRAIN
        + "import time\nfor _ in range(200): step()\ntime.sleep(0.7)\nprint('finished')\n"
    )
    run = launch(script)
    assert run.result.exit_code == 0
    assert run.output() == "finished\n"
    assert run.output("stderr") == ""
    assert run.result.ranks[0].steps > 0


def test_the_users_own_sitecustomize_still_runs(launch, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.users_own = True\n")
    script = (
        "import sys, torch, sitecustomize\nprint(sys.users_own, sitecustomize.__file__)\nprint(sys.path)\n"
    )
    run = launch(script, env={"PYTHONPATH": str(own)})
    first, path = run.output().splitlines()
    assert first == f"True {own / 'sitecustomize.py'}"
    assert str(own) in path
    assert "boot" not in path
    assert run.of("hello")


def test_a_broken_sitecustomize_is_reported_as_python_reports_it(launch, tmp_path, script_path, environment):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("raise RuntimeError('theirs')\n")
    run = launch("import torch\nprint('goes on')\n", env={"PYTHONPATH": str(own)})
    alone = plain(script_path, {**environment, "PYTHONPATH": str(own)})
    assert run.output() == alone.stdout == "goes on\n"
    assert run.output("stderr") == alone.stderr
    assert run.of("hello")


COMPILED = """
import torch
from torch._dynamo.testing import CompileCounter
counter = CompileCounter()
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled, step = torch.compile(model, backend=counter), torch.compile(optimizer.step, backend="eager")
for _ in range(3):
    compiled(torch.ones(2, 8)).sum().backward()
    step()
    optimizer.zero_grad()
print(counter.frame_count, counter.op_count)
"""


@pytest.mark.slow
def test_compiled_models_have_the_same_graphs_and_no_more_warnings(launch, script_path, environment):
    run = launch(COMPILED, detail=True)
    alone = plain(script_path, environment)
    assert run.output() == alone.stdout == "1 3\n"
    assert len(run.output("stderr").splitlines()) == len(alone.stderr.splitlines())
    assert run.result.ranks[0].steps == 3
    assert not run.of("agent_error")
