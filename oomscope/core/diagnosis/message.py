"""One out-of-memory text as typed numbers.

The fields are those of the public JSON (`messages` of `oomscope.diagnosis/1`); a number that the text does
not state is None, never 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

#: Kinds whose text proves that an allocation on a device failed.
DEVICE_KINDS = frozenset(
    {
        "cuda_oom", "cuda_oom_1eb", "cuda_oom_short", "cuda_error_oom", "cuda_driver_oom",
        "hip_oom", "hip_error_oom", "hip_driver_oom", "xpu_oom", "mps_oom", "npu_oom", "mlu_oom", "musa_oom",
        "hpu_oom", "xla_oom",
    }
)  # fmt: skip
#: A library beside torch's allocator found no memory: the shortage wears a disguise.
LIBRARY_KINDS = frozenset(
    {"cublas_alloc", "cudnn_alloc", "cusolver_alloc", "cufft_alloc", "nccl_oom", "nvml_assert"}
)
#: Texts that often, but not always, hide a shortage of device memory.
MAYBE_KINDS = frozenset({"cublas_maybe_oom", "cudnn_maybe_oom", "host_maybe_kill"})
#: Host memory: a failed allocation, a killed process, or a full /dev/shm.
HOST_KINDS = frozenset(
    {
        "cpu_alloc",
        "host_alloc",
        "host_kill",
        "elastic_sigkill",
        "kernel_oom",
        "cgroup_oom",
        "slurm_oom",
        "host_commit",
        "shm",
    }
)
#: The same envelope without a memory problem inside; they keep their numbers and raise no verdict.
OTHER_KINDS = frozenset({"nccl_other", "elastic_fail_other", "worker_other"})


@dataclass(frozen=True)
class Frame:
    """One line of a Python traceback in the log."""

    file: str
    line: int
    function: str
    source: str = ""
    """The source text printed under the frame; "" when the log has none."""


_LIBRARY = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "/torch/nn/",
    "/torch/optim/",
    "/torch/autograd/",
    "/torch/utils/",
)


def is_user_file(file: str) -> bool:
    """A file of the user's own: neither the interpreter's, nor an installed package's."""
    path = file.replace("\\", "/")
    if path.startswith("Cell In") or "<ipython" in path:
        return True
    return path.endswith(".py") and not any(part in path for part in _LIBRARY)


@dataclass(frozen=True)
class OomMessage:
    """What one text says. All sizes in bytes; `line` is the 1-based line of the log where it starts."""

    kind: str
    backend: str | None = None
    """The allocator that wrote the text ("cuda", "hip", "xpu", "mps" …).

    None for errors of drivers, libraries and hosts.
    """
    tried_bytes: int | None = None
    gpu: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    this_process_bytes: int | None = None
    other_processes: tuple[tuple[int, int], ...] = ()
    """(pid, bytes) of each "Process N has X memory in use".

    In a container one of them may be the process itself.
    """
    private_pools_bytes: int | None = None
    allowed_bytes: int | None = None
    """The limit set by `set_per_process_memory_fraction`."""
    conf_var: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    exitcode: int | None = None
    pid: int | None = None
    cpu_bytes: int | None = None
    mps_allocated_bytes: int | None = None
    mps_other_bytes: int | None = None
    mps_max_bytes: int | None = None
    nccl_bytes: int | None = None
    tags: tuple[str, ...] = ()
    line: int | None = None
    job: int = 0
    """Number of the run inside the log, from 0: a log may hold several runs."""
    is_warning: bool = False
    """The text was swallowed: it stands in a warning, not in an exception."""
    time_s: float | None = None
    """Seconds from the stamp of its line (since the epoch, or of the day when the log has no date)."""
    frames: tuple[Frame, ...] = field(default=(), repr=False)
    """The traceback above the text, outermost first, as printed."""
    exception: str | None = None
    """Class name in front of the text."""
    before: str = field(default="", repr=False)
    """The words in front of the text on its line, at most the last 160 characters."""
    text: str = field(default="", repr=False)
    """The words of the message, white space collapsed, at most 600 characters."""

    @property
    def is_oom(self) -> bool:
        """True when the text proves or strongly suggests a shortage of memory."""
        return self.kind in DEVICE_KINDS or self.kind in LIBRARY_KINDS or self.kind in HOST_KINDS

    def to_json(self) -> dict[str, Any]:
        """The public form: byte fields in integers, absent ones null."""
        plain = asdict(self)
        plain["other_processes"] = [{"pid": pid, "bytes": count} for pid, count in self.other_processes]
        plain["tags"] = list(self.tags)
        plain["frames"] = [[f.file, f.line, f.function] for f in reversed(self.frames)]
        return plain
