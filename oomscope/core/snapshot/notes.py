"""Collects what is odd about a file while it is read: each kind once, with a count and the first place."""

from __future__ import annotations

from oomscope.core.snapshot.model import SnapshotWarning


class Notes:
    """Warnings by code."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def add(self, code: str, message: str, count: int = 1) -> None:
        """Note one oddity; only the first message of a code is kept, with how often the code came up."""
        self._first.setdefault(code, message)
        self._counts[code] = self._counts.get(code, 0) + count

    def warnings(self) -> list[SnapshotWarning]:
        return [
            SnapshotWarning(
                code, message if self._counts[code] == 1 else f"{message} ({self._counts[code]} times)"
            )
            for code, message in self._first.items()
        ]
