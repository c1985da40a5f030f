"""Memory limits of control groups, version 1 and 2, and how often the kernel killed because of them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from oomscope.collect.procfs import read_text

#: cgroup v1 writes PAGE_COUNTER_MAX pages for "no limit": LONG_MAX rounded down to pages.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One memory cgroup."""

    path: str
    version: int
    limit_bytes: int | None
    usage_bytes: int
    oom_kills: int
    """Processes the kernel killed for this limit, since the group exists."""
    limit_hits: int
    """How often the limit was reached (v2 `max`, v1 `failcnt`); reclaim usually helped."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Mounts:
    """Where the memory controllers are mounted, None when they are not."""

    v1: str | None
    v2: str | None


def mounts(mountinfo: str | None = None) -> Mounts:
    """Finds the hierarchies in the text of /proc/self/mountinfo."""
    v1 = v2 = None
    for line in (
        mountinfo if mountinfo is not None else read_text("/proc/self/mountinfo") or ""
    ).splitlines():
        left, separator, right = line.partition(" - ")
        fields, kind = left.split(), right.split(" ", 2)
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        point = fields[4]
        if kind[0] == "cgroup2" and v2 is None:
            v2 = point
        elif kind[0] == "cgroup" and "memory" in kind[2].split(",") and v1 is None:
            v1 = point
    return Mounts(v1, v2)


def of_process(pid: int | str = "self", where: Mounts | None = None) -> MemoryGroup | None:
    """The memory cgroup that limits `pid` most: of it and all ancestors the one with the least room left."""
    where = where or mounts()
    groups = [group for path, version in _paths(pid, where) if (group := read(path, version)) is not None]
    limited = [group for group in groups if group.limit_bytes is not None]
    if limited:
        return min(limited, key=lambda group: (group.limit_bytes or 0) - group.usage_bytes)
    return groups[0] if groups else None


def _paths(pid: int | str, where: Mounts) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for line in (read_text(f"/proc/{pid}/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and controllers == "" and where.v2:
            found += [(where.v2 + part, 2) for part in _ancestors(path)]
        elif "memory" in controllers.split(",") and where.v1:
            found += [(where.v1 + part, 1) for part in _ancestors(path)]
    return found


def _ancestors(path: str) -> list[str]:
    out = []
    while path not in ("/", ""):
        out.append(path)
        path = os.path.dirname(path)
    return [*out, ""]


def read(path: str, version: int) -> MemoryGroup | None:
    """The group at `path`, None when there is no memory controller."""
    if version == 2:
        limit = read_text(path + "/memory.max")
        if limit is None:
            return None
        events = _table(read_text(path + "/memory.events"))
        # memory.events counts descendants too, which is what we want of an ancestor that killed.
        kills, hits = events.get("oom_kill", 0), events.get("max", 0)
        usage = read_text(path + "/memory.current")
        bound = None if limit.strip() == "max" else int(limit)
    else:
        limit = read_text(path + "/memory.limit_in_bytes")
        if limit is None:
            return None
        kills = _table(read_text(path + "/memory.oom_control")).get("oom_kill", 0)
        hits = int((read_text(path + "/memory.failcnt") or "0").strip() or 0)
        usage = read_text(path + "/memory.usage_in_bytes")
        bound = int(limit) if int(limit) < _NO_LIMIT else None
    return MemoryGroup(path, version, bound, int((usage or "0").strip() or 0), kills, hits)


def _table(text: str | None) -> dict[str, int]:
    rows = (line.split() for line in (text or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
