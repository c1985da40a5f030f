"""Predicts what each fix would do to this job, alone and together, and says what a rerun has to change.

The ladder: the script on the simulated device with the fix applied; where that is impossible, the bands of
recorded facts. The rung is named in every figure, and everything is written down before a rerun starts.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.fixes import CATALOGUE, Fix, JobFacts, get
from oomscope.core.fixes.environment import (
    OLD_NAME,
    current_settings,
    join_settings,
    merge_allocator_settings,
    split_settings,
    why_not_expandable,
)
from oomscope.core.fixes.model import Band, Plan
from oomscope.core.fixes.prediction import Outcome, effect, floor_sentence, interval
from oomscope.core.fixes.requests import predict_range
from oomscope.core.fixes.search import Combination, Found, compatible, search, time_factor
from oomscope.errors import FixError, PredictionImpossible
from oomscope.launch.job import JobSpec
from oomscope.launch.predict_facts import (
    composition,
    current_environment,
    facts_of_attempt,
    records_of_rank,
    with_observation,
)
from oomscope.launch.predict_run import PredictionRuns, RawRun
from oomscope.simulate.cards import Card
from oomscope.store.session import Attempt, Session
from oomscope.units import format_bytes

SCHEMA = "oomscope.fixes/1"
#: Steps of a prediction run: Adam's state appears in the first, the peak with it in the second.
MIN_STEPS = 2
#: Never more steps than this: a run takes seconds, not minutes.
MAX_STEPS = 40
SIMULATED = "simulated device"
RECORDED = "recorded facts, by formula"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Changes:
    """What a rerun changes against the command as the user gave it."""

    env: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=lambda: {"fixes": []})
    argv: list[str] = field(default_factory=list)
    patches: list[str] = field(default_factory=list)
    """Fixes that need a source patch; see `oomscope.launch.patches`."""


def predict(
    session: Session,
    attempt: Attempt,
    *,
    card: Card | None,
    only: Iterable[str] | None = None,
    budget_s: float = 120.0,
    on_progress: Progress | None = None,
    spec: JobSpec | None = None,
) -> dict[str, Any]:
    """Predict every applicable fix for the failure of `attempt`.

    Args:
        session: the session of the attempt.
        attempt: the failed (or finished) attempt.
        card: the card to predict for; None: only what the records tell.
        only: ids of the fixes to look at; None: all.
        budget_s: no prediction run starts after so many seconds.
        on_progress: called with (fix, done, total).
        spec: the job without any fix; None: as attempt.json tells.

    Returns:
        The object `oomscope.fixes/1`.
    """
    spec = spec or spec_of(session, attempt, card)
    records = records_of_rank(attempt.path)
    world = _world_size(records)
    capacity = _capacity(records, card, world)
    facts = facts_of_attempt(
        records,
        attempt.findings(),
        capacity_bytes=capacity,
        env=current_environment(spec.env),
        compute_capability=tuple(card.compute_capability) if card else None,
        world_size=world,
    )
    prediction = _Prediction(session, attempt, spec, facts, card, capacity, set(only) if only else None)
    return prediction.run(time.monotonic() + budget_s, on_progress or (lambda fix, done, total: None))


def spec_of(session: Session, attempt: Attempt, card: Card | None) -> JobSpec:
    """The job of an attempt without its fixes, as far as the session folder tells: secrets are not stored
    there.
    """
    first = (session.attempts() or [attempt])[0]
    info = first.info()
    command = info.get("command") or session.info.get("command") or ()
    if not command:
        raise PredictionImpossible(f"{first.path} does not say which command was run")
    return JobSpec(
        command=tuple(command),
        cwd=Path(info.get("cwd") or session.info.get("cwd") or "."),
        env=dict(os.environ),
        device=card,
        plan={"fixes": []},
        steps=None,
        detail=False,
        role="prediction",
        attempt_dir=attempt.path,
    )


def _world_size(records: Sequence[Mapping[str, Any]]) -> int:
    sizes = [record.get("world_size") for record in records if record.get("k") in ("rank", "simulated")]
    return next((int(size) for size in sizes if size), 1)


def _capacity(records: Sequence[Mapping[str, Any]], card: Card | None, world_size: int) -> int | None:
    """Bytes that the allocator could reserve: what it had and what was free when it failed, else the card's."""
    oom = next((r for r in reversed(records) if r.get("k") == "oom" and r.get("reserved_bytes")), None)
    if oom is not None and oom.get("device_free_bytes") is not None:
        return int(oom["reserved_bytes"]) + int(oom["device_free_bytes"])
    return card.capacity_bytes(world_size) if card else None


