"""What the figures of a description say: series, comparisons, and needs against what there is.

"2934 -> 4413 -> 4537 -> 4537 MB" is a plateau, "60.9 GB off, 60.8 on" a fix that changed nothing, "estimate 346 GB,
machine 256 GB" a shortage of host memory. Figures in a person's text are as weak as their words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_NUMBER = r"(?<![\d.])\d{1,9}(?:\.\d{1,6})?"
_UNIT = r"(?:[KMGT]i?B|bytes)"
_CHAIN = re.compile(
    rf"(?<![\w.])(?P<chain>{_NUMBER}(?: ?{_UNIT})?(?:\s*(?:->|→|=>)\s*{_NUMBER}(?: ?{_UNIT})?)+)\s*(?P<what>[A-Za-z]+)?"
)
_OVER_TIME = re.compile(
    r"\b(?:over|after|within|from|between|across)\b.{0,20}\b(?:steps?|iter\w*|batch\w*|epochs?|hours?|updates?)\b",
    re.IGNORECASE,
)
_LIST = re.compile(
    rf"(?<![\w.])(?P<chain>{_NUMBER}(?:, {_NUMBER}){{2,9}}) ?(?P<unit>[KMGT]i?B)\b", re.IGNORECASE
)
_KINDS = r"tensors|objects|allocations|blocks|graphs"
_COUNT = re.compile(
    rf"\b(?P<what>{_KINDS})\b[^.;\d]{{0,30}}\bfrom (?P<a>{_NUMBER}) to (?P<b>{_NUMBER})\b"
    rf"|\bfrom (?P<c>{_NUMBER}) to (?P<d>{_NUMBER}) (?:\w+ )?(?P<kind>{_KINDS})\b",
    re.IGNORECASE,
)
_FAILS = re.compile(
    r"(?<!no )\bOOMs?\b|out of memory|(?<!never )\bfail|\bcrash|\bdies\b|\bkilled\b", re.IGNORECASE
)
_OBJECTS = ("tensors", "objects", "allocations", "blocks", "graphs")
_OVER = r"(?:[^.\d]|(?:bf|fp|float|tf)(?:16|32)|\.(?=[a-z])){0,40}?"
"""Between the two figures of a comparison: words, names of number types, but no other figure."""
_STATE = r"on|off|with|without|enabled|disabled|before|after|non-reentrant|reentrant"
_PAIR = re.compile(
    rf"(?P<a>{_NUMBER}) ?(?P<ua>{_UNIT})? ?\(?(?P<first>{_STATE})\b{_OVER}"
    rf"(?P<b>{_NUMBER}) ?(?P<ub>{_UNIT})? ?\(?(?P<second>{_STATE})\b",
    re.IGNORECASE,
)
_PAIR_AFTER = re.compile(
    rf"\b(?P<first>{_STATE})\b[^.;\d]{{0,20}}(?P<a>{_NUMBER}) ?(?P<ua>{_UNIT})?"
    rf"[,;/ ]{{1,3}}(?:and )?(?P<second>{_STATE})\b[^.;\d]{{0,20}}"
    rf"(?P<b>{_NUMBER}) ?(?P<ub>{_UNIT})?",
    re.IGNORECASE,
)
_OFF = ("off", "without", "disabled", "before")
_NEED = re.compile(
    rf"(?:estimat\w*|needs?|requires?|wants)\D{{0,25}}(?P<need>{_NUMBER}) ?(?P<un>[GT])i?B\b.{{0,30}}?"
    rf"\b(?:machine|host|node|server|RAM)\b\D{{0,12}}(?P<have>{_NUMBER}) ?(?P<uh>[GT])i?B",
    re.IGNORECASE,
)
_TIMES = re.compile(
    rf"\b(?P<n>\d{{1,3}}) (?:ranks|processes|GPUs|procs) (?:x|×|times|of) "
    rf"(?P<each>{_NUMBER}) ?(?P<un>[GT])i?B\b.{{0,50}}?"
    rf"(?:(?P<have>{_NUMBER}) ?(?P<uh>[GT])i?B (?:of )?(?:node|host|machine|RAM)"
    rf"|\b(?:node|host|machine|RAM)\b\D{{0,12}}(?P<has>{_NUMBER}) ?(?P<us>[GT])i?B)",
    re.IGNORECASE,
)
_SAME = 0.03
"""Two peaks this close are the same: allocation and timing move a peak by a per cent or two."""
_LEVEL = 0.005
"""A series whose last two values are this close has come to rest."""


def from_figures(text: str) -> Iterator[tuple[str, str]]:
    """(name of a signal, what it says) for each relation found between the figures of `text`."""
    yield from _series(text)
    yield from _listed(text)
    yield from _counted(text)
    pair = _PAIR.search(text) or _PAIR_AFTER.search(text)
    if pair is not None and _one_is_off(pair) and _unit_of(pair["ua"], pair["ub"]):
        off, on = float(pair["a"]), float(pair["b"])
        if off > 0 and abs(off - on) <= _SAME * off:
            yield "says:no_effect", f"a fix changed nothing (“{pair.group()[:60]}”)"
    times = _TIMES.search(text)
    if times is not None and _exceeds(times):
        sentence = f"together that is more than the machine has (“{times.group()[:60]}”)"
        yield "says:host", sentence
        yield "says:host_each", sentence
    need = _NEED.search(text)
    if need is not None and _giga(need["need"], need["un"]) > _giga(need["have"], need["uh"]):
        sentence = f"more is needed than the machine has (“{need.group()[:60]}”)"
        yield "says:host", sentence
        yield "says:host_needs_more", sentence


def _one_is_off(pair: re.Match[str]) -> bool:
    """Of two figures one is with the fix and one without."""
    return (pair["first"].lower() in _OFF) != (pair["second"].lower() in _OFF)


def _exceeds(times: re.Match[str]) -> bool:
    """So many processes of that size need more than the machine has."""
    number, unit = (times["have"], times["uh"]) if times["have"] else (times["has"], times["us"])
    return int(times["n"]) * _giga(times["each"], times["un"]) > _giga(number, unit)


def _giga(number: str, unit: str) -> float:
    return float(number) * (1024 if unit.upper() == "T" else 1)


def _unit_of(first: str | None, second: str | None) -> bool:
    """At least one of two figures names a unit, and both the same one where both do."""
    return bool(first or second) and (not first or not second or first.upper() == second.upper())


def _series(text: str) -> Iterator[tuple[str, str]]:
    for match in _CHAIN.finditer(text):
        values = [float(n) for n in re.findall(_NUMBER, match["chain"])]
        units = {u.upper().replace("I", "") for u in re.findall(_UNIT, match["chain"])}
        what = (match["what"] or "").lower()
        if len(units) > 1 or values[-1] <= values[0]:
            continue
        quoted = f"(“{match.group().strip()[:60]}”)"
        if what in _OBJECTS:
            yield "says:objects", f"the number of {what} grows {quoted}"
            yield "says:growing", f"the number of {what} grows {quoted}"
        elif not units and what.upper().replace("I", "") not in ("KB", "MB", "GB", "TB"):
            continue  # steps, shapes, versions
        elif len(values) >= 3 and values[-1] - values[-2] <= _LEVEL * values[-1]:
            if not _FAILS.search(text) and values[-2] <= values[-1]:
                yield "says:plateau", f"it rises and then stays {quoted}"
        elif (len(values) >= 3 and values == sorted(values)) or _OVER_TIME.search(text):
            yield "says:growing", f"memory grows {quoted}"


def _listed(text: str) -> Iterator[tuple[str, str]]:
    """Sizes one after the other, separated by commas: "1.9, 2.6, 2.7, 2.7 GB after epochs 1 to 4"."""
    for match in _LIST.finditer(text):
        values = [float(n) for n in match["chain"].split(", ")]
        quoted = f"(“{match.group().strip()[:60]}”)"
        if values != sorted(values) or values[-1] <= values[0]:
            continue
        if values[-1] - values[-2] <= _LEVEL * values[-1]:
            if not _FAILS.search(text):
                yield "says:plateau", f"it rises and then stays {quoted}"
        else:
            yield "says:growing", f"memory grows {quoted}"


def _counted(text: str) -> Iterator[tuple[str, str]]:
    for match in _COUNT.finditer(text):
        first, last = (match["a"], match["b"]) if match["a"] else (match["c"], match["d"])
        if float(last) > float(first):
            what = (match["what"] or match["kind"]).lower()
            sentence = f"the number of {what} grows (“{match.group().strip()[:60]}”)"
            yield "says:objects", sentence
            yield "says:growing", sentence


__all__ = ["from_figures"]
