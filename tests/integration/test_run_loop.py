"""`oomscope run` as a user types it: samples on the simulated device, streams, exit codes, refusals and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "samples"

pytestmark = pytest.mark.integration


def oomscope(
    *args: str, home: Path, env: dict[str, str] | None = None, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OOMSCOPE_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
        **(env or {}),
    }
    return subprocess.run(
        [sys.executable, "-m", "oomscope", *args],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


@cache
def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((files("oomscope") / "schemas" / "run.1.json").read_text())
    return loaded


def run_sample(home: Path, *args: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """The `oomscope.run/1` object of one run; checks that stdout is exactly that object."""
    done = oomscope("run", "--auto", "--json", *args, home=home, env=env)
    summary: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(summary, schema())
    assert summary["exit_code"] == done.returncode
    assert "OutOfMemoryError" in done.stderr or not any(each["oom"] for each in summary["attempts"])
    return summary


def assert_proved(summary: dict[str, Any], fixes: list[str]) -> None:
    """Attempt 2 ran with `fixes`, survived, and stayed inside the interval that attempt 1 had predicted."""
    first, second = summary["attempts"]
    (predicted,) = [each for each in first["predictions"] if each["fixes"] == fixes]
    assert predicted["fits"] is True
    assert second["fixes"] == fixes
    assert second["oom"] is False
    assert summary["exit_code"] == 0
    (rank,) = second["ranks"]
    assert predicted["low_bytes"] <= rank["peak_reserved_bytes"] <= predicted["high_bytes"]
    assert rank["peak_reserved_bytes"] <= rank["capacity_bytes"]


def test_activations_too_big_is_named_and_mended_by_checkpointing(tmp_path: Path) -> None:
    summary = run_sample(tmp_path, "--device", "sim:a100-40g", "samples/activations_too_big.py")
    first = summary["attempts"][0]
    assert first["oom"] is True
    assert first["first_failing_rank"] == 0
    assert first["verdict"]["rule"] == "oom.capacity_activations"
    assert first["ranks"][0]["peak_phase"] == "forward"
    composition = {each["category"]: each["bytes"] for each in first["ranks"][0]["peak_composition"]}
    assert max(composition, key=lambda name: composition[name]) == "activations"
    assert_proved(summary, ["ckpt"])


def test_varlen_fragmentation_is_named_and_mended_by_expandable_segments(tmp_path: Path) -> None:
    summary = run_sample(tmp_path, "--device", "sim:15GiB", "samples/varlen_fragmentation.py")
    first = summary["attempts"][0]
    assert first["verdict"]["rule"] == "oom.fragmentation"
    assert first["ranks"][0]["steps"] > 1
    assert_proved(summary, ["expandable"])


def test_a_leak_is_named_with_the_line_that_holds_it(tmp_path: Path) -> None:
    done = oomscope(
        "run", "--no-fix", "--json", "--device", "sim:a100-40g", "samples/loss_list_leak.py", home=tmp_path
    )
    summary = json.loads(done.stdout)
    (attempt,) = summary["attempts"]
    assert attempt["verdict"]["rule"] == "oom.graph_accumulation"
    where = attempt["verdict"]["where"]
    source = (SAMPLES / "loss_list_leak.py").read_text().splitlines()
    assert source[where["line"] - 1].strip() == "losses.append(loss)"
    assert done.returncode == 1


def test_a_healthy_script_has_no_finding(tmp_path: Path) -> None:
    summary = run_sample(tmp_path, "--device", "sim:a100-40g", "--steps", "3", "samples/healthy_gpt.py")
    (attempt,) = summary["attempts"]
    assert attempt["verdict"] is None
    assert attempt["oom"] is False
    assert attempt["ranks"][0]["steps"] == 3
    assert summary["exit_code"] == 0


def test_expandable_is_refused_where_it_is_set_already(tmp_path: Path) -> None:
    done = oomscope(
        "run", "--apply", "expandable", "--device", "sim:15GiB", "samples/varlen_fragmentation.py",
        home=tmp_path, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )  # fmt: skip
    assert done.returncode == 125
    assert "expandable" in done.stderr
    assert "already" in done.stderr
    assert "step 0" not in done.stdout


FLAT = """
import torch
weights = torch.nn.Parameter(torch.zeros(1 << 28, device="cuda"))
optimizer = torch.optim.AdamW([weights])
for _ in range(2):
    loss = (weights * 2).square().sum()
    loss.backward()
    optimizer.step()
