"""Environment variables that the launcher sets and the agent reads.

Everything else travels in `boot/agent.json`, because launchers forward few variables (DeepSpeed's pdsh runner
only those that start with PYTHON, MLFLOW, MV2 or UCX): the folder that stands first on PYTHONPATH is enough
to find it.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Path of the session folder.
SESSION = "OOMSCOPE_SESSION"
#: Path of the attempt folder. It also marks every process of the job: only marked processes are ever killed.
ATTEMPT = "OOMSCOPE_ATTEMPT"
#: Any value: the bootstrap does nothing at all.
AGENT_OFF = "OOMSCOPE_AGENT_OFF"
#: Any value: errors inside the agent are also printed.
DEBUG = "OOMSCOPE_DEBUG"
#: Set by the agent of a rank, for its children: `rank identity@pid`. A child with the same identity is a
#: helper.
OWNER = "OOMSCOPE_OWNER"
#: Set by a process on a simulated device for the processes that it starts: `rank/world size` for a rank of
#: torch.multiprocessing.spawn, OWN_DEVICE for another one, nothing for a helper that needs no device.
SIMULATED_RANK = "OOMSCOPE_SIMULATED_RANK"
OWN_DEVICE = "own"
#: State folder that replaces ~/.local/state/oomscope.
HOME = "OOMSCOPE_HOME"

#: Prefixes and names of variables whose values may be stored. Everything else stays in memory: environments
#: hold secrets.
STORED_PREFIXES = (
    "PYTORCH_", "TORCH", "NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "OMP_", "MKL_", "PET_", "SLURM_", "GLOO_",
    "MASTER_",
)  # fmt: skip
STORED_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "NODE_RANK",
    "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PYTHONHASHSEED", "CONDA_DEFAULT_ENV", "VIRTUAL_ENV",
)  # fmt: skip
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "PRIVATE")


def simulated_rank(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """(rank, world size) that a process got from the simulated one that started it; None for any other."""
    rank, _, size = environ.get(SIMULATED_RANK, "").partition("/")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else None


def stored_environment(environ: dict[str, str]) -> dict[str, str]:
    """The part of `environ` that may be written to disk, sorted by name."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in STORED_NAMES or name.startswith(STORED_PREFIXES))
        and not any(word in name.upper() for word in _SECRET_WORDS)
    }
