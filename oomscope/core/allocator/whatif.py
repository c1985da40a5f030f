"""What another allocator setting would have needed, for a history that the model reproduces.

Two numbers per setting. *Peak reserved* is what the allocator would have taken with room to spare; it
decides nothing, because at a shortage it returns whole segments and goes on. *Minimum capacity* is the
smallest device on which every request would have been served: that decides an out-of-memory error.

Where the driver places segments is unknown, so everything is computed under several address models and
given as a range; "fits" is claimed only when all agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oomscope.core.allocator.bounds import Lifetimes, offline_placement
from oomscope.core.allocator.history import FREE_REQUESTED, OOM, History
from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.model_config import UNLIMITED
from oomscope.core.allocator.model_driver import ADDRESS_MODELS
from oomscope.core.allocator.replay import Replay, Replayer
from oomscope.core.allocator.requests import RequestTrace, requests_of
from oomscope.core.allocator.simulate import Outcome, Prepared, run
from oomscope.core.allocator.verify import Verification, verify
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot
from oomscope.units import MIB

#: Settings worth trying, in the order of preference for a recommendation. roundup_power2_divisions is not
#: among them: it never lowered the need in 64 recorded traces.
USUAL_CONFIGS = ("", "expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:512")

#: Minimum capacity is searched to this part of the result, or 2 MiB.
_TOLERANCE = 2048
_GRANULE = 2 * MIB
#: Most allocations for which the placement with knowledge of the future is computed: it takes half a second.
_OFFLINE_SLOTS = 5000
#: Requests a second that a run is assumed to manage before one was timed.
_ASSUMED_SPEED = 1_000_000


@dataclass(slots=True)
class ConfigAssessment:
    """One setting; sizes in bytes, ranges over address models."""

    config: AllocatorConfig
    peak_reserved_bytes: tuple[int, int]
    min_capacity_bytes: tuple[int, int] | None
    """Smallest capacity on which everything fits; None when the time was not enough to search it."""
    retries: int
    """Most cudaMalloc retries (synchronise, return everything) at the given capacity; 0 without one."""
    fits: bool | None
    """Whether everything fits into the given capacity: None when models disagree or no capacity is known."""
    first_oom_row: int | None = None
    """Row of the first request that does not fit in the given capacity."""
    models: int = 0
    """Address models that were run."""

    def to_json(self) -> dict[str, Any]:
        return {
            "conf": self.config.to_text(),
            "peak_reserved_bytes": list(self.peak_reserved_bytes),
            "min_capacity_bytes": None if self.min_capacity_bytes is None else list(self.min_capacity_bytes),
            "retries": self.retries,
            "fits": self.fits,
        }


@dataclass(slots=True)
class Assessment:
    """All settings for one device."""

    device: int
    trusted: bool
    """The model reproduces the history; without that nothing is predicted."""
    reason: str | None
    """Why not, in a sentence."""
    live_peak_bytes: int = 0
    """Highest sum of live blocks: no setting needs less."""
    offline_bytes: int | None = None
    """What placing every block with knowledge of the future would take, in one range; None when not computed.
    What lies between it and the smallest device is fragmentation."""
    capacity_bytes: int | None = None
    capacity_source: str | None = None
    """"given" or "oom row"."""
    recorded: AllocatorConfig | None = None
    configs: list[ConfigAssessment] = field(default_factory=list)
    recommended: AllocatorConfig | None = None
    window: tuple[int, int] | None = None
    """Rows that were run, when not all of them."""
    notes: list[str] = field(default_factory=list)

    @property
    def shortfall_bytes(self) -> int | None:
        """How much the live peak exceeds the capacity: positive means that no setting can help."""
        return None if self.capacity_bytes is None else self.live_peak_bytes - self.capacity_bytes

    def find(self, config: AllocatorConfig) -> ConfigAssessment | None:
        """The assessment of a setting; only what its text says is compared."""
        return next((each for each in self.configs if each.config.to_text() == config.to_text()), None)

    def to_json(self) -> dict[str, Any]:
        """The entry of `devices` in oomscope.whatif/1."""
        return {
            "device": self.device,
            "live_peak_bytes": self.live_peak_bytes,
            "offline_bytes": self.offline_bytes,
            "capacity_bytes": self.capacity_bytes,
            "configs": [each.to_json() for each in self.configs],
            "recommended": None if self.recommended is None else self.recommended.to_text(),
            "recorded": None if self.recorded is None else self.recorded.to_text(),
            "window": None if self.window is None else list(self.window),
            "reason": self.reason,
            "notes": list(self.notes),
        }


class Budget:
    """Time that may still be spent."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds
        self.speed = float(_ASSUMED_SPEED)
        """Requests a second, as measured by the last run."""

    def allows(self, requests: int) -> bool:
        """Whether a run of so many requests is likely to end in time."""
        return self._end is None or self._clock() + requests / self.speed <= self._end

    @property
    def left(self) -> float | None:
        return None if self._end is None else self._end - self._clock()

    def timed(self, requests: int, work: Callable[[], Outcome]) -> Outcome:
        """Run `work` and learn from it how fast runs are."""
        start = self._clock()
        outcome = work()
        elapsed = self._clock() - start
        if requests > 1000 and elapsed > 0:
            self.speed = requests / elapsed
        return outcome


