"""What part a process plays in a training job, by its environment, its command line and its name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from oomscope.collect.procfs import Process
from oomscope.launch.preflight import looks_like_python

#: (rank, local rank, world size, source). torchrun's own come first, then Slurm, Open MPI, MPICH, PMIx.
_FAMILIES: tuple[tuple[str, str | None, str | None, str], ...] = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "torchrun"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "openmpi"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "mpich"),
    ("PMIX_RANK", None, None, "pmix"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "slurm"),
)
#: Names torch gives to processes and threads that are not ranks (torch/distributed/run.py,
#: utils/data/_utils).
_HELPER_NAMES = frozenset({"pt_data_worker", "pt_data_pin", "pt_elastic"})
_HELPER_COMMAND = re.compile(
    r"torch[/.]_inductor[/.]compile_worker|multiprocessing\.(resource_tracker|forkserver)"
    r"|wandb-(core|service)|tensorboard|ray/dashboard|py-spy|nvitop"
    r"|/oomscope(\s|$)|oomscope\.(cli|collect)\b|-m oomscope"
)
_LAUNCHER_COMMAND = re.compile(
    r"(^|/|\s)(torchrun|accelerate|deepspeed|srun|mpirun|mpiexec)(\s|$)"
    r"|torch[./]distributed[./](run|launch)\b|deepspeed[./]launcher"
)


def script_names(process: Process) -> list[str]:
    if not looks_like_python(process) or _HELPER_COMMAND.search(" ".join(process.command)):
        return []
    return [os.path.basename(part) for part in process.command[1:8] if part.endswith(".py")]


def runs_script(process: Process, target: str) -> bool:
    names = script_names(process)
    return target in names or target + ".py" in names or (target in process.command[1:8] and bool(names))


def rank_of(environ: Mapping[str, str] | None) -> tuple[int, int | None, int | None, str] | None:
    """(rank, local rank, world size, source) by the variables a process was started with."""
    if not environ:
        return None
    for rank, local, world, source in _FAMILIES:
        if source == "slurm" and not (
            environ.get("SLURM_STEP_ID") and number(environ, "SLURM_NTASKS") not in (None, 1)
        ):
            continue  # the batch step has SLURM_PROCID=0 without being a rank
        value = number(environ, rank)
        if value is not None:
            return value, number(environ, local), number(environ, world), source
    return None


def number(environ: Mapping[str, str], name: str | None) -> int | None:
    text = environ.get(name, "") if name else ""
    return int(text) if text.isdigit() and len(text) < 10 else None


def rank_key(environ: Mapping[str, str] | None) -> tuple[object, ...] | None:
    """Equal for a rank and its children."""
    found = rank_of(environ)
    if found is None or environ is None:
        return None
    run = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID") or environ.get("MASTER_PORT")
    return found[0], run, environ.get("TORCHELASTIC_RESTART_COUNT")


def is_launcher(process: Process) -> bool:
    return process.comm == "pt_elastic" or bool(_LAUNCHER_COMMAND.search(" ".join(process.command[:4])))


def is_helper(process: Process) -> bool:
    return process.comm in _HELPER_NAMES or bool(_HELPER_COMMAND.search(" ".join(process.command)))


def may_train(process: Process) -> bool:
    return (
        process.stat.state not in "ZX"
        and looks_like_python(process)
        and not is_helper(process)
        and not is_launcher(process)
    )


def is_spawned(process: Process) -> bool:
    return any("spawn_main" in part or "--multiprocessing-fork" in part for part in process.command)


def is_worker(process: Process, table: Mapping[int, Process]) -> bool:
    if process.comm == "pt_data_worker":
        return True
    parent = table.get(process.parent)
    # A forked child with the same arguments: torch before 2.5 names no processes.
    return parent is not None and bool(process.command) and process.command == parent.command
