"""Predicts what each fix would do to this job, alone and together, and says what a rerun has to change.

The ladder: the script on the simulated device with the fix applied; where that is impossible, the bands of
recorded facts. The rung is named in every figure, and everything is written down before a rerun starts.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.fixes import Fix, JobFacts
from oomscope.core.fixes.environment import OLD_NAME, current_settings, join_settings, split_settings
from oomscope.core.fixes.formula import by_formula
from oomscope.core.fixes.model import merge_runtime
from oomscope.core.fixes.prediction import (
    RECORDED,
    SIMULATED,
    Outcome,
    calibration,
    floor_sentence,
    interval,
    mismatch,
)
from oomscope.core.fixes.requests import predict_range
from oomscope.core.fixes.search import Combination, Found, compatible, search, time_factor
from oomscope.errors import PredictionImpossible
from oomscope.launch.job import JobSpec
from oomscope.launch.patches import script_of
from oomscope.launch.predict_card import card_of_job
from oomscope.launch.predict_catalogue import catalogue
from oomscope.launch.predict_changes import Changes, launch_changes, patched_command
from oomscope.launch.predict_facts import (
    composition,
    current_environment,
    facts_of_attempt,
    is_simulated,
    records_of_rank,
    step_peaks,
    with_observation,
)
from oomscope.launch.predict_object import Predictions, describe
from oomscope.launch.predict_patches import Patches, is_patch_only, patch_options
from oomscope.launch.predict_run import PARALLEL, PredictionRuns, RawRun, Trial
from oomscope.simulate.cards import Card
from oomscope.store.session import Attempt, Session

__all__ = ["Changes", "describe", "launch_changes", "patched_command", "predict"]

#: Steps of a prediction run: Adam's state appears in the first, the peak with it in the second.
MIN_STEPS = 2
#: Never more steps than this: a run takes seconds, not minutes.
MAX_STEPS = 40
#: Seconds of a run that importing torch takes, and how long the longer run for varying batches may take.
_START_S = 2.5
_LONGER_S = 60.0
#: Predictions of a job whose runs are slow get the time for so many runs of the baseline's duration, up to a limit: the
#: catalogue has about 16 fixes that need one, and as many combinations may follow.
_RUNS = 24
_LONGEST_S = 900.0

Progress = Callable[[str, int, int], None]


def predict(
    session: Session,
    attempt: Attempt,
    *,
    card: Card | None,
    only: Iterable[str] | None = None,
    budget_s: float = 120.0,
    on_progress: Progress | None = None,
    spec: JobSpec | None = None,
    together: bool = False,
) -> dict[str, Any]:
    """Predict every applicable fix for the failure of `attempt`.

    Args:
        session: the session of the attempt.
        attempt: the failed (or finished) attempt.
        card: the card to predict for; None: only what the records tell.
        only: ids of the fixes to look at; None: all.
        budget_s: no prediction run starts after so many seconds; more when the job is slow to start or to step.
        on_progress: called with (fix, done, total).
        spec: the job without any fix; None: as attempt.json tells.
        together: also predict the fixes of `only` applied together, whether one of them is enough or not.

    Returns:
        The object `oomscope.fixes/1`.
    """
    records = records_of_rank(attempt.path)
    why_none = "the card is not known"
    if card is None:
        card, why_none = card_of_job(records, spec.command if spec else session.info.get("command") or ())
    spec = spec or spec_of(session, attempt, card)
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
    prediction.why_no_card = why_none
    prediction.together = together
    prediction.note = _changed_script(spec, records)
    if not is_simulated(records):
        prediction.measured = step_peaks(records)
        prediction.facts = with_observation(facts, records)  # with --detail
    return prediction.run(time.monotonic() + budget_s, on_progress or (lambda fix, done, total: None))


def spec_of(session: Session, attempt: Attempt, card: Card | None) -> JobSpec:
    """The job of an attempt without its fixes, with our own environment: the job's is not stored whole."""
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
        ranks=_decisive_rank(attempt),
    )


