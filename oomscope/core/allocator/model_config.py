"""Settings of the CUDA caching allocator: what `PYTORCH_CUDA_ALLOC_CONF` says, and how sizes are rounded.

Standard library only, Python 3.9: this module also runs inside training jobs.

Sources: c10/core/AllocatorConfig.h and .cpp, c10/cuda/CUDAAllocatorConfig.h (2.13); docs "Memory management".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

from ...units import MIB

#: Smallest block and rounding step of requests. Source: kMinBlockSize.
MIN_BLOCK_SIZE = 512
#: Rounded sizes up to this one go to the small pool. Source: kSmallSize.
SMALL_SIZE = 1 * MIB
#: One segment of the small pool. Source: kSmallBuffer.
SMALL_BUFFER = 2 * MIB
#: Larger requests get a segment of their own size. Source: kMinLargeAlloc.
MIN_LARGE_ALLOC = 10 * MIB
#: Own-size segments are rounded up to this. Source: kRoundLarge.
ROUND_LARGE = 2 * MIB
#: Segment for requests between 1 and 10 MiB. Source: kLargeBuffer; `large_segment_size_mb` from 2.11 on.
LARGE_SEGMENT_SIZE = 20 * MIB
#: "No limit" for max_split_size; larger than any card.
UNLIMITED = 1 << 62
#: Intervals 1 MiB .. 64 GiB that roundup_power2_divisions may set. Source: kRoundUpPowerOfTwoIntervals.
ROUNDUP_INTERVALS = 16

#: Orders of equally large free blocks; see `AllocatorConfig.tiebreak`.
TIEBREAKS = ("address", "segment", "block")

#: Keys that change nothing about device memory: accepted and kept out of the model.
_IGNORED_KEYS = frozenset(
    {
        "backend",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_reserve_segment_size_mb",
        "pinned_free_catch_all",
        "expandable_segments_handle_type",
    }
)

_Value = Union[str, list[str]]


@dataclass(frozen=True)
class AllocatorConfig:
    """Everything that decides where the caching allocator puts a request. Sizes in bytes."""

    expandable_segments: bool = False
    max_split_size: int = UNLIMITED
    """Larger blocks are neither split nor used for smaller requests; `UNLIMITED` when not set."""
    max_non_split_rounding: int = LARGE_SEGMENT_SIZE
    """How much larger than the request an unsplittable block may be."""
    garbage_collection_threshold: float = 0.0
    """Share of the allowed memory above which idle blocks are returned; needs a memory fraction."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * ROUNDUP_INTERVALS
    """One entry per power of two from 1 MiB on: into how many steps the interval is divided, 0 = off."""
    large_segment_size: int = LARGE_SEGMENT_SIZE
    per_process_memory_fraction: float = 1.0
    """Share of the card's total memory that may be reserved (key of 2.10; also set at run time)."""
    graph_capture_record_stream_reuse: bool = False
    throw_on_cudamalloc_oom: bool = False
    """Refuse a request that cannot fit before asking the driver (2.11): no retry and no `oom` row."""
    tiebreak: str = "address"
    """Which of two equally large free blocks is taken: lowest "address" (all releases up to 2.11); oldest
    "segment", then address (pytorch#183591, expected in 2.13); oldest "block" (pytorch#178362, 2.12)."""
    private_pools_expandable: bool = True
    """False for torch <= 2.6, where only the default pool used expandable segments."""

    def __post_init__(self) -> None:
        if self.tiebreak not in TIEBREAKS:
            raise ValueError(f"tiebreak {self.tiebreak!r}: choose from {', '.join(TIEBREAKS)}")
        if len(self.roundup_power2_divisions) != ROUNDUP_INTERVALS:
            raise ValueError(f"roundup_power2_divisions needs {ROUNDUP_INTERVALS} entries")

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """The configuration that `text`, as in PYTORCH_CUDA_ALLOC_CONF, stands for.

        Raises:
            ValueError: an unknown key, a missing value or a value torch refuses; the message names the key.
        """
        config = cls()
        entries = _entries(_tokens(text))
        entries.sort(key=lambda entry: entry[0] != "large_segment_size_mb")  # others are checked against it
        for key, value in entries:
            if key in _IGNORED_KEYS:
                continue
            parser = _PARSERS.get(key)
            if parser is None:
                known = sorted(set(_PARSERS) | _IGNORED_KEYS)
                raise ValueError(f"{key}: unknown allocator option; known are {', '.join(known)}")
            try:
                config = replace(config, **parser(value, config))
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
        return config

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any] | None) -> AllocatorConfig:
        """The configuration of `allocator_settings` in a snapshot (2.3 and later).

        The recorded values win over the recorded text: `expandable_segments:True` can be in the text and
        yet not in effect (pytorch#183387). What has no value of its own is read from the text, if that can
        be parsed.
        """
        if not settings:
            return cls()
        try:
            config = cls.parse(str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""))
        except ValueError:
            config = cls()
        changes: dict[str, Any] = {}
        if "expandable_segments" in settings:
            changes["expandable_segments"] = bool(settings["expandable_segments"])
        if isinstance(settings.get("max_split_size"), int):
            limit = settings["max_split_size"]
            changes["max_split_size"] = limit if 0 < limit < UNLIMITED else UNLIMITED
        if isinstance(settings.get("garbage_collection_threshold"), (int, float)):
            changes["garbage_collection_threshold"] = float(settings["garbage_collection_threshold"])
        if isinstance(settings.get("roundup_power2_divisions"), Mapping):
            changes["roundup_power2_divisions"] = _divisions_of(settings["roundup_power2_divisions"])
        return replace(config, **changes)

    def to_text(self) -> str:
        """The shortest PYTORCH_CUDA_ALLOC_CONF text for this configuration; "" for the defaults."""
        default = AllocatorConfig()
        parts = []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.max_split_size != UNLIMITED:
            parts.append(f"max_split_size_mb:{self.max_split_size // MIB}")
        if self.max_non_split_rounding != default.max_non_split_rounding:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding // MIB}")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold:g}")
        if self.roundup_power2_divisions != default.roundup_power2_divisions:
            parts.append(f"roundup_power2_divisions:{_divisions_text(self.roundup_power2_divisions)}")
        if self.large_segment_size != default.large_segment_size:
            parts.append(f"large_segment_size_mb:{self.large_segment_size // MIB}")
        if self.per_process_memory_fraction != 1.0:
            parts.append(f"per_process_memory_fraction:{self.per_process_memory_fraction:g}")
        return ",".join(parts)

    def to_settings(self, text: str | None = None) -> dict[str, Any]:
        """`allocator_settings` as torch writes them into a snapshot; `text` replaces the derived one."""
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.to_text() if text is None else text,
            "max_split_size": -1 if self.max_split_size == UNLIMITED else self.max_split_size,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": self.expandable_segments,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {
                str(1 << index): value for index, value in enumerate(self.roundup_power2_divisions)
            },
        }

    def round_size(self, requested: int) -> int:
        """Bytes of the block that serves `requested` bytes (>= 1). Source: `round_size` in 2.13."""
        if requested < MIN_BLOCK_SIZE:
            return MIN_BLOCK_SIZE
        log2 = requested.bit_length() - 1
        divisions = self.roundup_power2_divisions[min(max(log2 - 20, 0), ROUNDUP_INTERVALS - 1)]
        if divisions <= 1 or requested <= MIN_BLOCK_SIZE * divisions:
            return (requested + MIN_BLOCK_SIZE - 1) & -MIN_BLOCK_SIZE
        if requested & (requested - 1) == 0:
            return requested
        step = (1 << log2) >> (divisions.bit_length() - 1)  # at least 512
        return (requested + step - 1) & -step

    def segment_size(self, size: int) -> int:
        """Bytes asked from cudaMalloc for a block of `size` (rounded). Source: get_allocation_size()."""
        if size <= SMALL_SIZE:
            return SMALL_BUFFER
        if size < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return (size + ROUND_LARGE - 1) & -ROUND_LARGE

    @property
    def rounds_plainly(self) -> bool:
        """Whether rounding is to 512 bytes only, so that a loop may inline it."""
        return not any(division > 1 for division in self.roundup_power2_divisions)


