"""Running code inside live processes: it runs, nothing is lost, and the process ends as it would have."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomscope.launch import preflight
from oomscope.launch.injectors import InjectError, inject, wrapped
from oomscope.launch.injectors.gdb import GdbInjector
from oomscope.launch.injectors.ptrace_x86_64 import PtraceInjector
from oomscope.launch.injectors.remote_exec import RemoteExecInjector

pytestmark = pytest.mark.integration

SPIN = """
import sys, threading, time
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
end = time.monotonic() + {seconds}
count = 0
while time.monotonic() < end and not getattr(sys, "enough", False):
    count += 1
print("clean", flush=True)
"""
SLEEP = """
import threading, time
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
started = time.monotonic()
{wait}
print(f"{{time.monotonic() - started:.3f}}", flush=True)
"""


def require_ptrace(pid: int) -> None:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("the ptrace injector is for x86-64 Linux")
    verdict = preflight.check(pid)
    if not verdict.ok:
        pytest.skip(f"ptrace is not allowed here: {verdict.why}")


def run(injector, pid, source, tmp_path):
    try:
        return injector.run(pid, wrapped(source, str(tmp_path / "error")))
    except InjectError as error:
        if error.code == "seccomp":
            pytest.skip(error.message)
        raise


def touch(path: Path) -> str:
    return f"open({str(path)!r}, 'w').close()"


def appears(path: Path, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("mode", ["thread", "pending"])
def test_twenty_injections_into_a_hot_loop(target, tmp_path, mode):
    process = target(SPIN.format(seconds=90))
    require_ptrace(process.pid)
    for number in range(20):
        report = run(PtraceInjector(mode), process.pid, touch(tmp_path / str(number)), tmp_path)
        assert appears(tmp_path / str(number))
        assert report.state == ("ran" if mode == "thread" else "queued")
    run(PtraceInjector(), process.pid, "import sys; sys.enough = True", tmp_path)
    assert process.communicate()[0] == "clean\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(4)",
        "import select; select.select([], [], [], 4)",
        "threading.Lock().acquire(timeout=0) ; lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=4)",
    ],
)
def test_an_interrupted_wait_lasts_as_long_as_it_would_have(target, tmp_path, wait):
    process = target(SLEEP.format(wait=wait))
    require_ptrace(process.pid)
    # Late in the wait: one that began anew would last six seconds or more, which no busy machine makes of four.
    time.sleep(2)
    # "pending" stops the main thread itself, in the middle of its system call.
    run(PtraceInjector("pending"), process.pid, "pass", tmp_path)
    run(PtraceInjector(), process.pid, "pass", tmp_path)
    assert process.stdout is not None
    assert 3.99 <= float(process.stdout.readline()) < 5.9
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    "source", ["raise SystemExit(4)", "raise KeyboardInterrupt", "1/0", "import no_such_module", "exit(5)"]
)
def test_what_injected_code_raises_stays_inside(target, tmp_path, source):
    process = target(SPIN.format(seconds=60))
    require_ptrace(process.pid)
    for mode in ("thread", "pending"):
        run(PtraceInjector(mode), process.pid, source, tmp_path)
    run(PtraceInjector(), process.pid, "import sys; sys.enough = True", tmp_path)
    assert process.communicate()[0] == "clean\n"
    assert process.returncode == 0
    assert "Traceback" in (tmp_path / "error").read_text()


def test_a_syntax_error_never_leaves_this_process(tmp_path):
    with pytest.raises(SyntaxError):
        wrapped("def", str(tmp_path / "error"))


def test_a_main_thread_that_waits_for_ever(start, tmp_path):
    process = start(str(Path(__file__).parent / "jobs" / "stuck.py"))
    assert process.stdout is not None
    process.stdout.readline()
    require_ptrace(process.pid)
    source = (
        "import sys, threading\n"
        "frame = sys._current_frames()[threading.main_thread().ident]\n"
        f"open({str(tmp_path / 'where')!r}, 'w').write(f'{{frame.f_code.co_filename}}:{{frame.f_lineno}}')"
    )
    report = run(PtraceInjector(), process.pid, source, tmp_path)
    assert report.state == "ran"
    assert (tmp_path / "where").read_text().endswith("stuck.py:11")


def test_without_executable_memory_a_pending_call_is_used(target, tmp_path):
    # PR_SET_MDWE (65) refuses mappings that are writable and executable, since Linux 6.3.
    code = "import ctypes; assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0\n" + SPIN.format(seconds=90)
    if ctypes.CDLL(None).prctl(66, 0, 0, 0, 0) < 0:
        pytest.skip("this kernel has no PR_SET_MDWE")
    process = target(code)
    require_ptrace(process.pid)
    report = run(PtraceInjector(), process.pid, touch(tmp_path / "ran"), tmp_path)
    assert report.state == "queued"
    assert appears(tmp_path / "ran")


KILLER = """
import os, random, signal, sys, time
from oomscope.launch.injectors import wrapped
from oomscope.launch.injectors.ptrace_x86_64 import PtraceInjector
pid, mode, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
random.seed(7)
for number in range(rounds):
    child = os.fork()
    if child == 0:
        while True:
            PtraceInjector(mode, wait_s=0.0).run(pid, wrapped("x = 1", os.devnull))
    time.sleep(0.01 + random.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    time.sleep(0.005)
    with open(f"/proc/{pid}/stat") as stat:
        state = stat.read().rsplit(")", 1)[1].split()[0]
    assert state in "RSD", (number, state)
print("survived")
"""


@pytest.mark.parametrize("mode", ["thread", "pending"])
def test_an_injector_killed_at_any_moment_harms_nobody(target, start, tmp_path, mode):
    process = target(SPIN.format(seconds=600))
    require_ptrace(process.pid)
    run(PtraceInjector(), process.pid, "pass", tmp_path)
    killer = start("-c", KILLER, str(process.pid), mode, "60")
    assert killer.communicate()[0] == "survived\n"
    assert killer.returncode == 0
    run(PtraceInjector(), process.pid, "import sys; sys.enough = True", tmp_path)
    assert process.communicate()[0] == "clean\n"
    assert process.returncode == 0


def test_gdb_queues_a_pending_call(target, tmp_path):
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    process = target(SPIN.format(seconds=90))
    require_ptrace(process.pid)
    injector = GdbInjector()
    assert injector.unavailable(process.pid) is None
    assert run(injector, process.pid, touch(tmp_path / "ran"), tmp_path).state == "queued"
    assert appears(tmp_path / "ran")
    run(PtraceInjector(), process.pid, "import sys; sys.enough = True", tmp_path)
    assert process.communicate()[0] == "clean\n"


def python_314() -> str | None:
    for name in ("python3.14", "python3.15"):
        if (found := shutil.which(name)) is not None:
            return found
    return None


def test_remote_exec(tmp_path):
    python = python_314()
    if python is None:
        pytest.skip("no Python 3.14 or later on this machine: sys.remote_exec does not exist before")
    process = subprocess.Popen([python, "-c", SPIN.format(seconds=90)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        report = run(RemoteExecInjector(), process.pid, touch(tmp_path / "ran"), tmp_path)
        assert report.state == "queued"
        assert appears(tmp_path / "ran")
        process.kill()


def test_remote_exec_says_why_not(target):
    process = target(SPIN.format(seconds=90))
    if sys.version_info >= (3, 14):
        pytest.skip("this Python has remote_exec")
    reason = RemoteExecInjector().unavailable(process.pid)
    assert reason is not None
    assert "3.14" in reason


def test_no_way_lists_all_reasons(monkeypatch):
    class Closed:
        name = "closed"

        def unavailable(self, pid):
            return "is closed"

        def run(self, pid, source):
            raise AssertionError

    with pytest.raises(InjectError) as caught:
        inject(os.getpid(), "pass", [Closed()])
    assert "closed: is closed" in caught.value.message


def test_not_python(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        require_ptrace_of_any(process.pid)
        with pytest.raises(InjectError) as caught:
            PtraceInjector().run(process.pid, "pass")
        process.kill()
    assert caught.value.code == "not_python"


def require_ptrace_of_any(pid: int) -> None:
    if PtraceInjector().unavailable(pid) is not None:
        pytest.skip("ptrace is not allowed here")