def _chosen_by_libraries(peak: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes by which a simulated peak may be lower and higher, as libraries choose the size of their workspaces."""
    reserved = int(peak.get("peak_reserved_bytes") or 0)
    low, high = (peak.get(f"peak_reserved_{end}_bytes") for end in ("low", "high"))
    return (0 if low is None else reserved - int(low)), (0 if high is None else int(high) - reserved)


def _decisive_rank(attempt: Attempt) -> tuple[int] | None:
    """The rank on which predictions are made: the first that failed, else the fullest; None when none is known."""
    result = attempt.result() or {}
    failed = result.get("first_failing_rank")
    if isinstance(failed, int):
        return (failed,)
    ranks = [each for each in result.get("ranks") or () if isinstance(each.get("rank"), int)]
    fullest = max(ranks, key=lambda each: each.get("peak_reserved_bytes") or 0, default=None)
    return (fullest["rank"],) if fullest is not None else None


def _steps_for_varying(steps: int) -> int:
    """How many steps show most of the sizes that batches take."""
    return min(MAX_STEPS, max(12, 2 * steps))


def _changed_script(spec: JobSpec, records: Sequence[Mapping[str, Any]]) -> str | None:
    """A warning when the script is no longer the one that failed."""
    script = script_of(spec.command, spec.cwd)
    started = next((int(record["t"]) for record in records if record.get("k") == "hello"), None)
    if script is None or started is None or script.stat().st_mtime_ns <= started:
        return None
    return f"{script.name} changed since the failed run: these figures are for the script as it is now"


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
        reached = facts.oom_step + 2 if facts.oom_step is not None else MIN_STEPS
        self.steps = min(MAX_STEPS, max(MIN_STEPS, reached))
        self.knew_that_batches_vary = facts.batch_varies
        if facts.batch_varies:
            self.steps = _steps_for_varying(self.steps)
        self.baseline = Outcome(())
        self.outcomes: dict[Combination, Outcome] = {}
        self.fixes = {fix.id: fix for fix in catalogue()}
        self.note: str | None = None
        self.measured: dict[int, int] = {}
        """Step -> allocated peak of the attempt, when it ran on a real GPU."""
        self.scale = 1.0
        """Measured over simulated; 1.0 when nothing was measured."""
        self.why_no_card = ""
        self.together = False
        self.patches = Patches()

    def run(self, deadline: float, on_progress: Progress) -> dict[str, Any]:
        if self.card is None:
            return self._by_formula(self.why_no_card)
        done = 0
        total = 1

        def progress(name: str) -> None:
            nonlocal done
            done += 1
            on_progress(name, done, max(total, done))

        runs = PredictionRuns(self.session, self.attempt, self.spec, deadline=deadline, progress=progress)
        raw = runs.run("baseline", Trial({"observe": {}}), self.steps)
        progress("baseline")
        if raw.steps or not raw.failed:  # what ended before a step says nothing by what it did not do
            self.facts = with_observation(self.facts, raw.records)
        if raw.failed:
            return self._by_formula(raw.failed)
        raw = self._longer_if_varying(runs, raw)
        runs.give_at_least(min(_LONGEST_S, _RUNS * raw.duration_s / PARALLEL))
        self.scale = calibration(self.measured, step_peaks(raw.records))
        self.note = self.note or mismatch(self.measured, step_peaks(raw.records))
        self.baseline = self._outcome((), raw)
        self.facts = dataclasses.replace(
            self.facts,
            peak_phase=self.baseline.peak_phase,
            peak_allocated_bytes=self.baseline.peak_allocated_bytes,
            peak_reserved_bytes=self.baseline.peak_reserved_bytes,
        )
        self.patches = Patches.of(catalogue(), self.facts, self.spec)
        candidates = self._candidates()
        total = 1 + sum(fix.runs for fix in candidates)
        below_floor = self.capacity is not None and floor_sentence(self.facts, self.capacity) is not None
        found = self._search(search(candidates, self.baseline, below_floor=below_floor), runs, raw)
        return self._object(self._with_all_together(found, candidates, runs, raw))

    def _with_all_together(
        self, found: Found, candidates: list[Fix], runs: PredictionRuns, raw: RawRun
    ) -> Found:
        ids = tuple(fix.id for fix in candidates)
        if not self.together or len(ids) < 2 or ids in self.outcomes or compatible(ids, self.fixes):
            return found
        together = self._measure([ids], runs, raw)
        self.outcomes.update(together)
        return dataclasses.replace(found, plans=(*found.plans, *together.values()))

    def _longer_if_varying(self, runs: PredictionRuns, raw: RawRun) -> RawRun:
        """With batches of different size, more steps are needed to see the largest."""
        if self.knew_that_batches_vary or not self.facts.batch_varies or raw.steps < self.steps:
            return raw
        longer = _steps_for_varying(self.steps)
        each_s = max(0.0, raw.duration_s - _START_S) / max(1, raw.steps)
        if longer <= self.steps or each_s * longer > _LONGER_S:
            return raw
        again = runs.run("baseline", Trial({"observe": {}}), longer)
        if again.failed:
            return raw
        self.steps = longer
        return again

    def _candidates(self) -> list[Fix]:
        return [
            fix
            for fix in catalogue()
            if (self.only is None or fix.id in self.only)
            and not fix.advice
            and fix.applicable(self.facts).ok
            and self._can_be_tried(fix)
            and not self._is_ruled_out(fix)
        ]

    def _can_be_tried(self, fix: Fix) -> bool:
        plan = fix.plan(self.facts)
        return bool(plan.runtime or plan.argv or not fix.runs or fix.id in self.patches.found)

    def _is_ruled_out(self, fix: Fix) -> bool:
        """A fix whose formula says that it saves nothing at this peak needs no run to be called ineffective."""
        band = fix.band(self.facts)
        if band is None or band.low != 0 or band.high != 0:
            return False
        peak = self.baseline.peak_reserved_bytes or 0
        self.outcomes[(fix.id,)] = dataclasses.replace(
            self.baseline, fixes=(fix.id,), basis=f"{RECORDED}: {band.basis}"
        )
        return peak > 0

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
        trials = {ids: self._trial(ids) for ids in wanted}
        raw = runs.run_all({"+".join(ids): trial for ids, trial in trials.items() if trial}, self.steps)
        return {ids: self._outcome(ids, raw.get("+".join(ids), baseline)) for ids in wanted}

    def _trial(self, ids: Combination) -> Trial:
        """What a run with the fixes `ids` applies; nothing for settings of the allocator, which are replayed."""
        plans = [self.fixes[each].plan(self.facts) for each in ids]
        return Trial(
            runtime=merge_runtime(plans),
            argv=tuple(word for plan in plans for word in plan.argv),
            patches={
                each: patch_options(each, self.facts) for each in ids if is_patch_only(self.fixes[each])
            },
        )

    def _outcome(self, ids: Combination, raw: RawRun) -> Outcome:
        """Read one run: replay its requests under the settings of `ids`, with and without the limit."""
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
        limit = None if self.capacity is None else int(self.capacity / self.scale)
        span = predict_range(raw.events, config, capacity_bytes=limit)
        assumed = bool(set(raw.last("simulated").get("assumed_values") or ()) - _HARMLESS)
        ends = int(span.low_bytes * self.scale), int(span.high_bytes * self.scale)
        unseen = self.facts.batch_varies and raw.steps >= self.steps
        below, workspace = _chosen_by_libraries(raw.last("peak"))
        ends = max(0, ends[0] - int(below * self.scale)), ends[1]
        low, high = interval(*ends, self.facts, assumed=assumed, unseen=unseen, workspace_bytes=workspace)
        known_high = interval(*ends, self.facts, assumed=assumed, workspace_bytes=workspace)[1]
        peak = raw.last("peak")
        return Outcome(
            ids,
            peak_reserved_bytes=int(span.middle_bytes * self.scale),
            low_bytes=low,
            high_bytes=high,
            peak_allocated_bytes=int(span.peak_allocated_bytes * self.scale),
            peak_phase=peak.get("phase"),
            composition=composition(peak),
            fits=span.fits,
            tight=bool(span.fits and self.capacity is not None and known_high > self.capacity),
            time_factor=factor,
            refused=refused,
            basis=f"{SIMULATED}, {raw.steps} steps{self._calibrated()}",
            steps=raw.steps,
        )

    # -- the object
    # --------------------------------------------------------------------------------------------------

    def _calibrated(self) -> str:
        return "" if self.scale == 1.0 else f", calibrated by the measured peaks (× {self.scale:.3f})"

    def _object(self, found: Found) -> dict[str, Any]:
        wanted = [fix for fix in catalogue() if self.only is None or fix.id in self.only]
        every = Predictions(
            self.facts, self.capacity, self.baseline, self.outcomes, found, self.note, self.patches
        )
        return every.to_json(wanted)

    def _by_formula(self, reason: str) -> dict[str, Any]:
        self.note = f"no simulation ({reason}); figures are bands from recorded facts"
        self.baseline, self.outcomes, found = by_formula(self.facts, self.fixes, self.capacity)
        self.patches = Patches.of(catalogue(), self.facts, self.spec)
        return self._object(found)


#: Assumed values that do not decide about memory: printed losses, copies to the host.
_HARMLESS = frozenset({"aten::_local_scalar_dense", "copy to host"})
