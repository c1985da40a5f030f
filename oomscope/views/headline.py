"""The title line and the alert line of a session, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Fact(NamedTuple):
    """A piece of the title line; where room is short, those of the least weight are left out first."""

    text: str
    weight: int


@dataclass(frozen=True)
class Headline:
    """What is being looked at, and its state."""

    glyph: str
    severity: str
    """"error", "warn", "ok" or "info"."""
    word: str
    """The state in one or two capitals: LIVE, OOM, DONE."""
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Alert:
    """The most urgent fact, and the key that leads to its answer."""

    severity: str
    text: str
    key: str = ""
    answer: str = ""
    rank: int | None = None
    """The rank it is about, when it is about one."""

    def sentence(self) -> str:
        """For plain text, where there are no keys."""
        return self.text
