"""fixes.json as rows, plans, and bars of the peak before and after.

Every number here is a prediction. Two ticked fixes are shown with a peak only when they were predicted
together: savings do not add up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oomscope.views import wording
from oomscope.views.coerce import clean, flag, integer, items, mapping, objects, real, text, texts

#: From harmless to far-reaching; the words are explained in docs/fixes.md.
RISKS = ("none", "exact", "rounding", "semantic", "topology")


@dataclass(frozen=True)
class Prediction:
    """A predicted peak of reserved memory with its interval, in bytes."""

    peak_bytes: int
    low_bytes: int
    high_bytes: int
    time_factor: float | None
    next_phase: str
    """Where the peak would be then."""
    fits: bool | None
    basis: str
    tight: bool = False
    """It fits, but the upper end of the interval does not."""

    def verdict(self) -> str:
        """Whether it fits, in one word: "yes", "tight", "no" or "unknown"."""
        if self.fits is None:
            return "unknown"
        return ("tight" if self.tight else "yes") if self.fits else "no"

    def interval(self) -> str:
        """Half the width of the interval as "±0.4", empty when the prediction is a single number."""
        half = (self.high_bytes - self.low_bytes) / 2
        return f"±{wording.gib(half)}" if half >= 0.05 * (1 << 30) else ""


@dataclass(frozen=True)
class FixRow:
    """One fix of the catalogue, as it would act on this job."""

    id: str
    title: str
    risk: str
    applicable: bool
    why_not: str
    effective: bool | None
    why_ineffective: str
    saving_bytes: int | None
    predicted: Prediction | None
    how: tuple[str, ...]
    conflicts: tuple[str, ...]
    effort_s: float | None
    environment: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...]
    runtime: tuple[str, ...]
    diff: str
    why: str
    """What it would act on here."""
    is_advice: bool
    """Nothing is applied for the user: the change is theirs to make."""
    unpredicted: str
    """Why there is no prediction."""
    verify: str
    undo: str
    no_diff: str = ""
    """Why there is no source change for this script."""

    @property
    def can_be_ticked(self) -> bool:
        """Applicable here; whether it helps is another question, and the user's to decide."""
        return self.applicable and not self.is_advice

    def note(self) -> str:
        """Why it does not apply or does not help; else what kind of change it is."""
        if not self.applicable:
            return self.why_not or "does not apply"
        if self.effective is False:
            return self.why_ineffective or "saves less than 3 %"
        if self.is_advice:
            return f"advice: {self.title}"
        if self.predicted is None:
            return self.unpredicted or f"not predicted: {self.title}"
        return ""


@dataclass(frozen=True)
class Plan:
    """Fixes that were predicted together."""

    fixes: tuple[str, ...]
    predicted: Prediction | None


@dataclass(frozen=True)
class Fixes:
    """One attempt's fixes.json, ready to show. Sizes in bytes."""

    capacity_bytes: int | None
    peak_bytes: int | None
    basis: str
    rows: tuple[FixRow, ...]
    plans: tuple[Plan, ...]
    recommended: tuple[str, ...]
    note: str = ""
    """What holds for all of them, for example that nothing could be simulated."""
    outlook: str = ""
    """When nothing that was tried fits: the best, the floor, and what would do."""

    def row(self, fix_id: str) -> FixRow | None:
        return next((row for row in self.rows if row.id == fix_id), None)

    def predicted_for(self, chosen: Collection[str]) -> Prediction | None:
        """The prediction made for exactly `chosen`; None when there is none."""
        wanted = set(chosen)
        if len(wanted) == 1:
            row = self.row(next(iter(wanted)))
            if row is not None and row.predicted is not None:
                return row.predicted
        return next((plan.predicted for plan in self.plans if set(plan.fixes) == wanted), None)

    def conflict(self, chosen: Collection[str]) -> tuple[str, str] | None:
        """Two of `chosen` that exclude each other."""
        for fix_id in chosen:
            row = self.row(fix_id)
            for other in row.conflicts if row else ():
                if other in chosen:
                    return fix_id, other
        return None

    def need_bytes(self) -> int | None:
        """How far the failed run's peak must come down at least; None when it is not above the capacity."""
        if self.peak_bytes is None or self.capacity_bytes is None or self.peak_bytes <= self.capacity_bytes:
            return None
        return self.peak_bytes - self.capacity_bytes