# ---- the text


def _tokens(text: str) -> list[str]:
    """Words and the four separators; white space vanishes, even inside a word. Source: ConfigTokenizer."""
    tokens: list[str] = []
    word = ""
    for char in text:
        if char in ",:[]":
            if word:
                tokens.append(word)
                word = ""
            tokens.append(char)
        elif not char.isspace():
            word += char
    if word:
        tokens.append(word)
    return tokens


def _entries(tokens: Sequence[str]) -> list[tuple[str, _Value]]:
    """`key:value` pairs; a value is a word or the tokens between brackets."""
    entries: list[tuple[str, _Value]] = []
    index = 0
    while index < len(tokens):
        key = tokens[index]
        if key in ",:[]":
            raise ValueError(f"allocator options: expected a key, found {key!r}")
        if index + 2 >= len(tokens) or tokens[index + 1] != ":":
            raise ValueError(f"{key}: expected ':' and a value")
        index += 2
        if tokens[index] == "[":
            if "]" not in tokens[index:]:
                raise ValueError(f"{key}: missing ']'")
            end = tokens.index("]", index)
            entries.append((key, list(tokens[index + 1 : end])))
            index = end
        elif tokens[index] in ",:]":
            raise ValueError(f"{key}: expected a value, found {tokens[index]!r}")
        else:
            entries.append((key, tokens[index]))
        index += 1
        if index < len(tokens):
            if tokens[index] != ",":
                raise ValueError(f"{key}: expected ',' after the value, found {tokens[index]!r}")
            index += 1
    return entries


def _word(value: _Value) -> str:
    if isinstance(value, list):
        raise ValueError("expected one value, found a list")
    return value


def _integer(value: _Value) -> int:
    text = _word(value)
    if not text.isdigit():
        raise ValueError(f"expected a whole number, found {text!r}")
    return int(text)


