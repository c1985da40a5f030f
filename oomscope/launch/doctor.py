"""What works on this machine and what does not, each with what to do about it. Every check tries the real thing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from oomscope import __version__, plugins
from oomscope.collect import stacks
from oomscope.collect.base import State
from oomscope.collect.machine import MachineWatch
from oomscope.errors import OomscopeError
from oomscope.launch import preflight
from oomscope.launch.doctor_host import (
    ERROR,
    OK,
    WARN,
    Check,
    kernel_log,
    memory_limit,
    shared_memory,
)
from oomscope.launch.injectors import all_injectors, inject, wrapped
from oomscope.protocol import env as variables
from oomscope.store import library
from oomscope.store.session import default_home
from oomscope.units import GIB, format_bytes

_TORCH_TIMEOUT_S = 120.0
#: Room that snapshots of a few ranks need.
_LITTLE_DISK_BYTES = 2 * GIB


def run_checks(python: str, *, with_torch: bool = True) -> Iterator[Check]:
    """All checks, as they are done.

    Args:
        python: the job's interpreter.
        with_torch: also those that import torch in it (seconds).
    """
    checks: list[Callable[[], Check]] = [
        _python,
        _state_folder,
        _nvidia,
        _other_collectors,
        _target_checks_injection,
    ]
    checks += [_py_spy, kernel_log, memory_limit, shared_memory, _terminal, _plugins]
    if with_torch:
        checks += [lambda: _torch(python), lambda: _simulator(python)]
    for check in checks:
        yield check()


def _python() -> Check:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    text = f"oomscope {__version__}, Python {platform.python_version()}, {system}"
    if sys.platform != "linux":
        return Check(
            "system",
            "System",
            WARN,
            text,
            "attaching, /proc and cgroups need Linux; snapshots work everywhere",
        )
    return Check("system", "System", OK, text)


def _state_folder() -> Check:
    home = default_home()
    title = "State folder"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = home / f".doctor-{os.getpid()}"
        probe.write_text("x")
        probe.unlink()
        free = shutil.disk_usage(home).free
    except OSError as error:
        remedy = f"set {variables.HOME} to a folder that you may write"
        return Check("state", title, ERROR, f"{home} cannot be written: {error.strerror}", remedy)
    count = len(library.sessions(home))
    text = f"{home}: {count} session{'s' if count != 1 else ''}, {format_bytes(free, 1)} free"
    if free < _LITTLE_DISK_BYTES:
        return Check(
            "state", title, WARN, text, f"memory snapshots need room: free some, or set {variables.HOME}"
        )
    return Check("state", title, OK, text)


def _nvidia() -> Check:
    watch = MachineWatch(["nvidia"])
    try:
        watch.first_reading(8.0)
    finally:
        watch.close()
    status, title = watch.statuses["nvidia"], "NVIDIA driver"
    if status.state is State.OK:
        machine = watch.machine
        lost = [device for device in machine.devices if device.state != "ok"]
        names = sorted({device.name for device in machine.devices if device.parent_uuid is None})
        count = sum(device.parent_uuid is None for device in machine.devices)
        text = f"driver {status.driver}, {count} GPU{'s' if count != 1 else ''}: {', '.join(names)}"
        if lost:
            return Check(
                "nvidia",
                title,
                ERROR,
                f"{text}; {len(lost)} lost",
                "reboot this machine (Xid 79 in the kernel log)",
            )
        refused = {name for row in machine.gpus.values() for name in row.get("unsupported", {})}
        if refused & {"memory", "compute"}:
            return Check(
                "nvidia", title, WARN, f"{text}; not answered: {', '.join(sorted(refused))}",
                "memory by process is not available here (WSL, or MIG without rights)",
            )  # fmt: skip
        return Check("nvidia", title, OK, text)
    if status.state is State.UNAVAILABLE:
        harmless = status.code in ("no_library", "no_driver", "no_gpu")
        reason, _, remedy = status.why.partition(": ")
        if harmless:
            remedy += "; without a GPU: oomscope run --device sim:a100-40g train.py"
        return Check("nvidia", title, WARN if harmless else ERROR, reason, remedy.lstrip("; "))
    return Check(
        "nvidia", title, ERROR, status.why or "NVML did not answer within 8 s",
        "the driver may hang: look for Xid in the kernel log (dmesg), and reboot if it does",
    )  # fmt: skip


def _other_collectors() -> Check:
    loaded = plugins.load("oomscope.collectors")
    others = [each for each in loaded if each.name not in ("nvidia", "host")]
    title = "Other accelerators"
    if not others:
        text = "no collector plugin is installed"
        return Check("collectors", title, OK, text, "for AMD GPUs install the plugin oomscope-rocm")
    names = [each.name for each in others if each.error is None]
    watch = MachineWatch(names)
    try:
        watch.first_reading(8.0)
    finally:
        watch.close()
    bad = [
        f"{name}: {status.why or status.state.value}"
        for name, status in watch.statuses.items()
        if status.state is not State.OK
    ]
    if bad:
        return Check("collectors", title, WARN, "; ".join(bad))
    return Check("collectors", title, OK, ", ".join(names))


#: A target of our own: no process of the user is touched.
_TARGET = (
    "import sys, threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    "print('ready', flush=True)\nsys.stdin.read()\n"
)


def _with_target(check: Callable[[int], Check]) -> Check:
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            return check(process.pid)
        finally:
            process.kill()


def _target_checks_injection() -> Check:
    return _with_target(_injection)


def _injection(pid: int) -> Check:
    title = "Agent in a live job"
    verdict = preflight.check(pid)
    if not verdict.ok:
        return Check(
            "ptrace", title, WARN, verdict.why.replace(f"process {pid}", "a process"), verdict.remedy
        )
    yama = preflight.yama_scope()
    try:
        report = inject(pid, wrapped("pass", os.devnull))
    except OomscopeError as error:
        return Check("ptrace", title, WARN, error.message, error.hint or "start the job with: oomscope run")
    text = f"{report.injector} works, one helper thread stopped for {report.stopped_us / 1000:.1f} ms"
    ways = [injector.name for injector in all_injectors() if injector.unavailable(pid) is None]
    text += f"; ways in: {', '.join(ways)}"
    # Our child may be traced by us even where other processes may not.
    if yama is not None and yama >= 1 and os.geteuid() != 0:
        return Check(
            "ptrace", title, WARN, f"works for children only (kernel.yama.ptrace_scope = {yama})",
            "sudo oomscope attach …, start the job with oomscope run, or sudo sysctl kernel.yama.ptrace_scope=0",
        )  # fmt: skip
    return Check("ptrace", title, OK, text)


def _py_spy() -> Check:
    return _with_target(_stacks)


def _stacks(pid: int) -> Check:
    title = "Stacks of a live job"
    dump = stacks.dump(pid)
    if dump.ok:
        return Check(
            "stacks", title, OK, f"py-spy, {dump.mode}, {dump.tries} tr{'y' if dump.tries == 1 else 'ies'}"
        )
    return Check("stacks", title, WARN, dump.why.replace(f"process {pid}", "a process"))


def _terminal() -> Check:
    title = "Terminal"
    term = os.environ.get("TERM", "")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return Check("terminal", title, OK, "none here: commands print text; every one has --json")
    encoding = (sys.stderr.encoding or "").lower()
    size = shutil.get_terminal_size()
    colours = (
        "no colours (NO_COLOR)"
        if os.environ.get("NO_COLOR")
        else os.environ.get("COLORTERM") or "256 colours or fewer"
    )
    text = f"{term or 'TERM is not set'}, {size.columns}x{size.lines}, {encoding}, {colours}"
    if term in ("", "dumb"):
        return Check(
            "terminal",
            title,
            WARN,
            text,
            "screens need a terminal: export TERM=xterm-256color, or use --ui never",
        )
    if "utf" not in encoding:
        return Check("terminal", title, WARN, text, "screens need UTF-8: export LC_ALL=C.UTF-8")
    if size.columns < 80 or size.lines < 24:
        return Check("terminal", title, WARN, text, "screens are made for 80x24 and more")
    return Check("terminal", title, OK, text)


def _plugins() -> Check:
    loaded = [each for group in plugins.GROUPS for each in plugins.load(group)]
    broken = [each for each in loaded if each.error is not None]
    title = "Plugins"
    if broken:
        text = "; ".join(f"{each.name} ({each.target}): {each.error}" for each in broken)
        return Check(
            "plugins",
            title,
            ERROR,
            text,
            "pip install --upgrade, or uninstall it; everything else goes on working",
        )
    names = [each.name for each in loaded]
    return Check("plugins", title, OK, ", ".join(names) if names else "none installed")


_ASK_TORCH = (
    "import json, sys\nimport torch\n"
    "d = sys.modules.get('torch.distributed')\n"
    "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda,"
    " 'hip': getattr(torch.version, 'hip', None),"
    " 'devices': torch.cuda.device_count() if torch.cuda.is_available() else 0,"
    " 'history': hasattr(torch._C, '_cuda_record_memory_history'),"
    " 'observer': hasattr(torch._C, '_cuda_attach_out_of_memory_observer'), 'python': sys.version.split()[0]}))"
)


def _torch(python: str) -> Check:
    title = "torch of the job"
    try:
        done = subprocess.run(
            [python, "-c", _ASK_TORCH], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_TORCH_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(
            "torch", title, ERROR, f"{python} cannot be run: {error}", "choose another with --python"
        )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Check(
            "torch",
            title,
            WARN,
            f"{python} has no usable torch: {last[:200]}",
            f"{python} -m pip install torch",
        )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    build = (
        f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "CPU only"
    )
    text = f"torch {found['torch']} ({build}) in {python}, Python {found['python']}, {found['devices']} device(s)"
    if not found["cuda"] and not found["hip"]:
        return Check("torch", title, OK, text, "on a machine with GPUs install a CUDA build")
    if not found["history"] or not found["observer"]:
        return Check(
            "torch", title, WARN, f"{text}; it cannot record memory history", "torch 2.1 or later can"
        )
    if found["devices"] == 0:
        return Check(
            "torch",
            title,
            WARN,
            f"{text}: torch sees no GPU",
            "check CUDA_VISIBLE_DEVICES and the driver version",
        )
    return Check("torch", title, OK, text)


def _simulator(python: str) -> Check:
    from oomscope.launch.selftest import check_simulator

    title = "Simulated device"
    started = time.monotonic()
    try:
        check_simulator(python)
    except OomscopeError as error:
        return Check("simulator", title, WARN, error.message, error.hint or "")
    return Check("simulator", title, OK, f"the self-test passed ({time.monotonic() - started:.1f} s)")


def job_python(asked: str | None) -> str:
    """The interpreter that `oomscope run` would use; ours when there is no other."""
    from oomscope.launch.command import job_python as choose

    try:
        return choose(asked=asked)
    except OomscopeError:
        return sys.executable if asked is None else str(Path(asked))