def read(data: Mapping[str, Any]) -> Fixes:
    """The view of one fixes.json; whatever is missing or malformed is simply not shown."""
    rows = [_row(item) for item in objects(data, "fixes") if text(item, "id")]
    recommended = texts(data, "recommended")
    return Fixes(
        capacity_bytes=integer(data, "capacity_bytes"),
        peak_bytes=integer(data, "peak_reserved_bytes"),
        basis=text(data, "basis"),
        rows=tuple(sorted(rows, key=lambda row: _order(row, recommended))),
        plans=tuple(
            Plan(texts(item, "fixes"), _prediction(mapping(item, "predicted"), fits=flag(item, "fits")))
            for item in objects(data, "plans")
        ),
        recommended=recommended,
        note=text(data, "note"),
        outlook=text(data, "outlook"),
    )


def _row(item: Mapping[str, Any]) -> FixRow:
    preview = mapping(item, "preview")
    environment = mapping(preview, "env")
    effective = flag(item, "effective")
    return FixRow(
        id=text(item, "id"),
        title=text(item, "title") or text(item, "id"),
        risk=text(item, "risk", "unknown"),
        applicable=bool(flag(item, "applicable")),
        why_not=text(item, "why_not"),
        effective=effective,
        why_ineffective=text(item, "why_ineffective"),
        saving_bytes=integer(item, "saving_bytes"),
        predicted=_prediction(mapping(item, "predicted")),
        how=texts(item, "how"),
        conflicts=texts(item, "conflicts"),
        effort_s=real(item, "effort_s"),
        environment=tuple((clean(k, limit=200), clean(v, limit=2000)) for k, v in environment.items()),
        arguments=texts(preview, "argv"),
        runtime=tuple(clean(line, limit=400) for line in items(preview, "runtime")),
        diff=clean(preview.get("diff") or "", limit=200_000),
        why=text(item, "why"),
        is_advice=bool(flag(item, "advice")),
        unpredicted=text(item, "unpredicted"),
        verify=text(item, "verify"),
        undo=text(item, "undo"),
        no_diff=text(preview, "diff_note"),
    )


def _prediction(item: Mapping[str, Any], *, fits: bool | None = None) -> Prediction | None:
    peak = integer(item, "peak_reserved_bytes")
    if peak is None:
        return None
    low, high = integer(item, "low_bytes"), integer(item, "high_bytes")
    own = flag(item, "fits")
    return Prediction(
        peak_bytes=peak,
        low_bytes=peak if low is None else low,
        high_bytes=peak if high is None else high,
        time_factor=real(item, "time_factor"),
        next_phase=text(item, "next_peak_phase"),
        fits=own if own is not None else fits,
        tight=bool(flag(item, "tight")),
        basis=text(item, "basis"),
    )


def _order(row: FixRow, recommended: Sequence[str]) -> tuple[int, float, int, str]:
    """Recommended first, then what fits, then by saving; what does not help or apply comes last."""
    if not row.applicable:
        group = 4
    elif row.effective is False:
        group = 3
    elif row.id in recommended:
        group = 0
    elif row.predicted is not None and row.predicted.fits:
        group = 1
    else:
        group = 2
    risk = RISKS.index(row.risk) if row.risk in RISKS else len(RISKS)
    return group, -(row.saving_bytes or 0), risk, row.id


@dataclass(frozen=True)
class Bar:
    """One bar against the capacity. Sizes in bytes."""

    label: str
    value_bytes: int
    low_bytes: int
    high_bytes: int
    kind: str
    """"reached", "needed" (more than the card holds) or "predicted"."""


