"""What can be done with a process, decided from /proc before anything is tried, with reasons."""

from __future__ import annotations

import os
from dataclasses import dataclass

from oomscope.collect.procfs import Process, read_process, read_stat, read_text

_CAP_SYS_PTRACE = 1 << 19
_IN_A_CONTAINER = (
    "docker run --cap-add SYS_PTRACE; Kubernetes: securityContext.capabilities.add: [SYS_PTRACE]"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether stacks and agent can be reached; `code` for programs, `why` and `remedy` for people."""

    code: str = "ok"
    why: str = ""
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return self.code == "ok"


def check(pid: int) -> Verdict:
    """Can `pid` be read and attached to by us?

    Codes: ok, gone, zombie, stopped, not_python, traced, other_user, no_capability, yama, not_dumpable,
    forbidden. A seccomp profile shows only when ptrace is tried.
    """
    process = read_process(pid)
    if process is None:
        return Verdict("gone", f"there is no process {pid} on this host")
    for step in (_alive, _python, _traced, _rights):
        verdict = step(process)
        if verdict is not None:
            return verdict
    return Verdict()


def _alive(process: Process) -> Verdict | None:
    pid, state = process.pid, process.stat.state
    if state in "ZX":
        parent = read_stat(process.parent)
        name = f" ({parent.comm})" if parent is not None else ""
        return Verdict(
            "zombie",
            f"process {pid} has ended; its parent {process.parent}{name} has not collected it (zombie)",
        )
    if state == "T":
        return Verdict("stopped", f"process {pid} is stopped", f"kill -CONT {pid}")
    return None


def _python(process: Process) -> Verdict | None:
    if looks_like_python(process):
        return None
    return Verdict("not_python", f"process {process.pid} ({process.comm}) is not a Python process")


def looks_like_python(process: Process) -> bool:
    """By its command line, by torch's thread names, or by what it has mapped."""
    if process.command and "python" in os.path.basename(process.command[0]).lower():
        return True
    if process.comm.startswith(("python", "pt_")):
        return True
    text = read_text(f"/proc/{process.pid}/maps")
    return bool(text) and "libpython" in (text or "")


def _traced(process: Process) -> Verdict | None:
    tracer = process.status.get("TracerPid", "0")
    if tracer == "0":
        return None
    stat = read_stat(int(tracer))
    name = f" ({stat.comm})" if stat is not None else ""
    return Verdict(
        "traced",
        f"process {process.pid} is already traced by process {tracer}{name}",
        "end the other debugger first",
    )


def _rights(process: Process) -> Verdict | None:
    pid = process.pid
    try:
        with open(f"/proc/{pid}/mem", "rb"):
            return None
    except ProcessLookupError:
        return Verdict("gone", f"process {pid} has just ended")
    except OSError:
        pass
    us = os.geteuid()
    has_capability = bool(int(_status_of_self().get("CapEff", "0"), 16) & _CAP_SYS_PTRACE)
    if process.uid != us and us != 0:
        return Verdict(
            "other_user",
            f"process {pid} belongs to uid {process.uid}, we are uid {us}",
            f"run oomscope as that user: sudo -u '#{process.uid}' oomscope attach {pid}",
        )
    if not has_capability and us == 0:
        return Verdict(
            "no_capability",
            f"we are root without CAP_SYS_PTRACE, process {pid} has more rights",
            _IN_A_CONTAINER,
        )
    yama = yama_scope()
    if yama is not None and yama >= 1 and not has_capability:
        return Verdict(
            "yama",
            f"the kernel only lets a parent look into process {pid} (kernel.yama.ptrace_scope = {yama})",
            "run oomscope with sudo, start the job with oomscope run, or: sudo sysctl "
            "kernel.yama.ptrace_scope=0",
        )
    if _owner_of(f"/proc/{pid}/environ") not in (process.uid, None):
        return Verdict(
            "not_dumpable",
            f"process {pid} is protected (not dumpable: it was setuid, or called prctl(PR_SET_DUMPABLE))",
            "run oomscope with sudo",
        )
    return Verdict("forbidden", f"process {pid} may not be read", _IN_A_CONTAINER)


def yama_scope() -> int | None:
    """kernel.yama.ptrace_scope: 0 anyone, 1 parents, 2 administrators, 3 nobody; None without Yama."""
    text = read_text("/proc/sys/kernel/yama/ptrace_scope")
    return int(text) if text and text.strip().isdigit() else None


def _status_of_self() -> dict[str, str]:
    text = read_text("/proc/self/status") or ""
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _owner_of(path: str) -> int | None:
    try:
        return os.stat(path).st_uid
    except OSError:
        return None
