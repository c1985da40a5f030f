"""Allocator settings that a file does not record, worked out from what the allocator did.

Older files have no `allocator_settings`, and no file says how ties were broken. Some settings show directly
in the sizes of segments and blocks; the rest is tried: the right one replays to the end, a wrong one
diverges within a few hundred allocations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from oomscope.core.allocator.history import ALLOC, SEGMENT_ALLOC, SEGMENT_MAP, History
from oomscope.core.allocator.model import DEFAULT_POOL, AllocatorConfig
from oomscope.core.allocator.model_config import (
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    ROUNDUP_INTERVALS,
    SMALL_SIZE,
    UNLIMITED,
)
from oomscope.units import MIB

#: Values of max_split_size_mb that people set, by how often they are seen in the wild.
USUAL_SPLITS_MB = (128, 512, 256, 64, 32, 1024, 100, 24, 21, 20, 200, 50, 40, 48, 300, 500, 2048)
_DIVISIONS = (0, 2, 4, 8, 16, 32, 64, 128, 256)
#: Any threshold does: which blocks a collection returns depends on their age only.
_SOME_THRESHOLD = 0.8
#: Values of max_split_size_mb that are tried because of the sizes in the rows.
_MOST_SPLITS = 48
_SIZED = frozenset((ALLOC, SEGMENT_ALLOC))


def adapt(
    config: AllocatorConfig, history: History, version: tuple[int, int] | None
) -> tuple[AllocatorConfig, set[str]]:
    """`config` with what the rows show directly, and the names of the settings that this changed."""
    changes: dict[str, object] = {}
    maps = any(code == SEGMENT_MAP for code in history.action)
    if not config.expandable_segments and (maps or any(each.expandable for each in history.segments)):
        changes["expandable_segments"] = True
    size = _large_segment_size(history)
    if size is not None and size != config.large_segment_size:
        changes["large_segment_size"] = size
    expandable = bool(changes.get("expandable_segments", config.expandable_segments))
    if expandable and config.private_pools_expandable:
        private = [each for each in history.segments if each.pool != DEFAULT_POOL]
        plain = bool(private) and not any(each.expandable for each in private)
        if plain or (version is not None and version <= (2, 6)):
            changes["private_pools_expandable"] = False
    return replace(config, **changes), set(changes) - {"private_pools_expandable"}  # type: ignore[arg-type]


def guesses(config: AllocatorConfig, history: History) -> Iterator[AllocatorConfig]:
    """Configurations that could explain a history that `config` does not, the likeliest first."""
    roundings = [replace(config, roundup_power2_divisions=each) for each in divisions_of(history, config)]
    yield from (each for each in roundings if each != config)
    for base in (config, *roundings[:3]):
        if base.max_split_size != UNLIMITED:
            yield replace(base, max_split_size=UNLIMITED)
        for size in USUAL_SPLITS_MB:
            if size * MIB >= base.large_segment_size and size * MIB != base.max_split_size:
                yield replace(base, max_split_size=size * MIB)
    if not config.garbage_collection_threshold:
        yield replace(config, garbage_collection_threshold=_SOME_THRESHOLD)
    for size in _telling_splits(history, config):
        yield replace(config, max_split_size=size)


def _telling_splits(history: History, config: AllocatorConfig) -> list[int]:
    """One max_split_size for each gap between the sizes in the rows: within a gap, all behave the same."""
    sizes = {size for action, size in zip(history.action, history.size, strict=True) if action in _SIZED}
    rounded = sorted({config.round_size(size) for size in sizes if size >= config.large_segment_size})
    splits = {-(-(size + 1) // MIB) * MIB for size in rounded}
    usual = {size * MIB for size in USUAL_SPLITS_MB}
    found = sorted(size for size in splits if size >= config.large_segment_size and size not in usual)
    return found[:: max(1, len(found) // _MOST_SPLITS)]


def divisions_of(history: History, config: AllocatorConfig) -> list[tuple[int, ...]]:
    """roundup_power2_divisions that the sizes of final blocks and of segments allow, the likeliest first.

    One number for all intervals is what people write; after those the best number of each interval.
    """
    seen = _rounded_sizes(history)
    scores: dict[int, dict[int, int]] = {}
    for interval, pairs in seen.items():
        scores[interval] = {}
        for divisions in _DIVISIONS:
            trial = replace(config, roundup_power2_divisions=(divisions,) * ROUNDUP_INTERVALS)
            if all(_explains(trial, *pair) for pair in pairs):
                scores[interval][divisions] = sum(trial.round_size(pair[0]) == pair[1] for pair in pairs)
    uniform = [each for each in _DIVISIONS if all(each in found for found in scores.values())]
    uniform.sort(key=lambda each: -sum(found[each] for found in scores.values()))
    result = [(each,) * ROUNDUP_INTERVALS for each in uniform]
    best = {interval: max(found, key=lambda each: found[each]) for interval, found in scores.items() if found}
    if best:
        mixed, last = [], best[min(best)]
        for interval in range(ROUNDUP_INTERVALS):
            last = best.get(interval, last)
            mixed.append(last)
        if tuple(mixed) not in result:
            result.append(tuple(mixed))
    return result


def _explains(config: AllocatorConfig, requested: int, size: int, kind: str) -> bool:
    """Whether a request of `requested` bytes can have a block or segment of `size` under `config`."""
    rounded = config.round_size(requested)
    if kind == "segment":
        return (rounded + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE == size
    return rounded == size if kind == "exact" else 0 <= size - rounded <= SMALL_SIZE


def _rounded_sizes(history: History) -> dict[int, list[tuple[int, int, str]]]:
    """Interval -> (requested, observed size, how they compare), for what shows the rounding."""
    seen: defaultdict[int, set[tuple[int, int, str]]] = defaultdict(set)
    for segment in history.segments:
        whole = len(segment.blocks) == 1
        for block in segment.blocks:
            if block.live and not whole and block.requested > 0:
                kind = "exact" if segment.small or segment.expandable else "within"
                seen[_interval(block.requested)].add((block.requested, block.size, kind))
    for request, size in _segment_pairs(history):
        if request >= MIN_LARGE_ALLOC:
            seen[_interval(request)].add((request, size, "segment"))
    return {interval: list(pairs) for interval, pairs in seen.items()}


def _interval(size: int) -> int:
    return min(max(size.bit_length() - 21, 0), ROUNDUP_INTERVALS - 1)


def _segment_pairs(history: History) -> Iterator[tuple[int, int]]:
    """(requested bytes, segment bytes) of each allocation that made a segment."""
    action, size = history.action, history.size
    for row in range(len(action) - 1):
        if action[row] == SEGMENT_ALLOC and action[row + 1] == ALLOC:
            yield size[row + 1], size[row]


def _large_segment_size(history: History) -> int | None:
    """Bytes of the segments made for 1 to 10 MiB; for expandable ones the largest step that fits all maps."""
    sizes = {size for request, size in _segment_pairs(history) if SMALL_SIZE < request < MIN_LARGE_ALLOC}
    if len(sizes) == 1:
        return sizes.pop()
    first = [
        history.size[row]
        for row in range(len(history.action) - 1)
        if history.action[row] == SEGMENT_MAP
        and history.action[row + 1] == ALLOC
        and SMALL_SIZE < history.size[row + 1] < MIN_LARGE_ALLOC
    ]
    smallest = min(first, default=None)
    if smallest is not None and smallest >= MIN_LARGE_ALLOC and all(each % smallest == 0 for each in first):
        return smallest
    return None
