"""Which process this is: a rank, a helper of one, or a launcher.

Environment variables alone prove nothing (Kubeflow gives torchrun itself a RANK; DataLoader workers inherit
their rank's), so they are combined with how the process was started and with a mark that a rank leaves for
its children.
"""

from __future__ import annotations

import os
import sys

from ..protocol import env as variables
from ..protocol.records import Identity

#: Commands and modules that start ranks and are none themselves.
_LAUNCHER_NAMES = frozenset(
    {
        "torchrun",
        "accelerate",
        "deepspeed",
        "colossalai",
        "horovodrun",
        "mpirun",
        "srun",
        "ray",
        "lightning",
        "fabric",
    }
)
_LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.elastic",
    "accelerate.commands",
    "deepspeed.launcher",
)


def original_argv() -> list[str]:
    """The command line as the system saw it.

    Multiprocessing's spawn replaces sys.argv before torch is imported.
    """
    argv = getattr(sys, "orig_argv", None)
    if argv:
        return list(argv)
    try:
        with open("/proc/self/cmdline", "rb") as stream:
            return [part.decode("utf-8", "replace") for part in stream.read().split(b"\0")[:-1]]
    except OSError:
        return list(getattr(sys, "argv", []))


def is_multiprocessing_child() -> bool:
    """Started by multiprocessing's spawn or forkserver.

    A DataLoader worker, a resource tracker, or an mp.spawn rank.
    """
    return any(
        part == "--multiprocessing-fork"
        or "multiprocessing.forkserver" in part
        or "multiprocessing.resource_tracker" in part
        for part in original_argv()
    )


def is_launcher() -> bool:
    """A process that only starts ranks.

    Torchrun, accelerate launch and their like, or a torch.compile worker.
    """
    argv = original_argv()
    for before, part in zip(["", *argv], argv):
        if before == "-m" and part.startswith(_LAUNCHER_MODULES):
            return True
        if part.endswith(("compile_worker/__main__.py", "torch._inductor.compile_worker")):
            return True
    script = next((part for part in argv[1:] if not part.startswith("-")), argv[0] if argv else "")
    return os.path.basename(script) in _LAUNCHER_NAMES


def read_identity() -> Identity:
    """What the environment says, in the order torchrun, MPI, Slurm.

    Read late, because Ray sets it at run time.
    """
    rank = _number("RANK")
    local, world = _number("LOCAL_RANK"), _number("WORLD_SIZE")
    local_world, node = _number("LOCAL_WORLD_SIZE"), _number("GROUP_RANK")
    if rank is None and _number("OMPI_COMM_WORLD_RANK") is not None:
        rank, local = _number("OMPI_COMM_WORLD_RANK"), _number("OMPI_COMM_WORLD_LOCAL_RANK")
        world, local_world = _number("OMPI_COMM_WORLD_SIZE"), _number("OMPI_COMM_WORLD_LOCAL_SIZE")
    if rank is None and _number("PMI_RANK") is not None:
        rank, world = _number("PMI_RANK"), _number("PMI_SIZE")
    # The batch step has SLURM_PROCID=0 although it is no task: only a step has an id, and only several tasks
    # are ranks.
    if rank is None and (_number("SLURM_NTASKS") or 0) > 1 and os.environ.get("SLURM_STEP_ID"):
        rank, local, world = _number("SLURM_PROCID"), _number("SLURM_LOCALID"), _number("SLURM_NTASKS")
        node, nodes = _number("SLURM_NODEID"), _number("SLURM_NNODES")
        local_world = _number("SLURM_NTASKS_PER_NODE") or (-(-world // nodes) if world and nodes else None)
    return {
        "rank": rank,
        "local_rank": local,
        "world_size": world,
        "local_world_size": local_world,
        "node_rank": node,
        "run_id": os.environ.get("TORCHELASTIC_RUN_ID"),
        "restart": _number("TORCHELASTIC_RESTART_COUNT"),
    }


def owner_mark(identity: Identity) -> str:
    """What a rank writes into its environment for its children."""
    keys = ("rank", "local_rank", "node_rank", "run_id", "restart")
    parts = [str(identity.get(key)) for key in keys]
    return ",".join(parts) + f"@{os.getpid()}"


def is_helper(identity: Identity) -> bool:
    """Whether a rank with this very identity is among our ancestors.

    Then this is a worker or a subprocess of it.
    """
    mark = os.environ.get(variables.OWNER, "")
    owner, _, pid = mark.rpartition("@")
    return bool(owner) and pid != str(os.getpid()) and owner == owner_mark(identity).rpartition("@")[0]


def _number(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None
