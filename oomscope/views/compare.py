"""Attempts side by side: predicted and reached peaks, the card, and whether the loss is the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oomscope.views import fixes as fixes_view
from oomscope.views import wording
from oomscope.views.coerce import clean, flag, integer, items, mapping, objects, real, text, texts

#: Losses closer than this, relative to their size, are called equal: the rounding of one fp32 reduction.
_EQUAL = 1e-6


@dataclass(frozen=True)
class AttemptRow:
    """One attempt. Sizes in bytes; the peak is the highest of all its ranks."""

    number: int
    fixes: tuple[str, ...]
    command: tuple[str, ...]
    predicted: fixes_view.Prediction | None
    reached_bytes: int | None
    reached_allocated_bytes: int | None
    capacity_bytes: int | None
    peak_rss_bytes: int | None
    simulated: bool
    steps: int
    exit_code: int | None
    oom: bool
    running: bool
    losses: tuple[float, ...]

    @property
    def word(self) -> str:
        """Either "simulated" or "measured"."""
        return wording.kind_of_number(self.simulated)

    def outcome(self) -> str:
        """How it ended, in a few words."""
        if self.running:
            return "running"
        if self.oom:
            return "out of memory"
        if self.exit_code == 0:
            return "finished"
        return "unknown" if self.exit_code is None else f"exit code {self.exit_code}"

    def within(self) -> bool | None:
        """Whether the reached peak lies in the predicted interval; None when one of the two is missing."""
        if self.predicted is None or self.reached_bytes is None or self.running:
            return None
        return self.predicted.low_bytes <= self.reached_bytes <= self.predicted.high_bytes

    def error_share(self) -> float | None:
        """(reached − predicted) / predicted."""
        if self.predicted is None or not self.reached_bytes or not self.predicted.peak_bytes:
            return None
        return self.reached_bytes / self.predicted.peak_bytes - 1


@dataclass(frozen=True)
class LossComparison:
    """The losses of two attempts over the steps that both reached."""

    word: str
    """"equal", "differs" or "not comparable"."""
    detail: str


@dataclass(frozen=True)
class Check:
    """One part of a rerun's proof."""

    name: str
    word: str
    """One of "equal", "within" (the risk class's tolerance), "differs", "not comparable"."""
    detail: str


@dataclass(frozen=True)
class Proof:
    """proof.json of a rerun: what it shows against the attempt before it."""

    attempt: int
    checks: tuple[Check, ...]
    throughput_ratio: float | None
    """Steps per second after the fix by those before; None when it was not measured."""
    is_accepted: bool
    why_not: str
    not_applied: tuple[str, ...]
    """Fixes that the process did not apply, with what it said."""

    def speed(self) -> str:
        """The change of speed in words; empty when it was not measured."""
        if self.throughput_ratio is None:
            return ""
        change = self.throughput_ratio - 1
        if abs(change) < 0.02:
            return "as fast as before"
        return f"{abs(change):.0%} {'faster' if change > 0 else 'slower'}"


def read_proof(attempt: int, data: Mapping[str, Any]) -> Proof | None:
    """The view of one proof.json; None when it is empty."""
    if not data:
        return None
    checks = tuple(
        Check(label, text(data, key), text(data, f"{key}_detail"))
        for key, label in (("loss", "Loss"), ("buffers", "Buffers"), ("learning_rate", "Learning rate"))
        if text(data, key)
    )
    states = mapping(data, "fixes")
    return Proof(
        attempt=attempt,
        checks=checks,
        throughput_ratio=real(data, "throughput_ratio"),
        is_accepted=bool(flag(data, "accepted")),
        why_not=text(data, "why_not_accepted"),
        not_applied=tuple(
            f"{clean(key)}: {clean(value)}" for key, value in states.items() if value != "applied"
        ),
    )


@dataclass(frozen=True)
class Comparison:
    """All attempts of a session."""

    attempts: tuple[AttemptRow, ...]
    loss: LossComparison | None
    proof: Proof | None = None
    """Of the newest attempt that has one."""

    @property
    def is_comparable(self) -> bool:
        return len(self.attempts) > 1


