"""Known bugs by version: a data file that others can extend (`bugs.json` beside this module)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from oomscope.core.diagnosis.evidence import Evidence

SCHEMA = "oomscope.bugs/1"
_CONDITION = re.compile(r"\s*(>=|<=|==|<|>)\s*(\d+(?:\.\d+)*)\s*$")


@dataclass(frozen=True)
class Bug:
    """One known bug."""

    id: str
    package: str
    affected: str
    """Versions, as in requirements: ">=2.10,<2.12"."""
    when: tuple[str, ...]
    """Names of signals that must all be present."""
    unversioned: bool
    cause: str
    title: str
    advice: str
    link: str
    confidence: float


def parse_bugs(data: dict[str, Any]) -> tuple[Bug, ...]:
    """The entries of a bug file.

    Raises:
        ValueError: another schema, or a malformed entry (named by its id).
    """
    if data.get("schema") != SCHEMA:
        raise ValueError(f"not a bug list: schema is {data.get('schema')!r}, expected {SCHEMA!r}")
    found = []
    for entry in data.get("bugs", []):
        name = str(entry.get("id"))
        try:
            bug = Bug(
                id=name,
                package=entry["package"],
                affected=entry["affected"],
                when=tuple(entry["when"]),
                unversioned=bool(entry["unversioned"]),
                cause=entry["cause"],
                title=entry["title"],
                advice=entry["advice"],
                link=entry["link"],
                confidence=float(entry["confidence"]),
            )
            is_affected("0", bug.affected)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"bug {name!r} is malformed: {error!r}") from error
        found.append(bug)
    return tuple(found)


@lru_cache(maxsize=1)
def bugs() -> tuple[Bug, ...]:
    """The entries that come with oomscope."""
    from importlib import resources  # costs more than the whole diagnosis of a line

    text = resources.files(__package__).joinpath("bugs.json").read_text(encoding="utf-8")
    return parse_bugs(json.loads(text))


def version_key(version: str) -> tuple[int, ...]:
    """Numbers of a version: "2.10.0+cu128" -> (2, 10, 0); what is no number ends the key."""
    numbers = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def is_affected(version: str, affected: str) -> bool:
    """Whether `version` meets all conditions of `affected`.

    Raises:
        ValueError: a condition is malformed.
    """
    ours = version_key(version)
    for part in affected.split(","):
        match = _CONDITION.match(part)
        if match is None:
            raise ValueError(f"bad version condition {part!r}")
        other = version_key(match.group(2))
        width = max(len(ours), len(other))
        left, right = ours + (0,) * (width - len(ours)), other + (0,) * (width - len(other))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "<": left < right,
            ">": left > right,
        }
        if not holds[match.group(1)]:
            return False
    return True


def known_bug(e: Evidence, cause: str = "framework_leak") -> Bug | None:
    """The most certain known bug of that cause that the evidence fits."""
    if not e.signals and e.torch_version is None:
        return None
    versions = dict(e.versions)
    if e.torch_version:
        versions["torch"] = e.torch_version
    fitting = []
    for bug in bugs():
        if bug.cause != cause or any(e.signal(name) is None for name in bug.when):
            continue
        version = versions.get(bug.package)
        if (version is None and bug.unversioned) or (
            version is not None and is_affected(version, bug.affected)
        ):
            fitting.append(bug)
    return max(fitting, key=lambda bug: bug.confidence, default=None)