def bars(fixes: Fixes, chosen: Collection[str]) -> tuple[list[Bar], str]:
    """Bars of the peak before and after `chosen`, and a sentence when there is no "after"."""
    out = []
    if fixes.peak_bytes is not None:
        # More than the card holds cannot have been reached: it is what the job would have needed.
        kind = "needed" if fixes.need_bytes() is not None else "reached"
        out.append(Bar("before", fixes.peak_bytes, fixes.peak_bytes, fixes.peak_bytes, kind))
    if not chosen:
        return out, "tick a fix to see its predicted peak"
    clash = fixes.conflict(chosen)
    if clash is not None:
        return out, f"{clash[0]} and {clash[1]} exclude each other"
    predicted = fixes.predicted_for(chosen)
    if predicted is None:
        if len(chosen) > 1:
            return out, "these fixes were not predicted together, and savings do not add up"
        return out, "no prediction for this fix"
    out.append(Bar("after", predicted.peak_bytes, predicted.low_bytes, predicted.high_bytes, "predicted"))
    return out, ""


@dataclass(frozen=True)
class PreviewLine:
    """One line of what a rerun would change."""

    kind: str
    """"heading", "text", "added", "removed" or "hunk"."""
    text: str


def preview(fixes: Fixes, chosen: Sequence[str], command: Sequence[str]) -> list[PreviewLine]:
    """Everything that the rerun with `chosen` would do differently, as it will be done."""
    rows = [row for row in map(fixes.row, chosen) if row is not None]
    lines: list[PreviewLine] = []
    environment = [pair for row in rows for pair in row.environment]
    if environment:
        lines.append(PreviewLine("heading", "environment"))
        lines += [PreviewLine("added", f"{name}={value}") for name, value in environment]
    arguments = [argument for row in rows for argument in row.arguments]
    lines.append(PreviewLine("heading", "command"))
    lines.append(PreviewLine("text", " ".join([*map(clean, command), *arguments]) or "as before"))
    runtime = [step for row in rows for step in row.runtime]
    if runtime:
        lines.append(
            PreviewLine("heading", "inside the process, after import torch; the script is not changed")
        )
        lines += [PreviewLine("added", step) for step in runtime]
    for row in rows:
        if row.diff:
            note = "what it would be as a source change" if row.runtime else "source change, on a copy"
            lines.append(PreviewLine("heading", f"{row.id}: {note}"))
            lines += [_diff_line(line) for line in row.diff.splitlines()]
        elif row.no_diff:
            lines.append(PreviewLine("text", f"{row.id}: no source change: {row.no_diff}"))
    return lines


def _diff_line(line: str) -> PreviewLine:
    if line.startswith(("+++", "---", "@@")):
        return PreviewLine("hunk", line)
    return PreviewLine({"+": "added", "-": "removed"}.get(line[:1], "text"), line)


_FITS = {
    "yes": "fits",
    "tight": "fits, but the upper end of the interval does not",
    "no": "does not fit",
    "unknown": "unknown whether it fits",
}


def sentences(fixes: Fixes) -> list[str]:
    """The fixes that were looked at, one line each, for `y` and for output without a terminal."""
    lines = []
    for row in fixes.rows:
        if not row.applicable or row.effective is False:
            continue
        if row.predicted is None:
            lines.append(f"{row.id}: {row.title}; {row.note()}")
            continue
        fit = _FITS[row.predicted.verdict()]
        lines.append(
            f"{row.id}: {row.title}; predicted peak {wording.size(row.predicted.peak_bytes)} "
            f"({wording.size(row.predicted.low_bytes)} to {wording.size(row.predicted.high_bytes)}), {fit}, "
            f"time {wording.factor(row.predicted.time_factor)}, risk {row.risk}"
        )
    lines += [
        f"{row.id}: no help: {row.note()}" for row in fixes.rows if row.applicable and row.effective is False
    ]
    return lines
