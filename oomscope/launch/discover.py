"""From a pid, a name, a run id, a Slurm job or a container to a job: its ranks, with the evidence for each.

A rank is a Python process that has rank variables which its parent does not have with the same values;
DataLoader workers inherit them. /proc shows the environment a process was *started* with: ranks of
torch.multiprocessing.spawn, notebooks and Ray set theirs inside Python, so their number stays unknown until
the agent tells.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from oomscope.collect.procfs import Process, accelerator_files, all_processes
from oomscope.errors import AttachFailed, UsageError
from oomscope.launch.names import container_pids, slurm_pids
from oomscope.launch.preflight import looks_like_python
from oomscope.launch.roles import (
    is_launcher,
    is_spawned,
    is_worker,
    may_train,
    number,
    rank_key,
    rank_of,
    runs_script,
    script_names,
)
from oomscope.protocol import env as variables

#: Variables that are equal for all ranks of a job and tell jobs apart.
_JOB_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")
#: Shown and used for mapping; everything else in an environment may be a secret and is dropped.
_KEPT = (
    "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "NVIDIA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip


@dataclass(slots=True)
class Rank:
    """One rank of a job on this host."""

    pid: int
    start_ticks: int
    rank: int | None
    """None when only the agent can tell."""
    local_rank: int | None
    world_size: int | None
    source: str
    """Where the number comes from: torchrun, slurm, openmpi, mpich, pmix, single, spawn, parent."""
    command: tuple[str, ...]
    environ: dict[str, str]
    """The harmless part of its environment."""
    namespace_pid: int
    uid: int
    workers: list[int] = field(default_factory=list)
    """DataLoader workers."""
    helpers: list[int] = field(default_factory=list)
    device_files: list[str] = field(default_factory=list)
    container: str | None = None
    session: str | None = None
    """Session folder, when the job was started by `oomscope run`."""


@dataclass(slots=True)
class Job:
    """The ranks that belong together, and what could not be found out."""

    target: str
    ranks: list[Rank]
    script: str | None = None
    launcher: int | None = None
    run_id: str | None = None
    expected_local: int | None = None
    """Ranks that should be on this host (LOCAL_WORLD_SIZE)."""
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The script's name, for titles and session folders."""
        return self.script or self.run_id or self.target

    @property
    def pids(self) -> list[int]:
        """All processes of the job on this host."""
        found = [pid for rank in self.ranks for pid in (rank.pid, *rank.workers, *rank.helpers)]
        return sorted({*found, *([self.launcher] if self.launcher else [])})


def discover(target: str, processes: Mapping[int, Process] | None = None) -> Job:
    """The job that `target` names.

    Args:
        target: pid of a launcher, rank or worker; run id; script name; `slurm:JOB`; `container:ID`.
        processes: of this host; read from /proc by default.

    Raises:
        AttachFailed: nothing or an ended process matches; near names are in the hint.
        UsageError: several jobs match.
    """
    table = dict(processes) if processes is not None else all_processes()
    if target.isdigit():
        roots = {_climb(_existing(int(target), table), table)}
    else:
        me = _ancestors(os.getpid(), table)
        roots = {_climb(table[pid], table) for pid in _by_name(target, table, me)}
    problems: list[str] = []
    groups: dict[tuple[object, ...], list[Rank]] = {}
    for root in sorted(roots):
        for rank in _ranks_below(root, table, problems):
            groups.setdefault(_group_key(rank, root), []).append(rank)
    if not groups:
        reason = f" ({problems[0]})" if problems else ""
        raise AttachFailed(
            f"{target}: no process of it trains with Python{reason}",
            hint="oomscope top shows which processes use the GPUs",
        )
    if len(groups) > 1:
        raise UsageError(
            f"{target!r} matches {len(groups)} jobs",
            hint="give one of: " + "; ".join(_describe(groups, table)),
        )
    (ranks,) = groups.values()
    _attach_children(ranks, table)
    return _job(target, min(roots) if len(roots) == 1 else None, ranks, table, problems)


# -- from the target to processes


