"""Rewrites a snapshot without losing its form, optionally without names of people.

The form is torch's own schema as pickle protocol 4. Runs in the loading process, because it needs torch's
objects and not our columns.
Sharing is kept: an object that several rows refer to is changed once, in place, and stays one object.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oomscope.errors import SnapshotError

PROTOCOL = 4
"""What torch's own viewer reads; it refuses 5."""

_HOMES = re.compile(
    r"((?:/home|/Users|/export/home|/data/home|/mnt/home|/u|[A-Za-z]:[\\\\/]+Users)[\\\\/]+)([^\\\\/\s\"':]+)"
)
_SCRATCH = re.compile(
    r"(/(?:scratch|work|nfs|lustre|gpfs|tmp|var/tmp)/(?:users?/|ray_|torchinductor_|slurm_?))([^/\s\"':]+)"
)
_SHARED = frozenset({"Public", "Shared", "shared", "root", "user", "runner", "ubuntu", "app"})
"""Names that say nothing about a person; kept, so that a scrubbed file reads well."""
_ROOT = re.compile(r"^/root(?=/)")


def convert(raw: object, request: dict[str, Any]) -> dict[str, Any]:
    """Write `raw` to `request["target"]`, scrubbed when `request["scrub"]` is set; returns what was done.

    Raises:
        SnapshotError: not a snapshot, or the target cannot be written.
    """
    if isinstance(raw, (list, tuple)):
        raw = {"segments": list(raw), "device_traces": []}
    if type(raw) is not dict or not ("segments" in raw or "device_traces" in raw):
        raise SnapshotError("not a memory snapshot")
    raw.setdefault("segments", [])
    raw.setdefault("device_traces", [])
    replaced: dict[str, str] = {}
    if request.get("scrub"):
        replaced = scrub(raw, extra=request.get("names", []))
    target = Path(request["target"])
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            pickle.dump(raw, file, protocol=PROTOCOL)
        part.replace(target)
    except OSError as error:
        raise SnapshotError(f"{target}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return {"target": str(target), "bytes": target.stat().st_size, "replaced": replaced}


def scrub(raw: Any, *, extra: list[str]) -> dict[str, str]:
    """Replace user names in all texts below `raw`, in place; returns name -> replacement.

    The same name gets the same replacement everywhere, also as a bare word in a path outside the home folder.
    """
    names = _Names(extra)
    _walk(raw, names.learn)
    rename = names.renamer()
    _rewrite(raw, rename)
    return names.replacements


class _Names:
    """User names found in home folders, and what stands in for them."""

    def __init__(self, extra: list[str]) -> None:
        self.replacements: dict[str, str] = {}
        for name in extra:
            self._add(name)

    def _add(self, name: str) -> None:
        if name and name not in _SHARED and not re.fullmatch(r"user\d{2,}", name):
            self.replacements.setdefault(name, f"user{len(self.replacements) + 1:02d}")

    def learn(self, text: str) -> None:
        for pattern in (_HOMES, _SCRATCH):
            for _, name in pattern.findall(text):
                self._add(name)

    def renamer(self) -> Callable[[str], str]:
        if not self.replacements:
            return lambda text: text
        longest_first = sorted(self.replacements, key=len, reverse=True)
        word = re.compile(
            r"(?<![A-Za-z0-9])(" + "|".join(map(re.escape, longest_first)) + r")(?![A-Za-z0-9])",
        )
        return lambda text: word.sub(lambda found: self.replacements[found.group(1)], text)


def _walk(raw: Any, see: Callable[[str], None]) -> None:
    """Call `see` with every text below `raw` once; iterative, each container once."""
    seen: set[int] = set()
    texts: set[str] = set()
    waiting = [raw]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind is str:
            texts.add(item)
        elif kind in (dict, list, tuple) and id(item) not in seen:
            seen.add(id(item))
            if kind is dict:
                waiting.extend(item.keys())
                waiting.extend(item.values())
            else:
                waiting.extend(item)
    for text in sorted(texts):
        see(text)


def _rewrite(raw: Any, rename: Callable[[str], str]) -> None:
    """Put renamed texts in place of the old ones in every dictionary and list below `raw`.

    Tuples hold numbers only in torch's schema and are left alone; texts inside one would stay.
    """
    seen: set[int] = set()
    renamed: dict[int, str] = {}
    keep: list[str] = []

    def new(text: str) -> str:
        found = renamed.get(id(text))
        if found is None:
            found = rename(text)
            found = text if found == text else found
            renamed[id(text)] = found
            keep.append(text)  # so that no other text gets its id
        return found

    waiting = [raw]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind not in (dict, list, tuple) or id(item) in seen:
            continue
        seen.add(id(item))
        if kind is dict:
            for key, value in item.items():
                if type(value) is str:
                    item[key] = new(value)
            waiting.extend(item.values())
        else:
            if kind is list:
                for number, value in enumerate(item):
                    if type(value) is str:
                        item[number] = new(value)
            waiting.extend(item)
