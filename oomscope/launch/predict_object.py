"""The object `oomscope.fixes/1`: what was predicted, for the screen, the report and `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oomscope.core.fixes import Fix, How, JobFacts
from oomscope.core.fixes.environment import OLD_NAME, merge_allocator_settings, split_settings
from oomscope.core.fixes.model import Plan
from oomscope.core.fixes.prediction import Outcome, effect, floor_sentence, outlook
from oomscope.core.fixes.search import Combination, Found
from oomscope.launch.predict_patches import Patches, is_patch_only, patch_options
from oomscope.units import format_bytes

SCHEMA = "oomscope.fixes/1"


@dataclass(frozen=True, slots=True)
class Predictions:
    """Everything that was found out about one failure."""

    facts: JobFacts
    capacity_bytes: int | None
    baseline: Outcome
    """The job without any fix."""
    outcomes: Mapping[Combination, Outcome]
    found: Found
    note: str | None = None
    patches: Patches = field(default_factory=Patches)

    def to_json(self, catalogue: Iterable[Fix]) -> dict[str, Any]:
        """The object for the fixes of `catalogue`, in its order."""
        return {
            "schema": SCHEMA,
            "capacity_bytes": self.capacity_bytes,
            "peak_reserved_bytes": self.baseline.peak_reserved_bytes,
            "peak_phase": self.baseline.peak_phase,
            "basis": self.baseline.basis,
            "fits": self.baseline.fits,
            "floor": floor_sentence(self.facts, self.capacity_bytes) if self.capacity_bytes else None,
            "outlook": outlook(self.baseline, self.outcomes.values(), self.facts, self.capacity_bytes),
            "note": self.note,
            "fixes": [self._fix(fix) for fix in catalogue],
            "plans": [
                {"fixes": list(plan.fixes), "fits": bool(plan.fits), "predicted": predicted(plan)}
                for plan in self.found.plans
            ],
            "recommended": list(self.found.recommended.fixes) if self.found.recommended else None,
        }

    def _fix(self, fix: Fix) -> dict[str, Any]:
        applicable = fix.applicable(self.facts)
        outcome = self.outcomes.get((fix.id,))
        why_not = None if applicable.ok else applicable.why
        if outcome is not None and outcome.refused:
            why_not = "; ".join(outcome.refused.values())
        if is_patch_only(fix) and fix.id in self.patches.refused:
            why_not = self.patches.refused[fix.id]
        usable = applicable.ok and why_not is None
        preview, plan = preview_of(fix, self.facts, self.patches) if usable else (None, None)
        entry: dict[str, Any] = {
            "id": fix.id,
            "title": fix.title,
            "risk": fix.risk.value,
            "applicable": usable,
            "why_not": why_not,
            "why": applicable.why or None if usable else None,
            "effective": None,
            "why_ineffective": None,
            "saving_bytes": None,
            "predicted": None,
            "unpredicted": None,
            "how": self._how(fix),
            "conflicts": sorted(fix.conflicts),
            "effort_s": fix.effort_s,
            "verify": fix.verify,
            "undo": fix.undo,
            "advice": fix.advice,
            "preview": preview,
            "plan": plan,
        }
        if usable and outcome is not None:
            entry.update(self._effect(fix, outcome))
        elif usable and not fix.advice:
            entry["unpredicted"] = self._why_unpredicted(fix)
        return entry

    def _how(self, fix: Fix) -> list[str]:
        """The ways in which it can be applied here; no source patch where that one refuses this script."""
        without = {How.SOURCE} if fix.id in self.patches.refused and not is_patch_only(fix) else set()
        return [how.value for how in fix.how if how not in without]

    def _why_unpredicted(self, fix: Fix) -> str:
        if self.note:
            return "no formula gives its effect"
        return "not tried: fixes that cost less are enough"

    def _effect(self, fix: Fix, outcome: Outcome) -> dict[str, Any]:
        if outcome.failed:
            return {"unpredicted": outcome.failed}
        found = effect(self.baseline, outcome, self.facts, (fix,))
        return {
            "effective": found.effective,
            "why_ineffective": found.why_ineffective,
            "saving_bytes": found.saving_bytes,
            "predicted": predicted(outcome),
        }


def predicted(outcome: Outcome) -> dict[str, Any] | None:
    """The figure of one outcome, None when there is none."""
    if outcome.peak_reserved_bytes is None or outcome.failed:
        return None
    return {
        "peak_reserved_bytes": outcome.peak_reserved_bytes,
        "low_bytes": outcome.low_bytes,
        "high_bytes": outcome.high_bytes,
        "time_factor": outcome.time_factor,
        "next_peak_phase": outcome.peak_phase,
        "fits": outcome.fits,
        "tight": outcome.tight,
        "basis": outcome.basis,
    }


def preview_of(fix: Fix, facts: JobFacts, patches: Patches) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a person sees before applying, and what `launch_changes` reads back."""
    plan = fix.plan(facts)
    preview = {
        "env": merged_env(plan, facts),
        "argv": list(plan.argv),
        "runtime": list(plan.steps),
        "diff": patches.diffs().get(fix.id),
        "diff_note": patches.refused.get(fix.id),
    }
    stored = {
        "env": dict(plan.env),
        "runtime": {key: dict(value) for key, value in plan.runtime.items()},
        "argv": list(plan.argv),
        "patch": plan.patch,
        "patch_options": patch_options(fix.id, facts),
    }
    return preview, stored


def merged_env(plan: Plan, facts: JobFacts) -> dict[str, str]:
    """The variables that `plan` sets, allocator settings merged with the user's own."""
    added = split_settings(plan.env.get(OLD_NAME, ""))
    merged = merge_allocator_settings(facts.env, added, facts.torch_version) if added else {}
    return {**{key: value for key, value in plan.env.items() if key != OLD_NAME}, **merged}


def describe(fixes: Mapping[str, Any]) -> str:
    """One sentence about the outcome of the predictions, for narration."""
    recommended = fixes.get("recommended")
    if recommended:
        plan = next((plan for plan in fixes["plans"] if plan["fixes"] == recommended), None)
        peak = (plan or {}).get("predicted") or {}
        size = (
            format_bytes(peak["peak_reserved_bytes"])
            if peak.get("peak_reserved_bytes")
            else "an unknown size"
        )
        return f"{' + '.join(recommended)} is predicted to bring the peak to {size}"
    if fixes.get("floor"):
        return str(fixes["floor"])
    return "no fix is predicted to make the job fit"