def _existing(pid: int, table: Mapping[int, Process]) -> Process:
    process = table.get(pid)
    if process is not None and pid == 1:
        raise AttachFailed(
            f"process 1 ({process.comm}) starts this system or container, and trains nothing itself",
            hint="give a script name or run id instead",
        )
    if process is None:
        raise AttachFailed(
            f"there is no process {pid} on this host", hint="give a script name or run id instead"
        )
    if process.stat.state == "Z":
        parent = table.get(process.parent)
        name = f" ({parent.comm})" if parent is not None else ""
        raise AttachFailed(
            f"process {pid} has ended; its parent {process.parent}{name} has not collected it (zombie)"
        )
    return process


def _climb(process: Process, table: Mapping[int, Process]) -> int:
    """The launcher or top rank above a worker, rank or launcher."""
    while True:
        parent = table.get(process.parent)
        if parent is None or parent.pid <= 1 or not _belongs(process, parent):
            return process.pid
        process = parent


def _belongs(child: Process, parent: Process) -> bool:
    """Is `parent` part of the same job?"""
    key = rank_key(child.environ)
    if key is not None and key == rank_key(parent.environ):
        return True
    if is_launcher(parent):
        return True
    return looks_like_python(parent) and (is_spawned(child) or child.comm == "pt_data_worker")


def _by_name(target: str, table: Mapping[int, Process], me: Collection[int]) -> list[int]:
    others = [process for process in table.values() if process.pid not in me]
    if target.startswith("slurm:"):
        return slurm_pids(target[6:], others, os.uname().nodename)
    if target.startswith("container:"):
        return container_pids(target[10:], others)
    found = [
        process.pid for process in others if (process.environ or {}).get("TORCHELASTIC_RUN_ID") == target
    ]
    found = found or [process.pid for process in others if runs_script(process, target)]
    if not found:
        names = {name for process in others for name in script_names(process)}
        near = difflib.get_close_matches(target, names, n=3, cutoff=0.5)
        raise AttachFailed(
            f"nothing matches {target!r}: no torchrun run id and no Python script of that name",
            hint=f"running: {', '.join(near or sorted(names)[:8])}"
            if names
            else "no Python script is running",
        )
    return found


def _group_key(rank: Rank, root: int) -> tuple[object, ...]:
    """Equal for ranks of one job. Without any id, everything below one root is one job."""
    environ = rank.environ
    ids = tuple(environ.get(name) for name in _JOB_IDS)
    # torchrun's default run id is "none" for everybody; then the master's port tells jobs apart.
    return ids if rank.rank is not None and any(ids) else (root,)


def _describe(groups: Mapping[tuple[object, ...], Sequence[Rank]], table: Mapping[int, Process]) -> list[str]:
    lines = []
    for ranks in groups.values():
        first = ranks[0]
        parent = table.get(table[first.pid].parent)
        pid = parent.pid if parent is not None and is_launcher(parent) else first.pid
        count = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
        lines.append(f"{pid} ({count}: {' '.join(first.command)[-60:]})")
    return lines


# -- from processes to ranks


def _ranks_below(root: int, table: Mapping[int, Process], problems: list[str]) -> list[Rank]:
    """The ranks of one process tree."""
    members = [table[pid] for pid in _subtree(root, table)]
    problems += sorted({process.why for process in members if process.environ is None and process.why})
    ranks = _ranks_by_environment(members, table) or _ranks_by_shape(members, table, problems)
    _add_lightning_parent(ranks, members, table)
    return ranks


def _ranks_by_environment(members: Sequence[Process], table: Mapping[int, Process]) -> list[Rank]:
    ranks = []
    for process in members:
        key = rank_key(process.environ)
        if key is None or not may_train(process):
            continue
        parent = table.get(process.parent)
        if (
            parent is not None
            and rank_key(parent.environ) == key
            and looks_like_python(parent)
            and not is_launcher(parent)
        ):
            continue  # a child of a rank
        found = rank_of(process.environ)
        assert found is not None
        ranks.append(_make(process, *found))
    return ranks


