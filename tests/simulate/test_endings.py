"""The process ends as the script wants: status, traceback, atexit handlers, flushed streams."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

SCRIPT = """
import atexit, sys, torch
atexit.register(lambda: print("handler ran", end=""))
weight = torch.ones(64, 64, device="cuda", requires_grad=True)
(weight @ weight).sum().backward()
print("no newline", end=" ")
"""


@pytest.mark.parametrize(
    ("last_line", "exit_code", "on_stderr"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('a message')", 1, "a message"),
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        (
            "torch.empty(1 << 40, device='cuda')",
            1,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
        ),
    ],
)
def test_status_and_streams(last_line: str, exit_code: int, on_stderr: str, simulate_text: Any) -> None:
    run = simulate_text(SCRIPT + last_line + "\n")
    assert run.exit_code == exit_code
    assert on_stderr in run.stderr
    assert run.stdout == "no newline handler ran"
    assert run.peak["peak_allocated_bytes"] > 0


def test_traceback_ends_at_the_line_of_the_script(simulate_text: Any) -> None:
    run = simulate_text(SCRIPT + "torch.empty(1 << 40, device='cuda')\n")
    frames = [line for line in run.stderr.splitlines() if line.startswith("  File ")]
    ours = [line for line in frames if "oomscope/simulate/mode.py" in line]
    assert len(ours) == 1
    assert "script.py" in frames[-2]


def test_steps_limit_ends_well(simulate_text: Any) -> None:
    text = """
import torch
layer = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
while True:
    layer(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    print("step")
"""
    run = simulate_text(text, options=("--steps", "3"))
    assert run.exit_code == 0
    assert run.stdout.count("step") == 2


def test_snapshot_is_written_before_the_error_unwinds(simulate_text: Any, tmp_path: Any) -> None:
    import pickle

    path = tmp_path / "oom.pickle"
    text = """
import torch
def fill():
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    return torch.empty(1 << 40, dtype=torch.uint8, device="cuda"), held
fill()
"""
    run = simulate_text(text, options=("--history", "1000", "--snapshot", str(path)))
    assert run.exit_code == 1
    snapshot = pickle.loads(path.read_bytes())
    rows = snapshot["device_traces"][0]
    assert rows[-1]["action"] == "oom"
    assert "device_free" in rows[-1]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    held = next(block for block in blocks if block["size"] == 1 << 30)
    assert held["state"] == "active_allocated"
    assert held["frames"][0]["name"] == "fill"
