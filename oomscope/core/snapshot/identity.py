"""Which process wrote a snapshot; apart from `model`, because file names are looked at without numpy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process wrote the file, read from its name; None where the name does not say."""

    rank: int | None = None
    step: int | None = None
    pid: int | None = None
