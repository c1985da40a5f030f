"""Prediction runs: the user's script on the simulated device with fixes applied, at most two at a time.

The device of a prediction is so large that everything fits: the peak is then known also when it is far above
the real card. Whether the real card is enough is decided by replaying the recorded requests.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomscope.core.fixes.requests import read_requests
from oomscope.errors import OomscopeError
from oomscope.launch.job import JobControl, JobResult, JobSpec, run_job
from oomscope.launch.patches import SOURCE_DIR
from oomscope.launch.predict_facts import Record, records_of_rank
from oomscope.launch.predict_patches import staged_command
from oomscope.protocol.layout import safe_name
from oomscope.store.session import Attempt, Session

#: Bytes of the device of a prediction run: more than any card, so that the peak is always reached.
UNLIMITED_BYTES = 1 << 46

#: Runs at a time; each is one busy process.
PARALLEL = 2


@dataclass(frozen=True, slots=True)
class RawRun:
    """What one prediction run left."""

    records: list[Record] = field(default_factory=list)
    events: array[int] = field(default_factory=lambda: array("q"))
    """Requests to the allocator, see `oomscope.core.fixes.requests`."""
    failed: str | None = None
    """Why there is no figure."""
    duration_s: float = 0.0
    steps: int = 0

    def last(self, kind: str) -> Record:
        """The last record of `kind`, empty when there is none."""
        found: Record = {}
        for record in self.records:
            if record.get("k") == kind:
                found = record
        return found

    def fix_states(self) -> dict[str, tuple[str, str]]:
        """Fix id -> (state, detail) as the job reported it last."""
        return {
            str(record["id"]): (str(record.get("state")), str(record.get("detail") or ""))
            for record in self.records
            if record.get("k") == "fix" and "id" in record
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """What one prediction run tries; nothing: the job as it is."""

    runtime: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fix id inside the job -> options."""
    argv: tuple[str, ...] = ()
    """Appended to the script's command line."""
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fix id -> options of its source patch, tried on a copy."""

    def __bool__(self) -> bool:
        return bool(self.runtime or self.argv or self.patches)


class PredictionRuns:
    """Runs the job with fixes, remembers the results, stops starting new runs when the time is up."""

    def __init__(
        self,
        session: Session,
        attempt: Attempt,
        spec: JobSpec,
        *,
        deadline: float,
        progress: Callable[[str], None],
    ) -> None:
        """`spec` is the job without fixes, with the card to predict for; `deadline` in `time.monotonic()`."""
        self.session = session
        self.attempt = attempt
        self.spec = spec
        self.deadline = deadline
        self._progress = progress
        self._known: dict[str, RawRun] = {}
        self._lock = threading.Lock()
        self._control = JobControl()

    def give_at_least(self, seconds: float) -> None:
        """Let runs start for `seconds` from now, if they were to stop earlier."""
        self.deadline = max(self.deadline, time.monotonic() + seconds)

    def run_all(self, trials: Mapping[str, Trial], steps: int) -> dict[str, RawRun]:
        """Run every trial (name -> what is tried) for `steps` optimizer steps, two at a time.

        Raises:
            KeyboardInterrupt: the user has had enough; what still ran was killed.
        """
        results: dict[str, RawRun] = {}
        with ThreadPoolExecutor(max_workers=PARALLEL) as pool:
            futures = {pool.submit(self.run, name, trial, steps): name for name, trial in trials.items()}
            try:
                for future in as_completed(futures):
                    name = futures[future]
                    results[name] = future.result()
                    self._progress(name)
            except KeyboardInterrupt:
                self._control.kill("Ctrl-C")
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return results

    def run(self, name: str, trial: Trial, steps: int) -> RawRun:
        """Run one trial; from memory when it was made before."""
        key = f"{steps} {trial!r}"
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            return known
        left = self.deadline - time.monotonic()
        if left <= 0:
            return RawRun(failed="the time for predictions was used up")
        made = self._start(name, trial, steps, left)
        with self._lock:
            self._known[key] = made
        return made

    def _start(self, name: str, trial: Trial, steps: int, timeout_s: float) -> RawRun:
        with self._lock:
            folder = self.attempt.prediction(safe_name(name))
        plan = {"fixes": [{"id": fix, "options": dict(options)} for fix, options in trial.runtime.items()]}
        try:
            command = staged_command(trial.patches, trial.patches, self.spec, folder.path / SOURCE_DIR)
            spec = dataclasses.replace(
                self.spec,
                command=(*command, *trial.argv),
                plan=plan,
                steps=steps,
                role="prediction",
                attempt_dir=folder.path,
                output="files",
                detail=False,
                capacity_bytes=UNLIMITED_BYTES,
            )
            result = run_job(spec, session=self.session, timeout_s=timeout_s, control=self._control)
        except OomscopeError as error:
            return RawRun(failed=error.message)
        if self._control.level:  # a signal that came while a run of ours was waited for
            raise KeyboardInterrupt
        return read_run(folder.path, result)


def read_run(folder: Path, result: JobResult) -> RawRun:
    """What a prediction run left in `folder`."""
    records = records_of_rank(folder)
    files = sorted(folder.glob("requests-r*-d*.bin"), key=lambda path: path.stat().st_size)
    events = read_requests(files[-1].read_bytes()) if files else array("q")
    steps = sum(1 for record in records if record.get("k") == "step")
    failed = _failure(result, records, events)
    return RawRun(records, events, failed, result.duration_s, steps)


def _failure(result: JobResult, records: list[Record], events: array[int]) -> str | None:
    if result.timed_out:
        return "the run took longer than the time for predictions"
    for rank in result.ranks:
        if rank.exception and result.exit_code != 0:
            return f"the script failed on the simulated device: {rank.exception[:300]}"
    if result.exit_code != 0:
        return f"the run on the simulated device ended with exit code {result.exit_code}"
    unsupported = next((r.get("unsupported") for r in records if r.get("k") == "simulated"), None)
    if not events:
        detail = f" ({', '.join(map(str, unsupported))})" if unsupported else ""
        return f"the script allocated nothing on the simulated device{detail}"
    return None
