"""Rank, step and process id from file names, and the snapshot files of a folder."""

from __future__ import annotations

import re
from pathlib import Path

from oomscope.core.snapshot.identity import Identity

SUFFIXES = (".pickle", ".pkl", ".p", ".html", ".pickle.gz", ".pkl.gz", ".pickle.zst", ".pkl.zst")

_B = r"(?:^|[^a-z0-9])"
_RANK = (
    re.compile(
        r"(?<!local)" + _B + r"(?:global[_-]?)?rank[_\-= ]?(\d{1,7})(?!\d)", re.I
    ),  # rank_3, global_rank-03
    re.compile(_B + r"r(\d{1,7})(?=[^a-z0-9]|$)", re.I),  # r00003-step000120-oom
    re.compile(r"^(\d{1,7})_(?:step|iter)", re.I),  # torchtitan: 000003_step_10
    re.compile(r"(?:[a-z])rank(\d{1,7})(?!\d)", re.I),  # memrank3
    re.compile(_B + r"(?:gpu|cuda|dev|device|dp|worker)[_\-=:]?(\d{1,4})(?=[^a-z0-9]|$)", re.I),
)
_STEP = (
    re.compile(
        r"(?:^|[^a-z])(?:step|iteration|iter|it|ba|batch)[_\-= ]?(\d{1,15})", re.I
    ),  # ep0-ba5: composer
    re.compile(r"(?:^|[^a-z])(?:epoch|ep)[_\-= ]?(\d{1,15})", re.I),
)
_PID = (
    re.compile(_B + r"pid[_\-= ]?(\d{1,10})", re.I),
    re.compile(r"_(\d{2,10})\.\d{10,20}\.", re.I),  # torch.profiler: host_1234.1757044802340508.pickle
    re.compile(r"^r\d+-[^-]+-(\d{2,10})(?=\.|-|$)"),
)


def identity_of(path: Path) -> Identity:
    """What the usual naming schemes say; the folders' names are asked for what the file's does not give.

    Sources: torchtitan (`step_000000000010/000003_step_10.pickle`), torch.profiler (`host_pid.time.pickle`),
    composer, verl, this program.
    """
    name, *folders = path.name, path.parent.name, path.parent.parent.name
    rank, step = _number(_RANK, name), _number(_STEP, name)
    for folder in folders:
        rank = _number(_RANK[:1], folder) if rank is None else rank
        step = _number(_STEP, folder) if step is None else step
    return Identity(rank=rank, step=step, pid=_number(_PID, name))


def _number(patterns: tuple[re.Pattern[str], ...], name: str) -> int | None:
    for pattern in patterns:
        found = pattern.search(name)
        if found:
            return int(found.group(1))
    return None


def snapshot_files(folder: Path) -> list[Path]:
    """Snapshot files in `folder` and one level below, ordered by step, then rank, then name."""
    found = [
        path
        for path in [
            *folder.iterdir(),
            *(inner for sub in folder.iterdir() if sub.is_dir() for inner in sub.iterdir()),
        ]
        if path.name.lower().endswith(SUFFIXES) and path.is_file()
    ]

    def order(path: Path) -> tuple[int, int, str]:
        identity = identity_of(path)
        return (
            identity.step if identity.step is not None else -1,
            identity.rank if identity.rank is not None else -1,
            str(path),
        )

    return sorted(found, key=order)
