"""Source lines of frames, when the file is at hand.

Paths come from a file that nobody vouches for; so only regular files that end in .py and are of ordinary size
are read.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

MAX_BYTES = 4 << 20


def source_line(file: str, line: int) -> str | None:
    """One line without its indentation, or None."""
    lines = source_lines(file)
    return lines[line - 1].strip() if 0 < line <= len(lines) else None


@lru_cache(maxsize=256)
def source_lines(file: str) -> tuple[str, ...]:
    """All lines of a Python file; empty when it cannot be read."""
    path = Path(file)
    try:
        if (
            not file.endswith(".py")
            or not path.is_absolute()
            or not path.is_file()
            or path.stat().st_size > MAX_BYTES
        ):
            return ()
        return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except (OSError, ValueError):
        return ()
