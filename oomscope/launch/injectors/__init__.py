"""Ways to run a piece of Python inside a process that is already running, best first.

1. `ptrace` (x86-64): one helper thread of the job is stopped for about a millisecond and made to start a
thread that takes
   the GIL and runs the text. The training thread goes on, and it works while that one waits in CUDA or NCCL.
2. `remote_exec`: the official way of Python 3.14 and later (PEP 768). Runs when the main thread executes
bytecode. 3. `gdb`: a pending call queued by gdb, for other architectures. Stops the process for most of a
second.

Never breakpoints (an injector that dies leaves `int3` in the job, which kills it later) and never signals
(Slurm, torchelastic and Lightning use them; the default action of a user signal is death).
"""

from __future__ import annotations

from collections.abc import Sequence

from oomscope.launch.injectors.base import InjectError, Injector, Report, wrapped
from oomscope.launch.injectors.gdb import GdbInjector
from oomscope.launch.injectors.ptrace_x86_64 import PtraceInjector
from oomscope.launch.injectors.remote_exec import RemoteExecInjector

__all__ = ["InjectError", "Injector", "Report", "all_injectors", "inject", "wrapped"]


def all_injectors() -> list[Injector]:
    """In the order in which they are tried."""
    return [PtraceInjector(), RemoteExecInjector(), GdbInjector()]


def inject(pid: int, source: str, injectors: Sequence[Injector] | None = None) -> Report:
    """Runs `source` in `pid` with the first injector that is available there.

    `source` must not raise: pass it through `wrapped`. That it *ran* is known only from what it does.

    Raises:
        InjectError: with the reasons of all injectors.
    """
    reasons = []
    for injector in injectors if injectors is not None else all_injectors():
        reason = injector.unavailable(pid)
        if reason is not None:
            reasons.append(f"{injector.name}: {reason}")
            continue
        try:
            return injector.run(pid, source)
        except InjectError as error:
            if not error.may_try_another:
                raise
            reasons.append(f"{injector.name}: {error.message}")
    raise InjectError("no_way", f"no way into process {pid}: " + "; ".join(reasons))
