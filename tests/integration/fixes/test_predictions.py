"""Predictions on the simulated device: stored first, reached by the rerun, and as true as torch's own profiler."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from oomscope.errors import FixError
from oomscope.launch.predict import launch_changes
from oomscope.launch.proof import prove

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
MIB = 1 << 20
#: cuBLAS workspaces that the simulated device models and a CPU does not have: two handles, 8.125 MiB each.
WORKSPACES = 2 * 8320 * 1024


def entry(fixes, fix_id):
    return next(each for each in fixes["fixes"] if each["id"] == fix_id)


def test_the_object_follows_its_schema(predicted):
    schema = json.loads((Path(__file__).parents[3] / "oomscope/schemas/fixes.1.json").read_text())
    jsonschema.validate(predicted, schema)


def test_the_job_itself_does_not_fit_and_the_plan_does(predicted):
    assert predicted["fits"] is False
    assert predicted["peak_reserved_bytes"] > predicted["capacity_bytes"]
    assert predicted["recommended"]
    plan = next(plan for plan in predicted["plans"] if plan["fixes"] == predicted["recommended"])
    assert plan["fits"] is True
    assert predicted["basis"].startswith("simulated device")


@pytest.mark.parametrize("fix", ["ckpt", "microbatch-exact"])
def test_a_rerun_with_another_seed_and_more_steps_reaches_the_predicted_peak(failed_job, predicted, fix):
    stored = json.loads((failed_job.attempt.path / "fixes.json").read_text())
    expected = entry(stored, fix)["predicted"]
    result = failed_job.rerun([fix], "--seed", "7", "--iterations", "6")
    assert result.exit_code == 0
    reached = result.ranks[0].peak_reserved_bytes
    assert abs(reached - expected["peak_reserved_bytes"]) <= 0.01 * expected["peak_reserved_bytes"]
    assert expected["low_bytes"] <= reached <= expected["high_bytes"]
    attempt = failed_job.session.attempts()[-1]
    proof = prove(failed_job.attempt.path, attempt.path)
    assert proof["peak"]["inside"] is True
    assert proof["peak"]["reached_by"] == "simulated"
    assert proof["loss"] == "not comparable"
    assert proof["accepted"] is True


def test_an_allocator_setting_is_predicted_without_a_run_of_its_own(failed_job, predicted):
    found = entry(predicted, "expandable")
    assert found["predicted"] or not found["applicable"]
    assert not list((failed_job.attempt.path / "predictions").glob("expandable*"))


def test_ineffective_fixes_have_a_reason(predicted):
    for each in predicted["fixes"]:
        assert not (each["effective"] is False and not each["why_ineffective"])
        assert each["applicable"] or each["why_not"]


def test_a_refused_fix_cannot_be_launched(failed_job, predicted):
    with pytest.raises(FixError, match="zero1 refused"):
        launch_changes(["zero1"], failed_job.attempt, env=failed_job.spec.env)
    with pytest.raises(FixError, match="exclude each other"):
        launch_changes(["ckpt", "ckpt-half"], failed_job.attempt)
    with pytest.raises(FixError, match="is advice"):
        launch_changes(["empty-cache"], None)
    with pytest.raises(FixError, match="already active"):
        launch_changes(["expandable"], None, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})


SMALL = ("--iterations", "2", "--batch-size", "8")


def truth(fixes):
    command = [sys.executable, str(HERE / "truth.py"), fixes, str(HERE / "gpt.py"), "--device", "cpu", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def small_job(tmp_path_factory, start_job):
    folder = tmp_path_factory.mktemp("small")
    job = start_job(folder, [str(HERE / "gpt.py"), *SMALL], "8GiB")
    assert job.result.exit_code == 0
    return job


@pytest.mark.parametrize(
    ("fixes", "share"), [("", 0.03), ("ckpt", 0.06), ("microbatch-exact", 0.03), ("ckpt-half", 0.06)]
)
def test_live_bytes_are_those_of_the_profiler(fixes, share, small_job):
    """The same fix on the same model: simulated CUDA against real allocations on the CPU."""
    real = truth(fixes)
    assert all(state == "applied" for state in real["states"].values())
    simulated = small_job.rerun([each for each in fixes.split(",") if each])
    live = simulated.ranks[0].peak_allocated_bytes - WORKSPACES
    assert abs(live - real["peak"]) <= share * real["peak"], (live / MIB, real["peak"] / MIB)


def test_a_script_that_fails_on_the_device_is_said_so(tmp_path, start_job):
    script = tmp_path / "broken.py"
    script.write_text("import torch\nx = torch.ones(4, device='cuda')\nraise ValueError('no data')\n")
    job = start_job(tmp_path, [str(script)], "2GiB")
    fixes = job.predict(budget_s=30)
    assert "no data" in fixes["note"]
    assert fixes["recommended"] is None


def test_a_script_that_changed_since_the_run_is_said_so(failed_job, predicted):
    import os
    import time

    script = Path(failed_job.spec.command[1])
    before = script.stat()
    try:
        os.utime(script, (time.time() + 60, time.time() + 60))
        made = failed_job.predict(only=("zero1",))
        assert "gpt.py changed since the failed run" in made["note"]
    finally:
        os.utime(script, ns=(before.st_atime_ns, before.st_mtime_ns))
        from oomscope.store.files import write_json

        write_json(failed_job.attempt.path / "fixes.json", predicted)


EMPTIES = """
import torch

weights = torch.ones(1 << 20, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weights], 0.1)
for step in range(3):
    parts = [torch.empty((1 << 20) * 3, device="cuda") for _ in range(8)]
    del parts
    torch.cuda.empty_cache()
    whole = torch.empty((1 << 20) * 22, device="cuda")
    (weights * whole[: 1 << 20]).sum().backward()
    optimizer.step()
    del whole
"""


def test_a_cache_that_the_script_empties_is_empty_in_the_replay(tmp_path, start_job):
    """Eight blocks and a large one never lie in the cache together: the replay must know."""
    script = tmp_path / "empties.py"
    script.write_text(EMPTIES)
    job = start_job(tmp_path, [str(script)], "1GiB")
    assert job.result.exit_code == 0
    found = job.predict(only=("expandable",))
    assert found["peak_reserved_bytes"] == job.result.ranks[0].peak_reserved_bytes
    assert found["peak_reserved_bytes"] < 130 * MIB
