"""Reading a prediction: how much a fix saves, whether it fits, how sure that is, and why it may not help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from oomscope.core.fixes.model import Fix, JobFacts
from oomscope.units import format_bytes

#: Names of the rungs of the ladder, the better one first.
SIMULATED = "simulated device"
RECORDED = "recorded facts, by formula"

#: A saving below this share of the peak is noise: the fix is called ineffective.
EFFECTIVE_SHARE = 0.03

#: Relative error of the simulated device for reserved bytes, by what the model is made of. Transformers with
#: exact shapes: 142 of 154 published peaks within 1 %. Convolutions: cuDNN workspaces are not known (−2 to
#: +18 % seen); where their upper bound is more than the 15 %, the bound
#: counts. Values that the simulation had to assume (unknown masks, routing) widen it further.
_ERROR = {"plain": (0.01, 0.01), "convolution": (0.08, 0.15), "assumed": (0.05, 0.05)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one prediction found for one combination of fixes (none: the job as it is)."""

    fixes: tuple[str, ...]
    peak_reserved_bytes: int | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_phase: str | None = None
    composition: Mapping[str, int] = field(default_factory=dict)
    """Category -> bytes at the peak."""
    fits: bool | None = None
    """Whether the recorded requests can be served by the real capacity."""
    tight: bool = False
    """It fits, but the upper end of the interval does not."""
    time_factor: float = 1.0
    refused: Mapping[str, str] = field(default_factory=dict)
    """Fix id -> why the job could not take it."""
    failed: str | None = None
    """Why there is no figure."""
    basis: str = SIMULATED
    steps: int = 0

    @property
    def known(self) -> bool:
        return self.peak_reserved_bytes is not None and not self.failed and not self.refused


@dataclass(frozen=True, slots=True)
class Effect:
    """One fix, or one plan, beside the job as it is."""

    saving_bytes: int | None
    effective: bool | None
    why_ineffective: str | None


#: How much more a batch later than those that were run may need, when batches differ in size (assumed).
_UNSEEN_BATCHES = 0.10


def interval(
    low: int,
    high: int,
    facts: JobFacts,
    *,
    assumed: bool = False,
    unseen: bool = False,
    workspace_bytes: int = 0,
) -> tuple[int, int]:
    """Widen the range that the address models gave by the known error of the simulated device.

    Args:
        low: smallest peak of reserved bytes over the address models.
        high: the largest.
        facts: what the model is made of.
        assumed: whether values that decide about memory had to be assumed.
        unseen: whether batches differ in size and the run was ended before the script's own end.
        workspace_bytes: upper bound of what libraries may take beside what was simulated.
    """
    below, above = _ERROR["convolution" if facts.has_convolution else "plain"]
    if assumed:
        below, above = max(below, _ERROR["assumed"][0]), max(above, _ERROR["assumed"][1])
    if unseen:
        above = max(above, _UNSEEN_BATCHES)
    with_workspace = int(high * (1 + _ERROR["plain"][1])) + workspace_bytes
    return int(low * (1 - below)), max(int(high * (1 + above)), with_workspace)


#: A measured peak further from the simulated one than this is no calibration: something else is different.
_CALIBRATION_LIMIT = 1.25


def calibration(measured: Mapping[int, int], simulated: Mapping[int, int]) -> float:
    """Measured over simulated allocated peak: the median over the steps that both have, 1.0 without any.

    Args:
        measured: step -> peak of allocated bytes on the real GPU.
        simulated: the same of the prediction run without fixes.
    """
    middle = _ratio(measured, simulated)
    return middle if middle is not None and _is_calibration(middle) else 1.0


def mismatch(measured: Mapping[int, int], simulated: Mapping[int, int]) -> str | None:
    """A warning when the measured peaks are too far from the simulated ones to calibrate them, else None."""
    middle = _ratio(measured, simulated)
    if middle is None or _is_calibration(middle):
        return None
    return (
        f"the run measured {middle:.2f} times the peak of its simulation: something it does is not simulated, "
        "so take these figures as a comparison of fixes, not as sizes"
    )


