"""The text that a session's processes wrote: which streams there are, and the end of each.

Logs may be gigabytes and may hold anything; only the last part is read, and escape sequences are taken out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from oomscope.protocol import layout
from oomscope.views.coerce import clean

#: Bytes at the end of a log that are shown.
TAIL_BYTES = 512 << 10
_MAX_LINE = 2000


@dataclass(frozen=True)
class Stream:
    """One log file."""

    name: str
    """What it is, for people: "attempt 1 · rank0 stdout"."""
    path: Path


def streams(session: Path) -> list[Stream]:
    """All log files of a session, the newest attempt first, then what the supervisor wrote."""
    found: list[Stream] = []
    attempts = session / layout.ATTEMPTS_DIR
    for name in sorted(_names(attempts), reverse=True):
        folder = attempts / name
        label = f"attempt {name.lstrip('0') or name}"
        for root, folders, files in os.walk(folder / layout.LOGS_DIR):
            folders.sort(key=_natural)
            inner = Path(root).relative_to(folder / layout.LOGS_DIR)
            found += [
                Stream(f"{label} · {clean(inner / file, limit=200)}", Path(root) / file)
                for file in sorted(files, key=_natural)
            ]
        if (folder / layout.LAUNCHER_LOG).is_file():
            found.append(Stream(f"{label} · {layout.LAUNCHER_LOG}", folder / layout.LAUNCHER_LOG))
    for file in (layout.SUPERVISOR_LOG, layout.SUPERVISOR_FILE):
        if (session / file).is_file():
            found.append(Stream(file, session / file))
    return found


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []


def _natural(name: str) -> tuple[int, str]:
    digits = "".join(c for c in name if c.isdigit())
    return int(digits[:9] or 0), name


def tail(path: Path, *, size: int = TAIL_BYTES) -> tuple[list[str], bool]:
    """The last lines of `path`, printable, and whether earlier ones were left out."""
    with open(path, "rb") as stream:
        stream.seek(0, os.SEEK_END)
        end = stream.tell()
        start = max(0, end - size)
        stream.seek(start)
        raw = stream.read(size)
    lines = raw.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    if start > 0 and lines:
        lines = lines[1:]
    if lines and not lines[-1]:
        lines.pop()
    # A progress bar rewrites its line with carriage returns: its last state is what one would see.
    return [clean(line.rstrip("\r").rpartition("\r")[2], limit=_MAX_LINE) for line in lines], start > 0
