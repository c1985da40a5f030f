"""What was in memory at the peak: by category and by module, as bars of one scale."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oomscope.views.coerce import integer, objects, text

#: Modules shown; the rest is one line.
_MAX_MODULES = 12


@dataclass(frozen=True)
class Part:
    """A share of the peak, in bytes."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Composition:
    """The parts of one rank's peak, the largest first. Sizes in bytes."""

    peak_bytes: int
    step: int | None
    phase: str
    categories: tuple[Part, ...]
    modules: tuple[Part, ...]


def read(peak: Mapping[str, Any] | None) -> Composition | None:
    """The view of a `peak` record; None when it has no composition."""
    if not isinstance(peak, Mapping):
        return None
    categories = _parts(peak, "composition", "category")
    if not categories:
        return None
    modules = _folded(_parts(peak, "modules", "module"))
    if len(modules) > _MAX_MODULES:
        rest = sum(part.size_bytes for part in modules[_MAX_MODULES - 1 :])
        named = modules[: _MAX_MODULES - 1]
        modules = (*named, Part(f"{len(modules) - len(named)} smaller ones", rest))
    return Composition(
        peak_bytes=integer(peak, "peak_allocated_bytes") or sum(part.size_bytes for part in categories),
        step=integer(peak, "step"),
        phase=text(peak, "phase"),
        categories=categories,
        modules=modules,
    )


_INDEX = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")


def _folded(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Modules that differ by an index only, like a transformer's blocks, as one part: `blocks.* ×24`."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(_INDEX.sub("*", part.name), []).append(part)
    folded = [
        Part(f"{pattern} ×{len(group)}", sum(p.size_bytes for p in group)) if len(group) > 2 else part
        for pattern, group in groups.items()
        for part in (group[:1] if len(group) > 2 else group)
    ]
    return tuple(sorted(folded, key=lambda part: -part.size_bytes))


def _parts(peak: Mapping[str, Any], key: str, name: str) -> tuple[Part, ...]:
    found = [Part(text(item, name, "other"), integer(item, "bytes") or 0) for item in objects(peak, key)]
    return tuple(sorted((part for part in found if part.size_bytes > 0), key=lambda part: -part.size_bytes))
