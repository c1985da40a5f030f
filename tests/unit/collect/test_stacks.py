"""Stacks of real processes through py-spy, and what is said when there are none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from oomscope.collect import stacks

PROGRAM = """
import time
def inner(batch_size, step):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
inner(32, 580)
"""


@pytest.fixture
def target(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        yield process
        process.kill()


needs_py_spy = pytest.mark.skipif(stacks.find_program() is None, reason="py-spy is not installed")


@needs_py_spy
def test_a_running_process(target):
    dump = stacks.dump(target.pid)
    if dump.code in ("forbidden", "other_user"):
        pytest.skip(f"ptrace is not allowed here: {dump.why}")
    assert dump.ok, dump.why
    assert dump.mode == "nonblocking"
    thread = dump.main
    assert thread is not None
    assert thread.frames[0].function == "inner"
    assert thread.frames[0].file.endswith("train.py")
    assert stacks.guess_from_locals(dump) == {"batch_size": 32, "step": 580}


@needs_py_spy
def test_not_python():
    with subprocess.Popen(["sleep", "30"]) as process:
        dump = stacks.dump(process.pid)
        process.kill()
    if dump.code == "forbidden":
        pytest.skip(dump.why)
    assert dump.code == "not_python"
    assert "sleep" in dump.why


@needs_py_spy
def test_a_process_that_ended_and_a_zombie():
    assert stacks.dump(2**22 - 3).code == "gone"
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        dump = stacks.dump(process.pid)
    assert dump.code == "zombie"
    assert str(os.getpid()) in dump.why


def test_messages_are_ours_not_those_of_py_spy(monkeypatch):
    text = "Error: Failed to get process executable name. Check that the process is running.\n"
    text += "Permission denied (os error 13)"
    code, why = stacks.explain(os.getpid(), text)
    assert code == "forbidden"
    assert "SYS_PTRACE" in why
    monkeypatch.setattr(stacks, "read_status", lambda pid: {"Uid": "0 0 0 0", "TracerPid": "12"})
    assert stacks.explain(os.getpid(), "EPERM: Operation not permitted")[0] == "traced"
    assert (
        stacks.explain(os.getpid(), "Error: Failed to copy PyFrameObject\nStack backtrace:\n 0: x")[0]
        == "torn"
    )


def test_retries_then_blocks(monkeypatch):
    modes = []

    def run(command, mode, tries, pid):
        modes.append(mode)
        return stacks.StackDump((), mode, tries, code="torn", why="x")

    monkeypatch.setattr(stacks, "_run", run)
    monkeypatch.setattr(stacks, "find_program", lambda: "py-spy")
    stacks.dump(os.getpid())
    assert modes == ["nonblocking"] * 5 + ["blocking"]
    modes.clear()
    stacks.dump(os.getpid(), allow_blocking=False)
    assert modes == ["nonblocking"] * 5
