"""Registries over entry points: built-ins and third parties register the same way, and a broken plugin stays alone.

Groups: `oomscope.collectors`, `oomscope.launchers`, `oomscope.rules`, `oomscope.fixes`, `oomscope.exporters`,
`oomscope.integrations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

GROUPS = (
    "oomscope.collectors",
    "oomscope.launchers",
    "oomscope.rules",
    "oomscope.fixes",
    "oomscope.exporters",
    "oomscope.integrations",
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One entry point: its object, or the reason why it could not be loaded."""

    group: str
    name: str
    target: str
    """`module:attribute` as the distribution declares it."""
    value: Any | None
    error: str | None


def load(group: str) -> list[Loaded]:
    """Every plugin of `group`, sorted by name; one that fails to import is listed with its error.

    Raises:
        ValueError: an unknown group.
    """
    if group not in GROUPS:
        raise ValueError(f"unknown plugin group {group!r}")
    found = []
    for point in sorted(entry_points(group=group), key=lambda each: each.name):
        try:
            value, error = point.load(), None
        except Exception as failure:  # noqa: BLE001  # the plugin boundary: their fault must stay theirs
            value, error = None, f"{type(failure).__name__}: {failure}"
        found.append(Loaded(group, point.name, point.value, value, error))
    return found