def _ratio(measured: Mapping[int, int], simulated: Mapping[int, int]) -> float | None:
    common = [step for step in measured if measured[step] and simulated.get(step)]
    ratios = sorted(measured[step] / simulated[step] for step in common)
    return ratios[len(ratios) // 2] if ratios else None


def _is_calibration(ratio: float) -> bool:
    return 1 / _CALIBRATION_LIMIT <= ratio <= _CALIBRATION_LIMIT


def effect(baseline: Outcome, outcome: Outcome, facts: JobFacts, fixes: tuple[Fix, ...]) -> Effect:
    """The saving against the job as it is; a saving below 3 % counts as none, with the reason."""
    if not baseline.known or not outcome.known:
        return Effect(None, None, None)
    before, after = baseline.peak_reserved_bytes or 0, outcome.peak_reserved_bytes or 0
    saving = before - after
    if saving >= EFFECTIVE_SHARE * before:
        return Effect(saving, True, None)
    return Effect(saving, False, _reason(baseline, outcome, facts, fixes, saving))


def _reason(baseline: Outcome, outcome: Outcome, facts: JobFacts, fixes: tuple[Fix, ...], saving: int) -> str:
    before = baseline.peak_reserved_bytes or 0
    change = (
        f"saves {format_bytes(saving)} of {format_bytes(before)}"
        if saving > 0
        else f"needs {format_bytes(-saving)} more"
        if saving < 0
        else "changes nothing"
    )
    if outcome.basis.startswith(RECORDED):
        formula = outcome.basis.partition(": ")[2]
        return f"{change}: {formula}" if saving else formula
    if all(not fix.runs for fix in fixes):
        unused = before - (baseline.peak_allocated_bytes or before)
        return f"{change}: at the peak only {format_bytes(unused)} of the reserved bytes were not in use"
    if outcome.peak_phase and baseline.peak_phase and outcome.peak_phase != baseline.peak_phase:
        return f"{change}: the peak moves to {_phase(outcome.peak_phase)}, filled by {_filled(outcome)}"
    return f"{change}: the peak in {_phase(outcome.peak_phase)} is filled by {_filled(outcome)}"


def _phase(phase: str | None) -> str:
    return {
        "forward": "the forward pass",
        "backward": "the backward pass",
        "optimizer": "the optimizer step",
    }.get(phase or "", f"phase {phase}" if phase else "the run")


def _filled(outcome: Outcome, top: int = 2) -> str:
    parts = sorted(outcome.composition.items(), key=lambda item: -item[1])[:top]
    return " and ".join(f"{category} ({format_bytes(size)})" for category, size in parts) or "other memory"


def outlook(
    baseline: Outcome, reached: Iterable[Outcome], facts: JobFacts, capacity_bytes: int | None
) -> str | None:
    """What to say when nothing that was tried fits: the best, the floor, and what would do; else None."""
    known = [each for each in reached if each.known]
    if capacity_bytes is None or baseline.fits is not False or any(each.fits is not False for each in known):
        return None
    peaks = {each.fixes: each.peak_reserved_bytes or 0 for each in (baseline, *known)}
    best = min(peaks, key=lambda fixes: peaks[fixes])
    needed = format_bytes(peaks[best])
    text = f"nothing tried fits into {format_bytes(capacity_bytes)}; lowest: {needed}"
    text += f" by {' + '.join(best)}" if best else " without any fix"
    static = facts.static_bytes
    floor = floor_sentence(facts, capacity_bytes)
    if floor:
        return f"{text}; {floor}"
    if static is not None:
        text += f"; parameters, gradients and optimizer state take {format_bytes(static)} of it"
    return f"{text}; a card with {needed} free, a smaller batch or a smaller model would do"


def floor_sentence(facts: JobFacts, capacity_bytes: int) -> str | None:
    """What to say when no change of activations can make the job fit, else None."""
    static = facts.static_bytes
    if static is None or static <= capacity_bytes:
        return None
    return (
        f"parameters, gradients and optimizer state alone take {format_bytes(static)}, more than the "
        f"{format_bytes(capacity_bytes)} of the card: only sharding over more GPUs, offload to host memory or a "
        "smaller state (8-bit optimizer, 16-bit parameters, smaller model) can help"
    )