def _boolean(value: _Value) -> bool:
    text = _word(value)
    if text not in ("True", "False"):
        raise ValueError(f"expected True or False, found {text!r}")
    return text == "True"


def _fraction(value: _Value) -> float:
    text = _word(value)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number, found {text!r}") from None


def _max_split_size(value: _Value, config: AllocatorConfig) -> dict[str, Any]:
    size = _integer(value) * MIB
    if size < config.large_segment_size:
        raise ValueError(f"must be at least {config.large_segment_size // MIB}, found {size // MIB}")
    return {"max_split_size": min(size, UNLIMITED)}


def _max_non_split_rounding(value: _Value, config: AllocatorConfig) -> dict[str, Any]:
    size = _integer(value) * MIB
    if size < LARGE_SEGMENT_SIZE:
        raise ValueError(f"must be at least {LARGE_SEGMENT_SIZE // MIB}, found {size // MIB}")
    return {"max_non_split_rounding": min(size, UNLIMITED)}


def _large_segment_size(value: _Value, config: AllocatorConfig) -> dict[str, Any]:
    size = _integer(value) * MIB
    if size <= MIN_LARGE_ALLOC:
        raise ValueError(f"must be more than {MIN_LARGE_ALLOC // MIB}, found {size // MIB}")
    return {"large_segment_size": size}


def _threshold(value: _Value, config: AllocatorConfig) -> dict[str, Any]:
    fraction = _fraction(value)
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"must lie between 0.0 and 1.0, found {fraction:g}")
    return {"garbage_collection_threshold": fraction}


def _memory_fraction(value: _Value, config: AllocatorConfig) -> dict[str, Any]:
    fraction = _fraction(value)
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"must lie between 0.0 and 1.0, found {fraction:g}")
    return {"per_process_memory_fraction": fraction}


def _expandable(value: _Value, config: AllocatorConfig) -> dict[str, Any]:
    return {"expandable_segments": _boolean(value)}


def _reuse(value: _Value, config: AllocatorConfig) -> dict[str, Any]:
    return {"graph_capture_record_stream_reuse": _boolean(value)}


def _throw(value: _Value, config: AllocatorConfig) -> dict[str, Any]:
    return {"throw_on_cudamalloc_oom": _boolean(value)}


def _division(text: str) -> int:
    value = _integer(text)
    if value & (value - 1):
        raise ValueError(f"divisions must be a power of two or 0, found {value}")
    return value


def _roundup(value: _Value, config: AllocatorConfig) -> dict[str, Any]:
    """`8` for all intervals, or `[256:1,512:2,>:8]` with sizes in MiB.

    The first boundary also fills everything below it; ">" fills everything above the last one.
    Source: parseRoundUpPower2Divisions().
    """
    if not isinstance(value, list):
        count = _division(value)
        if count == 0:
            raise ValueError("a single number must be a power of two, found 0")
        return {"roundup_power2_divisions": (count,) * ROUNDUP_INTERVALS}
    divisions = [0] * ROUNDUP_INTERVALS
    last: int | None = None
    for start in range(0, len(value), 4):
        item = value[start : start + 4]
        if len(item) < 3 or item[1] != ":" or (len(item) == 4 and item[3] != ","):
            raise ValueError(f"expected [size:divisions,...], found {''.join(value)!r}")
        count = _division(item[2])
        if item[0] == ">":
            first = 0 if last is None else last + 1
            divisions[first:] = [count] * (ROUNDUP_INTERVALS - first)
            continue
        boundary = _integer(item[0])
        if boundary == 0 or boundary & (boundary - 1):
            raise ValueError(f"sizes must be powers of two, found {boundary}")
        index = min(boundary.bit_length() - 1, ROUNDUP_INTERVALS - 1)
        if last is None:
            divisions[:index] = [count] * index
        divisions[index] = count
        last = index
    return {"roundup_power2_divisions": tuple(divisions)}


_PARSERS = {
    "expandable_segments": _expandable,
    "max_split_size_mb": _max_split_size,
    "max_non_split_rounding_mb": _max_non_split_rounding,
    "garbage_collection_threshold": _threshold,
    "roundup_power2_divisions": _roundup,
    "large_segment_size_mb": _large_segment_size,
    "per_process_memory_fraction": _memory_fraction,
    "graph_capture_record_stream_reuse": _reuse,
    "throw_on_cudamalloc_oom": _throw,
}


def _divisions_of(table: Mapping[Any, Any]) -> tuple[int, ...]:
    """The 16 entries of a snapshot's `{"1": 0, "2": 0, … "32768": 0}` (sizes in MiB)."""
    divisions = [0] * ROUNDUP_INTERVALS
    for key, value in table.items():
        text = str(key)
        if text.isdigit() and int(text) > 0 and isinstance(value, int) and value >= 0:
            divisions[min(int(text).bit_length() - 1, ROUNDUP_INTERVALS - 1)] = value
    return tuple(divisions)


def _divisions_text(divisions: Sequence[int]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    return "[" + ",".join(f"{1 << index}:{value}" for index, value in enumerate(divisions)) + "]"