class Evaluation:
    """One setting under several address models, run as far as the time allows.

    Args:
        trace: the requests.
        config: the setting.
        capacity: bytes that the device has for this process, for `fits` and `retries`.
        total_bytes: the card's total memory, for memory fractions.
        budget: time.
    """

    def __init__(
        self,
        trace: RequestTrace,
        config: AllocatorConfig,
        *,
        capacity: int | None = None,
        total_bytes: int | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.trace = trace
        self.config = config
        self.capacity = capacity
        self.total_bytes = total_bytes
        self.budget = budget or Budget(None)
        self._prepared = Prepared(trace, config)
        self._peaks: dict[str, int] = {}
        self._limited: dict[str, Outcome] = {}
        self._needs: dict[str, int] = {}
        self._floor: int | None = None

    def run(self, addresses: str) -> None:
        """Peak without a limit, and fit in the capacity, under one address model; the first one always."""
        if self._peaks and not self.budget.allows(2 * len(self.trace)):
            return
        outcome = self.budget.timed(len(self.trace), lambda: self._once(addresses, None, False))
        self._peaks[addresses] = outcome.peak_reserved_bytes
        if self.capacity is not None:
            self._limited[addresses] = self._once(addresses, self.capacity, False)

    def search(self, addresses: str) -> None:
        """Smallest capacity, in steps of 2 MiB, on which everything fits; nothing when time runs out.

        By bisection between the live peak and the unlimited peak, on which everything fits. A larger capacity can
        in rare cases fail where a smaller one does not; the result is a capacity that was run and fits.
        """
        high = self._peaks.get(addresses)
        if high is None:
            return
        if self._floor is None:
            self._floor = self.trace.live_peak(self.config)[0]
        low = max(0, self._floor - 1) // _GRANULE * _GRANULE  # does not fit, or just
        if self.config.per_process_memory_fraction < 1.0:
            low = 0
        tolerance = max(_GRANULE, high // _TOLERANCE // _GRANULE * _GRANULE)
        while high - low > tolerance:
            if not self.budget.allows(len(self.trace)):
                return
            middle = (low + high) // 2 // _GRANULE * _GRANULE
            if middle <= low:
                break
            if self._once(addresses, middle, True).fits:
                high = middle
            else:
                low = middle
        self._needs[addresses] = high

    def result(self, models: Sequence[str]) -> ConfigAssessment:
        """What is known by now; `fits` only when every model of `models` was run and all agree."""
        fitting = {outcome.fits for outcome in self._limited.values()}
        decided = len(fitting) == 1 and all(each in self._limited for each in models)
        failed = [each.first_oom_row for each in self._limited.values() if not each.fits]
        needs = self._needs.values()
        return ConfigAssessment(
            config=self.config,
            peak_reserved_bytes=(min(self._peaks.values()), max(self._peaks.values())),
            min_capacity_bytes=(min(needs), max(needs)) if needs else None,
            retries=max((outcome.retries for outcome in self._limited.values()), default=0),
            fits=fitting.pop() if decided else None,
            first_oom_row=failed[0] if failed else None,
            models=len(self._peaks),
        )

    def _once(self, addresses: str, capacity: int | None, stop_at_oom: bool) -> Outcome:
        return run(
            self.trace,
            self.config,
            capacity=capacity,
            addresses=addresses,
            total_bytes=self.total_bytes,
            prepared=self._prepared,
            stop_at_oom=stop_at_oom,
        )


def evaluate(
    trace: RequestTrace,
    config: AllocatorConfig,
    *,
    capacity: int | None = None,
    total_bytes: int | None = None,
    search: bool = True,
    models: Sequence[str] = ADDRESS_MODELS,
    budget: Budget | None = None,
) -> ConfigAssessment:
    """Peak, minimum capacity and fit of one setting, from requests alone.

    The light entry: a request trace of a simulated run without a limit is enough, no snapshot is needed.

    Args:
        trace: the requests.
        config: the setting.
        capacity: bytes that the device has for this process, for `fits` and `retries`.
        total_bytes: the card's total memory, for memory fractions.
        search: also search the minimum capacity (about ten runs per model).
        models: address models; at least the first one is run.
        budget: time; models and the search are dropped when it runs out.
    """
    evaluation = Evaluation(trace, config, capacity=capacity, total_bytes=total_bytes, budget=budget)
    _run_all([evaluation], models, search)
    return evaluation.result(models)


def _run_all(evaluations: Sequence[Evaluation], models: Sequence[str], search: bool) -> None:
    """What matters most first: one model for every setting, then the other models, then the search."""
    for addresses in models:
        for evaluation in evaluations:
            evaluation.run(addresses)
    for addresses in models if search else ():
        for evaluation in evaluations:
            evaluation.search(addresses)


def assess(
    snapshot: Snapshot,
    device: DeviceSnapshot,
    *,
    capacity: int | None = None,
    configs: Sequence[AllocatorConfig] | None = None,
    time_budget_s: float | None = None,
    verification: Verification | None = None,
) -> Assessment:
    """Which settings would have served this history, and on how small a device.

    Args:
        snapshot: the file.
        device: one device of it.
        capacity: bytes that the device has for this process; default what an `oom` row shows.
        configs: settings to try besides the recorded one; default `USUAL_CONFIGS`.
        time_budget_s: seconds to spend; beyond, fewer address models, no search, or a window of rows.
        verification: result of `verify(snapshot, device)`, if at hand.
    """
    budget = Budget(time_budget_s)
    checked = verification or verify(snapshot, device)
    if checked.replay is None:
        return Assessment(device.device, False, "the device has no history")
    if not checked.exact:
        return Assessment(
            device.device, False, f"the model does not reproduce the history: {checked.meaning}"
        )
    replayed, history = checked.replay, checked.history
    result = Assessment(device.device, True, None, recorded=checked.config)
    result.capacity_bytes, result.capacity_source = capacity, None if capacity is None else "given"
    if capacity is None and replayed.capacity_at_oom is not None:
        result.capacity_bytes, result.capacity_source = replayed.capacity_at_oom, "oom row"
    wanted = _wanted_configs(checked.config, configs)
    trace = _trace_within(budget, result, replayed, history, len(wanted))
    result.live_peak_bytes, _ = trace.live_peak()
    if trace.n_slots <= _OFFLINE_SLOTS:
        result.offline_bytes = offline_placement(Lifetimes.of(trace))
    evaluations = [
        Evaluation(trace, config, capacity=result.capacity_bytes, budget=budget) for config in wanted
    ]
    _run_all(evaluations, ADDRESS_MODELS, True)
    result.configs = [each.result(ADDRESS_MODELS) for each in evaluations]
    if any(each.models < len(ADDRESS_MODELS) or each.min_capacity_bytes is None for each in result.configs):
        result.notes.append("the time allowed was not enough for all address models or the search")
    if checked.config.garbage_collection_threshold and checked.config.per_process_memory_fraction == 1.0:
        result.notes.append(
            "garbage collection is left out: the memory fraction that it depends on is not recorded"
        )
    result.recommended = recommend(result)
    return result


def _wanted_configs(
    recorded: AllocatorConfig, configs: Sequence[AllocatorConfig] | None
) -> list[AllocatorConfig]:
    """The recorded setting first, then the others, each once."""
    others = [AllocatorConfig.parse(text) for text in USUAL_CONFIGS] if configs is None else configs
    unique = {each.to_text(): each for each in (recorded, *others)}
    return list(unique.values())


def _trace_within(
    budget: Budget, result: Assessment, replayed: Replay, history: History, n_configs: int
) -> RequestTrace:
    """All requests, or those of the window around the shortage that the budget allows to run."""
    trace = requests_of(replayed, history)
    left = budget.left
    if left is None:
        return trace
    runs = 8 * n_configs  # one address model: the peak, the capacity given, part of the search
    affordable = int(max(left, 0.0) * budget.speed / runs)
    if len(trace) <= max(affordable, 2000):
        return trace
    _, peak_row = trace.live_peak()
    ooms = [row for row, action in enumerate(history.action) if action == OOM]
    end = min(len(history), (ooms[-1] if ooms else max(peak_row, 0)) + 1 + affordable // 10)
    start = max(0, end - max(affordable, 2000))
    while 0 < start < end and history.action[start] != FREE_REQUESTED:
        start += 1  # not in the middle of an allocation's rows
    before = Replayer(history, replayed.config, stop=start).run()
    result.window = (start, end)
    result.notes.append(
        f"only rows {start} to {end} of {len(history)} were run, because the time allowed is short"
    )
    return requests_of(before, history, start=start, stop=end)


def recommend(result: Assessment) -> AllocatorConfig | None:
    """A setting that decides the case: the recorded one does not fit, this one surely does.

    Never expandable_segments together with max_split_size_mb: with both, free blocks of expandable segments
    are passed over and memory grows without bound (pytorch#123548, pytorch#193400).
    """
    recorded = None if result.recorded is None else result.find(result.recorded)
    if recorded is None or recorded.fits is not False:
        return None
    for each in sorted(result.configs, key=_preference):
        if each.fits and each.models == len(ADDRESS_MODELS) and not _is_harmful(each.config):
            return each.config
    return None


def _is_harmful(config: AllocatorConfig) -> bool:
    return config.expandable_segments and config.max_split_size != UNLIMITED


def _preference(each: ConfigAssessment) -> tuple[bool, int, int]:
    """Expandable segments first; then few retries; then a small need."""
    need = each.min_capacity_bytes[1] if each.min_capacity_bytes else UNLIMITED
    return (not each.config.expandable_segments, each.retries, need)