class _Prediction:
    """One call of `predict`."""

    def __init__(
        self,
        session: Session,
        attempt: Attempt,
        spec: JobSpec,
        facts: JobFacts,
        card: Card | None,
        capacity: int | None,
        only: set[str] | None,
    ) -> None:
        self.session = session
        self.attempt = attempt
        self.spec = dataclasses.replace(spec, device=card, plan={"fixes": []})
        self.facts = facts
        self.capacity = capacity
        self.only = only
        self.card = card
        self.steps = min(MAX_STEPS, max(MIN_STEPS, (facts.oom_step or 0) + 2))
        self.baseline = Outcome(())
        self.outcomes: dict[Combination, Outcome] = {}
        self.fixes = {fix.id: fix for fix in CATALOGUE}
        self.note: str | None = None

    def run(self, deadline: float, on_progress: Progress) -> dict[str, Any]:
        if self.card is None:
            return self._by_formula("no simulated device: the card is not known")
        done = 0
        total = 1

        def progress(name: str) -> None:
            nonlocal done
            done += 1
            on_progress(name, done, max(total, done))

        runs = PredictionRuns(self.session, self.attempt, self.spec, deadline=deadline, progress=progress)
        raw = runs.run("baseline", {"observe": {}}, self.steps)
        progress("baseline")
        self.facts = with_observation(self.facts, raw.records)
        if raw.failed:
            return self._by_formula(raw.failed)
        raw = self._longer_if_varying(runs, raw)
        self.baseline = self._outcome((), raw)
        candidates = self._candidates()
        total = 1 + sum(fix.runs for fix in candidates)
        below_floor = self.capacity is not None and floor_sentence(self.facts, self.capacity) is not None
        found = self._search(search(candidates, self.baseline, below_floor=below_floor), runs, raw)
        return self._to_json(found)

    def _longer_if_varying(self, runs: PredictionRuns, raw: RawRun) -> RawRun:
        """With batches of different size, more steps are needed to see the largest."""
        if not self.facts.batch_varies or raw.steps < self.steps:
            return raw
        longer = min(MAX_STEPS, max(12, 2 * self.steps))
        if longer <= self.steps or raw.duration_s * longer / max(1, self.steps) > 15:
            return raw
        again = runs.run("baseline", {"observe": {}}, longer)
        if again.failed:
            return raw
        self.steps = longer
        return again

    def _candidates(self) -> list[Fix]:
        return [
            fix
            for fix in CATALOGUE
            if (self.only is None or fix.id in self.only)
            and not fix.advice
            and fix.applicable(self.facts).ok
            and (fix.plan(self.facts).runtime or not fix.runs or fix.plan(self.facts).argv)
        ]

    def _search(self, steps: Any, runs: PredictionRuns, baseline: RawRun) -> Found:
        wanted = next(steps)
        while True:
            answer = self._measure(wanted, runs, baseline)
            self.outcomes.update(answer)
            try:
                wanted = steps.send(answer)
            except StopIteration as stop:
                found: Found = stop.value
                return found

    def _measure(
        self, wanted: Sequence[Combination], runs: PredictionRuns, baseline: RawRun
    ) -> dict[Combination, Outcome]:
        runtime = {ids: self._runtime(ids) for ids in wanted}
        argv = {"+".join(ids): self._argv(ids) for ids in wanted}
        needed = {"+".join(ids): runtime[ids] for ids in wanted if runtime[ids] or argv["+".join(ids)]}
        raw = runs.run_all(needed, self.steps, argv)
        return {ids: self._outcome(ids, raw.get("+".join(ids), baseline)) for ids in wanted}

    def _runtime(self, ids: Combination) -> dict[str, Mapping[str, Any]]:
        merged: dict[str, Mapping[str, Any]] = {}
        for each in ids:
            merged.update(self.fixes[each].plan(self.facts).runtime)
        return merged

    def _argv(self, ids: Combination) -> tuple[str, ...]:
        return tuple(word for each in ids for word in self.fixes[each].plan(self.facts).argv)

    def _outcome(self, ids: Combination, raw: RawRun) -> Outcome:
        """Read one run: its requests under the allocator settings of `ids`, with and without the card's
        limit.
        """
        factor = time_factor(ids, self.fixes)
        if raw.failed:
            return Outcome(ids, failed=raw.failed, time_factor=factor)
        refused = {
            fix: detail
            for fix, (state, detail) in raw.fix_states().items()
            if state in ("refused", "no_effect") and fix != "observe"
        }
        settings = current_settings(self.facts.env, self.facts.alloc_conf)
        for each in ids:
            settings.update(split_settings(self.fixes[each].plan(self.facts).env.get(OLD_NAME, "")))
        config = AllocatorConfig.parse(join_settings(settings))
        span = predict_range(raw.events, config, capacity_bytes=self.capacity)
        assumed = bool(set(raw.last("simulated").get("assumed_values") or ()) - _HARMLESS)
        low, high = interval(span.low_bytes, span.high_bytes, self.facts, assumed=assumed)
        peak = raw.last("peak")
        return Outcome(
            ids,
            peak_reserved_bytes=span.middle_bytes,
            low_bytes=low,
            high_bytes=high,
            peak_allocated_bytes=span.peak_allocated_bytes,
            peak_phase=peak.get("phase"),
            composition=composition(peak),
            fits=span.fits,
            time_factor=factor,
            refused=refused,
            basis=f"{SIMULATED}, {raw.steps} steps",
            steps=raw.steps,
        )

    # -- the object
    # --------------------------------------------------------------------------------------------------

    def _to_json(self, found: Found) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "capacity_bytes": self.capacity,
            "peak_reserved_bytes": self.baseline.peak_reserved_bytes,
            "peak_phase": self.baseline.peak_phase,
            "basis": self.baseline.basis,
            "fits": self.baseline.fits,
            "floor": floor_sentence(self.facts, self.capacity) if self.capacity else None,
            "note": self.note,
            "fixes": [self._fix_json(fix) for fix in CATALOGUE if self.only is None or fix.id in self.only],
            "plans": [
                {"fixes": list(plan.fixes), "fits": bool(plan.fits), "predicted": _predicted(plan)}
                for plan in found.plans
            ],
            "recommended": list(found.recommended.fixes) if found.recommended else None,
        }

    def _fix_json(self, fix: Fix) -> dict[str, Any]:
        applicable = fix.applicable(self.facts)
        outcome = self.outcomes.get((fix.id,))
        why_not = None if applicable.ok else applicable.why
        if outcome is not None and outcome.refused:
            why_not = "; ".join(outcome.refused.values())
        usable = applicable.ok and why_not is None
        entry: dict[str, Any] = {
            "id": fix.id,
            "title": fix.title,
            "risk": fix.risk.value,
            "applicable": usable,
            "why_not": why_not,
            "why": applicable.why if applicable.ok else None,
            "effective": None,
            "why_ineffective": None,
            "saving_bytes": None,
            "predicted": None,
            "how": [how.value for how in fix.how],
            "conflicts": sorted(fix.conflicts),
            "effort_s": fix.effort_s,
            "verify": fix.verify,
            "undo": fix.undo,
            "advice": fix.advice,
        }
        if usable:
            entry["preview"], entry["plan"] = self._preview(fix)
            if outcome is not None:
                entry.update(self._effect_json(fix, outcome))
        return entry

    def _effect_json(self, fix: Fix, outcome: Outcome) -> dict[str, Any]:
        if outcome.failed:
            return {"why_ineffective": None, "unpredicted": outcome.failed}
        found = effect(self.baseline, outcome, self.facts, (fix,))
        return {
            "effective": found.effective,
            "why_ineffective": found.why_ineffective,
            "saving_bytes": found.saving_bytes,
            "predicted": _predicted(outcome),
        }

    def _preview(self, fix: Fix) -> tuple[dict[str, Any], dict[str, Any]]:
        plan = fix.plan(self.facts)
        env = _merged_env(plan, self.facts) if plan.env else {}
        preview = {"env": env, "argv": list(plan.argv), "runtime": list(plan.steps), "diff": None}
        stored = {
            "env": dict(plan.env),
            "runtime": {key: dict(value) for key, value in plan.runtime.items()},
            "argv": list(plan.argv),
            "patch": plan.patch,
        }
        return preview, stored

    def _by_formula(self, reason: str) -> dict[str, Any]:
        """The lowest rung: bands from recorded facts. Plans are not searched for: bands do not add up."""
        self.note = f"no simulation ({reason}); figures are bands from recorded facts"
        self.baseline = Outcome(
            (),
            peak_reserved_bytes=self.facts.peak_reserved_bytes or self.facts.oom_reserved_bytes,
            peak_phase=self.facts.peak_phase,
            basis=RECORDED,
        )
        for fix in self.fixes.values():
            band = fix.band(self.facts) if fix.applicable(self.facts).ok else None
            if band is not None and self.baseline.peak_reserved_bytes:
                self.outcomes[(fix.id,)] = self._banded(fix, band)
        return self._to_json(Found((), None))

    def _banded(self, fix: Fix, band: Band) -> Outcome:
        needed = (self.baseline.peak_reserved_bytes or 0) + (self.facts.requested_bytes or 0)
        low, high = needed - band.high, needed - band.low
        fits = None if self.capacity is None or low <= self.capacity < high else high <= self.capacity
        return Outcome(
            (fix.id,),
            peak_reserved_bytes=(low + high) // 2,
            low_bytes=low,
            high_bytes=high,
            fits=fits,
            time_factor=fix.time_factor,
            basis=f"{RECORDED}: {band.basis}",
        )