def _ranks_by_shape(
    members: Sequence[Process], table: Mapping[int, Process], problems: list[str]
) -> list[Rank]:
    """Without rank variables: torch.multiprocessing.spawn, or one plain script."""
    candidates = [process for process in members if may_train(process)]
    pids = {process.pid for process in candidates}
    spawned = [process for process in candidates if is_spawned(process)]
    if spawned and not any(is_worker(process, table) for process in spawned):
        using = [process for process in spawned if accelerator_files(process.pid)]
        problems.append(
            "the ranks are children of torch.multiprocessing.spawn: their numbers are set inside Python and "
            "only the agent "
            "can tell them"
        )
        chosen = using or spawned
        return [_make(process, None, None, len(chosen), "spawn") for process in chosen]
    top = [process for process in candidates if process.parent not in pids]
    return [_make(process, 0, 0, 1, "single") for process in top]


def _make(process: Process, rank: int | None, local: int | None, world: int | None, source: str) -> Rank:
    environ = process.environ or {}
    return Rank(
        pid=process.pid,
        start_ticks=process.stat.start_ticks,
        rank=rank,
        local_rank=local,
        world_size=world,
        source=source,
        command=process.command,
        environ={name: environ[name] for name in _KEPT if name in environ},
        namespace_pid=process.namespace_pid,
        uid=process.uid,
        device_files=accelerator_files(process.pid),
        container=process.container,
        session=environ.get(variables.SESSION),
    )


def _add_lightning_parent(
    ranks: list[Rank], members: Sequence[Process], table: Mapping[int, Process]
) -> None:
    """Lightning's script launcher is itself local rank 0, without variables."""
    locals_ = {rank.local_rank for rank in ranks}
    if not ranks or None in locals_ or 0 in locals_:
        return
    parents = {table[rank.pid].parent for rank in ranks if rank.pid in table}
    parent = table.get(parents.pop()) if len(parents) == 1 else None
    if parent is not None and may_train(parent) and parent.pid in {process.pid for process in members}:
        first = _make(parent, 0, 0, ranks[0].world_size, "parent")
        first.environ.update({name: ranks[0].environ[name] for name in _JOB_IDS if name in ranks[0].environ})
        ranks.append(first)


def _attach_children(ranks: Sequence[Rank], table: Mapping[int, Process]) -> None:
    """Sorts all descendants of ranks into workers and helpers."""
    by_pid = {rank.pid: rank for rank in ranks}
    for process in table.values():
        owner = process
        for _ in range(64):
            if owner.pid in by_pid or owner.parent not in table:
                break
            owner = table[owner.parent]
        rank = by_pid.get(owner.pid)
        if rank is None or process.pid == rank.pid:
            continue
        (rank.workers if is_worker(process, table) else rank.helpers).append(process.pid)


def _job(
    target: str, root: int | None, ranks: list[Rank], table: Mapping[int, Process], problems: list[str]
) -> Job:
    ranks.sort(key=lambda each: (each.rank is None, each.rank or 0, each.pid))
    expected = next(
        (size for rank in ranks if (size := number(rank.environ, "LOCAL_WORLD_SIZE")) is not None), None
    )
    if expected is not None and len(ranks) < expected:
        problems.append(
            f"{len(ranks)} of {expected} local ranks were found: the others have ended or are hidden from us"
        )
    world = next((rank.world_size for rank in ranks if rank.world_size), None)
    if world is not None and expected is not None and world > expected:
        problems.append(
            f"{world - expected} of {world} ranks run on other hosts: run oomscope attach there too"
        )
    launcher = root if root is not None and root not in {rank.pid for rank in ranks} else None
    scripts = [
        name for pid in (ranks[0].pid, launcher) if pid is not None for name in script_names(table[pid])
    ]
    return Job(
        target=target,
        ranks=ranks,
        script=scripts[0] if scripts else None,
        launcher=launcher,
        run_id=next(
            (rank.environ["TORCHELASTIC_RUN_ID"] for rank in ranks if "TORCHELASTIC_RUN_ID" in rank.environ),
            None,
        ),
        expected_local=expected,
        problems=sorted(set(problems)),
    )


def _subtree(root: int, table: Mapping[int, Process]) -> list[int]:
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    out, left = [], [root]
    while left:
        pid = left.pop(0)
        out.append(pid)
        left += children.get(pid, [])
    return out


def _ancestors(pid: int, table: Mapping[int, Process]) -> set[int]:
    """`pid` and everything above it: we never attach to ourselves or to the shell that started us."""
    found = set()
    while pid in table and pid > 1 and pid not in found:
        found.add(pid)
        pid = table[pid].parent
    return found