"""


def test_ckpt_is_refused_where_there_are_no_blocks(tmp_path: Path) -> None:
    script = tmp_path / "flat.py"
    script.write_text(FLAT)
    done = oomscope("run", "--apply", "ckpt", "--json", "--device", "sim:4GiB", str(script), home=tmp_path)
    summary = json.loads(done.stdout)
    assert [each["fix"] for each in summary["refused"]] == ["ckpt"]
    assert "block" in summary["refused"][0]["reason"]
    assert len(summary["attempts"]) == 1
    assert done.returncode == 1


def test_without_a_terminal_the_job_owns_stdout(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)\n")
    done = oomscope("run", str(script), home=tmp_path)
    assert done.stdout == "out\n"
    assert done.stderr.startswith("err\n")
    assert done.returncode == 3


BAD_INPUT = {
    "missing script": (["run", "nothing_here.py"], "no script nothing_here.py"),
    "near miss": (["run", "samples/healty_gpt.py"], "did you mean samples/healthy_gpt.py?"),
    "unknown option": (["run", "--jsn", "samples/healthy_gpt.py"], "did you mean --json?"),
    "unknown torchrun option": (["run", "--nproc_pre_node", "2", "samples/healthy_gpt.py"], "--nproc-per-node"),
    "unknown card": (["run", "--device", "sim:a100-41g", "samples/healthy_gpt.py"], "a100-40g"),
    "not simulated": (["run", "--device", "cuda:0", "samples/healthy_gpt.py"], "sim:a100-40g"),
    "no script": (["run", "--steps", "3"], "no script to run"),
    "conflict": (["run", "--apply", "ckpt,ckpt-half", "samples/healthy_gpt.py"], "exclude each other"),
    "advice": (["run", "--apply", "empty-cache", "samples/healthy_gpt.py"], "is advice"),
    "unknown fix": (["run", "--apply", "ckp", "samples/healthy_gpt.py"], "did you mean ckpt?"),
    "bad budget": (["run", "--budget", "soon", "samples/healthy_gpt.py"], "--budget 20m"),
    "bad ranks": (["run", "--ranks", "a", "samples/healthy_gpt.py"], "--ranks 0,7"),
    "bad steps": (["run", "--steps", "0", "samples/healthy_gpt.py"], "--steps"),
    "option without its value": (["run", "--steps"], "--steps needs a value"),
    "folder": (["run", "samples"], "oomscope run FOLDER/train.py"),
    "screens without a terminal": (["run", "--ui", "always", "samples/healthy_gpt.py"], "no terminal"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_with_a_hint_and_125(case: str, tmp_path: Path) -> None:
    args, expected = BAD_INPUT[case]
    done = oomscope(*args, home=tmp_path)
    assert done.returncode == 125
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.glob("sessions/*"))


def test_an_interpreter_without_torch_is_refused_by_the_simulated_device_only(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    script = tmp_path / "hello.py"
    script.write_text("print('hello')\n")
    simulated = oomscope("run", "--python", python, "--device", "sim:24GiB", str(script), home=tmp_path)
    assert simulated.returncode == 125
    assert "pip install torch" in simulated.stderr
    plain = oomscope("run", "--python", python, str(script), home=tmp_path)
    assert (plain.returncode, plain.stdout) == (0, "hello\n")


def test_an_unwritable_state_folder_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = oomscope("run", "samples/healthy_gpt.py", home=blocked)
    assert done.returncode == 125
    assert "OOMSCOPE_HOME" in done.stderr


def test_a_script_that_raises_before_torch_keeps_its_own_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text("raise SystemExit(7)\n")
    done = oomscope("run", "--json", "--device", "sim:24GiB", str(script), home=tmp_path)
    assert done.returncode == 7
    summary = json.loads(done.stdout)
    jsonschema.validate(summary, schema())
    assert summary["attempts"][0]["oom"] is False


CATCHES = """
import sys, torch
kept = []
try:
    while True:
        kept.append(torch.ones(64 << 20, device="cuda"))
except RuntimeError as error:
    print("caught", type(error).__name__)
    sys.exit(4)
"""


def test_a_script_that_catches_the_error_and_exits_ran_out_of_memory(tmp_path: Path) -> None:
    script = tmp_path / "catches.py"
    script.write_text(CATCHES)
    done = oomscope("run", "--no-fix", "--json", "--device", "sim:4GiB", str(script), home=tmp_path)
    assert done.returncode == 4
    assert json.loads(done.stdout)["attempts"][0]["oom"] is True
    assert "out of memory" in done.stderr
    assert "nothing says" not in done.stderr


def test_a_killed_job_is_not_said_to_have_had_enough_memory(tmp_path: Path) -> None:
    done = oomscope("run", "--", "bash", "-c", "kill -9 $$", home=tmp_path)
    assert done.returncode == 137
    assert "SIGKILL" in done.stderr
    assert "out-of-memory killer" in done.stderr


def test_with_json_the_job_still_reads_its_standard_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oomscope", "run", "--json", "--", "wc", "-c"],
        input=b"x" * 300_000,
        capture_output=True,
        env={**os.environ, "OOMSCOPE_HOME": str(tmp_path)},
        timeout=60,
    )
    assert json.loads(done.stdout)["exit_code"] == 0
    assert done.stderr.split()[0] == b"300000"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import torch", "no optimizer step was seen"),
        ("pass", "no training process was seen"),
    ],
)
def test_a_run_with_nothing_to_see_says_so(body: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "quiet.py"
    script.write_text(body + "\n")
    done = oomscope("run", str(script), home=tmp_path)
    assert done.returncode == 0
    assert said in done.stderr


TOO_BIG = """
import torch
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8)))
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(80_000, 512, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def ctrl_c_works() -> Iterator[None]:
    """Ctrl-C has its usual meaning in child processes, also where the tests run in the background (SIGINT ignored)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_ends_the_predictions_and_keeps_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "too_big.py"
    script.write_text(TOO_BIG)
    process = subprocess.Popen(
        [sys.executable, "-m", "oomscope", "run", "--auto", "--device", "sim:2GiB", str(script)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OOMSCOPE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "predicting" in line and "interrupted" not in line:
            process.send_signal(signal.SIGINT)
            break
    said += process.communicate(timeout=100)[1].splitlines(keepends=True)
    text = "".join(said)
    assert process.returncode == 1
    assert "interrupted" in text
    assert "attempt 2" not in text
    assert "session" in text