#: Assumed values that do not decide about memory: printed losses, copies to the host.
_HARMLESS = frozenset({"aten::_local_scalar_dense", "copy to host"})


def _predicted(outcome: Outcome) -> dict[str, Any] | None:
    if outcome.peak_reserved_bytes is None or outcome.failed:
        return None
    return {
        "peak_reserved_bytes": outcome.peak_reserved_bytes,
        "low_bytes": outcome.low_bytes,
        "high_bytes": outcome.high_bytes,
        "time_factor": outcome.time_factor,
        "next_peak_phase": outcome.peak_phase,
        "fits": outcome.fits,
        "basis": outcome.basis,
    }


def _merged_env(plan: Plan, facts: JobFacts) -> dict[str, str]:
    added = split_settings(plan.env.get(OLD_NAME, ""))
    merged = merge_allocator_settings(facts.env, added, facts.torch_version) if added else {}
    return {**{key: value for key, value in plan.env.items() if key != OLD_NAME}, **merged}


def launch_changes(
    ids: Iterable[str], attempt: Attempt | None, *, env: Mapping[str, str] | None = None
) -> Changes:
    """What a rerun with the fixes `ids` changes.

    Args:
        ids: fixes to apply together.
        attempt: the attempt whose predictions they come from; None: nothing was predicted.
        env: the job's environment without any fix; None: ours.

    Raises:
        FixError: an unknown fix, one that does not apply, is active already, is only advice, or a conflict.
    """
    chosen = [get(each) for each in dict.fromkeys(ids)]
    fixes = {fix.id: fix for fix in chosen}
    conflict = compatible([fix.id for fix in chosen], fixes)
    if conflict:
        raise FixError(conflict, hint="choose one of them")
    stored = {entry["id"]: entry for entry in ((attempt.fixes() if attempt else None) or {}).get("fixes", ())}
    facts = JobFacts(env=current_environment(env))
    settings: dict[str, str] = {}
    other: dict[str, str] = {}
    runtime: dict[str, Mapping[str, Any]] = {}
    argv: list[str] = []
    patches: list[str] = []
    for fix in chosen:
        plan = _plan_of(fix, stored.get(fix.id), facts)
        settings.update(split_settings(plan.env.get(OLD_NAME, "")))
        other.update({key: value for key, value in plan.env.items() if key != OLD_NAME})
        runtime.update(plan.runtime)
        argv += plan.argv
        if plan.patch and not plan.runtime:
            patches.append(fix.id)
    if settings:
        other.update(merge_allocator_settings(facts.env, settings, facts.torch_version))
    plan_json = {"fixes": [{"id": fix, "options": dict(options)} for fix, options in runtime.items()]}
    return Changes(other, plan_json, argv, patches)


def _plan_of(fix: Fix, entry: Mapping[str, Any] | None, facts: JobFacts) -> Plan:
    if fix.advice:
        raise FixError(f"{fix.id} is advice: oomscope does not apply it by itself", hint=fix.title)
    if fix.id == "expandable":
        reason = why_not_expandable(facts.env, None, facts.platform)
        if reason:
            raise FixError(f"expandable refused: {reason}")
    if entry is not None and not entry.get("applicable"):
        raise FixError(f"{fix.id} refused: {entry.get('why_not') or 'it does not apply to this job'}")
    stored = (entry or {}).get("plan")
    if stored:
        return Plan(
            env=stored.get("env") or {},
            runtime=stored.get("runtime") or {},
            argv=tuple(stored.get("argv") or ()),
            patch=stored.get("patch"),
        )
    return fix.plan(facts)


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
