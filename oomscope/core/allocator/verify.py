"""The trust gate: does the model reproduce a history, under which settings, and if not, what does it mean?

No prediction is made for a history that the model does not reproduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from oomscope.core.allocator.history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ACTIONS,
    History,
    read_history,
)
from oomscope.core.allocator.infer import adapt, guesses
from oomscope.core.allocator.initial import describe_ambiguity
from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.model_config import TIEBREAKS, UNLIMITED
from oomscope.core.allocator.operations import read_operations
from oomscope.core.allocator.reconstruct import reconstruct
from oomscope.core.allocator.replay import MAX_READINGS, Replay, Replayer, replay
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot

#: Readings tried under settings that are only guessed.
_READINGS_OF_A_GUESS = 10
#: Rows that may be replayed under guessed settings: about ten seconds.
_ROWS_OF_GUESSES = 12_000_000

#: Settings in the order they are reported, with the attribute of `AllocatorConfig`.
_REPORTED = (
    "expandable_segments",
    "max_split_size",
    "max_non_split_rounding",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "large_segment_size",
    "tiebreak",
)


@dataclass(slots=True)
class Verification:
    """What the replay of one device says."""

    device: int
    history: History
    config: AllocatorConfig
    """Settings of the best replay."""
    replay: Replay | None
    """None when the device has no history."""
    inferred: tuple[str, ...] = ()
    """Settings that were not recorded, or recorded otherwise, and follow from the rows."""
    notes: list[str] = field(default_factory=list)
    """Sentences about settings and ambiguities."""
    meaning: str | None = None
    """What a divergence means; None when exact."""

    @property
    def exact(self) -> bool | None:
        """True when every row and block was reproduced; None without a history."""
        return None if self.replay is None else self.replay.exact

    def to_json(self) -> dict[str, Any]:
        """The entry of `devices` in oomscope.replay/1."""
        divergence = None
        if self.replay is not None and self.replay.divergence is not None:
            found = self.replay.divergence
            divergence = {
                "event_index": found.row,
                "recorded": found.recorded,
                "predicted": found.predicted,
                "meaning": self.meaning or "",
            }
        return {
            "device": self.device,
            "events": len(self.history),
            "exact": self.exact,
            "settings": settings_to_json(self.config),
            "inferred": list(self.inferred),
            "first_divergence": divergence,
            "ambiguities": [] if self.replay is None else ambiguities_of(self.replay),
            "notes": list(self.notes),
        }


def settings_to_json(config: AllocatorConfig) -> dict[str, Any]:
    """The settings that decide placement; sizes in bytes, null for no limit."""
    values: dict[str, Any] = {name: getattr(config, name) for name in _REPORTED}
    values["max_split_size"] = None if config.max_split_size == UNLIMITED else config.max_split_size
    values["roundup_power2_divisions"] = list(config.roundup_power2_divisions)
    return values


def ambiguities_of(replayed: Replay) -> list[dict[str, Any]]:
    """What the rows leave open, with how often."""
    return [
        {"kind": kind, "count": count, "text": describe_ambiguity(kind)}
        for kind, count in sorted(replayed.ambiguities.items())
    ]


def version_of(snapshot: Snapshot) -> tuple[int, int] | None:
    """(2, 6) of a snapshot from torch 2.6, as far as the file shows it."""
    parts = (snapshot.torch_version or "").split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        return None
    return int(parts[0]), int(parts[1])


def verify(
    snapshot: Snapshot,
    device: DeviceSnapshot,
    *,
    start: int = 0,
    config: AllocatorConfig | None = None,
) -> Verification:
    """Replay `device` under its recorded settings, or under what its rows show.

    Args:
        snapshot: the file.
        device: one device of it.
        start: first row; earlier ones are treated as lost.
        config: use exactly these settings instead.
    """
    history = read_history(snapshot, device, start=start)
    recorded = AllocatorConfig.from_settings(snapshot.settings)
    if not history.has_rows:
        adapted, _ = adapt(recorded, history, version_of(snapshot))
        return Verification(device.device, history, config or adapted, None)
    best = replay(history, config) if config else _best(snapshot, history, recorded)
    result = Verification(device.device, history, best.config, best)
    if best.exact:
        result.inferred = _inferred(snapshot, recorded, best.config)
        result.notes.extend(_notes(snapshot, recorded, best.config))
    else:
        result.meaning = _meaning(snapshot, history, best)
    result.notes.extend(f"{each['count']} {each['text']}" for each in ambiguities_of(best))
    return result


def _best(snapshot: Snapshot, history: History, recorded: AllocatorConfig) -> Replay:
    """The first exact replay of the candidates, else the one that got furthest."""
    if history.first_impossible() is not None:
        return replay(history, recorded)
    state = reconstruct(history)
    operations = read_operations(history, free_requests_recorded=state.free_requests_recorded)
    best: Replay | None = None
    spent = 0
    for number, candidate in enumerate(_candidates(snapshot, history, recorded)):
        replayer = Replayer(
            history,
            candidate,
            state=state,
            operations=operations,
            max_readings=MAX_READINGS if number < 3 else _READINGS_OF_A_GUESS,
        )
        found = replayer.run()
        if best is None or found.exact or found.matched > best.matched:
            best = found
        spent += found.matched + len(history) // 10
        if found.exact or found.problems or spent > _ROWS_OF_GUESSES + len(history):
            break
    assert best is not None
    return best


def _candidates(snapshot: Snapshot, history: History, recorded: AllocatorConfig) -> Iterator[AllocatorConfig]:
    version = version_of(snapshot)
    base, _ = adapt(recorded, history, version)
    seen: set[AllocatorConfig] = set()
    for config in (base, *guesses(base, history)):
        for order in TIEBREAKS if config == base else TIEBREAKS[:1]:
            candidate = replace(config, tiebreak=order)
            if candidate not in seen:
                seen.add(candidate)
                yield candidate


def _inferred(snapshot: Snapshot, recorded: AllocatorConfig, used: AllocatorConfig) -> tuple[str, ...]:
    """Names of the settings in use that the file does not record with this value."""
    names = [name for name in _REPORTED if getattr(recorded, name) != getattr(used, name)]
    if not snapshot.settings:
        names = list(_REPORTED[:5]) + [name for name in names if name not in _REPORTED[:5]]
    return tuple(names)


def _notes(snapshot: Snapshot, recorded: AllocatorConfig, used: AllocatorConfig) -> list[str]:
    if not snapshot.settings:
        text = used.to_text() or "the defaults"
        return [f"the file records no settings; the rows show {text}"]
    changed = [
        name for name in _REPORTED if name != "tiebreak" and getattr(recorded, name) != getattr(used, name)
    ]
    if not changed:
        return []
    return [
        f"the recorded settings are not those in effect: the rows show {used.to_text() or 'the defaults'}"
    ]


def _meaning(snapshot: Snapshot, history: History, best: Replay) -> str:
    """What it probably means that no settings explain the rows."""
    actions = set(history.action)
    if best.problems:
        worst = ", ".join(sorted(best.problems))
        return f"the rows contradict each other ({worst}): the file was cut, edited or made up"
    if any(
        address % 512
        for action, address in zip(history.action, history.address, strict=True)
        if action == ALLOC
    ):
        return "addresses that no allocator gives: the file was made up"
    missing = {FREE_REQUESTED, FREE_COMPLETED} - actions
    if ALLOC not in actions:
        return "allocations are missing: the history was recorded with skip_actions, or edited"
    if missing == {FREE_REQUESTED, FREE_COMPLETED} and len(history) > 1000:
        return "frees are missing: the history was recorded with skip_actions, or edited"
    if not actions & SEGMENT_ACTIONS and best.initial.reserved_bytes == 0:
        return "segment rows are missing: the history was recorded with skip_actions, or edited"
    if best.ambiguities:
        return "what the rows leave open about blocks older than the history may be the reason"
    return (
        "other settings than recorded, settings changed during the run, rows left out, "
        "or a release with other rules"
    )