def attempt_row(
    number: int,
    attempt: Mapping[str, Any],
    result: Mapping[str, Any],
    *,
    predicted: fixes_view.Prediction | None = None,
    simulated: bool = False,
) -> AttemptRow:
    """The row of one attempt from its attempt.json and result.json (empty while it runs)."""
    ranks = objects(result, "ranks")
    losses: tuple[float, ...] = ()
    if ranks:
        losses = tuple(float(v) for v in items(ranks[0], "losses") if isinstance(v, (int, float)))
    return AttemptRow(
        number=number,
        fixes=_fix_ids(attempt),
        command=texts(attempt, "command"),
        predicted=predicted,
        reached_bytes=_highest(ranks, "peak_reserved_bytes"),
        reached_allocated_bytes=_highest(ranks, "peak_allocated_bytes"),
        capacity_bytes=_highest(ranks, "capacity_bytes"),
        peak_rss_bytes=_highest(ranks, "peak_rss_bytes"),
        simulated=attempt.get("device") is not None if "device" in attempt else simulated,
        steps=_highest(ranks, "steps") or 0,
        exit_code=integer(result, "exit_code"),
        oom=bool(flag(result, "oom")),
        running=not result,
        losses=losses,
    )


def _fix_ids(attempt: Mapping[str, Any]) -> tuple[str, ...]:
    named = texts(attempt, "fixes")
    if named:
        return named
    return tuple(text(item, "id") for item in objects(mapping(attempt, "plan"), "fixes") if text(item, "id"))


def _highest(ranks: Sequence[Mapping[str, Any]], key: str) -> int | None:
    return max((value for value in (integer(rank, key) for rank in ranks) if value is not None), default=None)


def compare(attempts: Sequence[AttemptRow], proof: Proof | None = None) -> Comparison:
    """The comparison of `attempts`, losses of the last against the first."""
    loss = compare_losses(attempts[0], attempts[-1]) if len(attempts) > 1 else None
    return Comparison(tuple(attempts), loss, proof)


def compare_losses(before: AttemptRow, after: AttemptRow) -> LossComparison:
    """Losses over the common steps; a simulated device computes no values, so there they prove nothing."""
    if before.simulated or after.simulated:
        return LossComparison("not comparable", "a simulated device computes sizes, not values")
    common = min(len(before.losses), len(after.losses))
    if common == 0:
        return LossComparison("not comparable", "no loss was recorded in both attempts")
    pairs = list(zip(before.losses[:common], after.losses[:common], strict=True))
    if any(not math.isfinite(a) or not math.isfinite(b) for a, b in pairs):
        return LossComparison("not comparable", "a loss is not finite")
    worst = max(abs(a - b) / max(1e-12, abs(a)) for a, b in pairs)
    steps = wording.plural(common, "step")
    if worst <= _EQUAL:
        return LossComparison("equal", f"over {steps}")
    return LossComparison("differs", f"by up to {worst:.2%} over {steps}")


def sentence(row: AttemptRow) -> str:
    """One attempt as a sentence, for `y` and for output without a terminal."""
    fixes = " + ".join(row.fixes) or "no fix"
    parts = [f"attempt {row.number} ({fixes}): {row.outcome()}"]
    if row.reached_bytes is not None:
        parts.append(f"{row.word} peak {wording.size(row.reached_bytes)}")
        if row.capacity_bytes:
            parts.append(f"capacity {wording.size(row.capacity_bytes)}")
    elif row.peak_rss_bytes is not None:
        parts.append(f"peak host memory {wording.size(row.peak_rss_bytes)}")
    if row.predicted is not None:
        verdict = {True: "inside the interval", False: "outside the interval", None: "open"}[row.within()]
        parts.append(f"predicted {wording.size(row.predicted.peak_bytes)}, {verdict}")
    return ", ".join(parts)
