"""Reading values out of JSON that others wrote: every field may be missing, of another type, or hostile.

Texts lose their control characters: a script's name or an error message must not be able to move the cursor
or change the title of the reader's terminal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(value: object, *, limit: int = 4000) -> str:
    """`value` as printable text on possibly several lines, at most `limit` characters."""
    raw = str(value)[: limit * 2].replace("\t", "    ")
    return _CONTROL.sub("", _ANSI.sub("", raw))[:limit]


def text(source: Mapping[str, Any], key: str, default: str = "") -> str:
    """The text at `key` on one line; `default` when there is none."""
    value = source.get(key)
    if value is None or isinstance(value, (dict, list)):
        return default
    return " ".join(clean(value).split()) or default


def integer(source: Mapping[str, Any], key: str) -> int | None:
    """The whole number at `key`; None when it is absent or no finite number."""
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if math.isfinite(value) else None


def real(source: Mapping[str, Any], key: str) -> float | None:
    """The number at `key`; None when it is absent or not finite."""
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def flag(source: Mapping[str, Any], key: str) -> bool | None:
    """True or False; None for anything else."""
    value = source.get(key)
    return value if isinstance(value, bool) else None


def mapping(source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at `key`; an empty one when it is absent or something else."""
    value = source.get(key)
    return value if isinstance(value, Mapping) else {}


def objects(source: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The objects in the list at `key`, other elements left out."""
    return [item for item in items(source, key) if isinstance(item, Mapping)]


def items(source: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list at `key`; an empty one when it is absent or something else."""
    value = source.get(key)
    return value if isinstance(value, (list, tuple)) else ()


def texts(source: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The texts in the list at `key`, each on one line."""
    return tuple(
        " ".join(clean(item).split()) for item in items(source, key) if isinstance(item, (str, int, float))
    )
