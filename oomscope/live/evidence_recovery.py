"""Whether a job went on after it had run out of memory, and what that cost it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from oomscope.core.diagnosis.evidence import Recovery
from oomscope.live.evidence_ranks import Record, integer


def recovery(records: Sequence[Record], *, finished: bool | None, timed: bool = True) -> Recovery | None:
    """What came after the out-of-memory events of one rank; None: there were none, or one of them ended it.

    A job has recovered when it completed an optimizer step after its last event and did not die of another, or when it
    ended well all the same.

    Args:
        records: of one process, in the order in which they were written.
        finished: the whole run ended with exit code 0; None when nobody knows.
        timed: durations are those of the job; on a simulated device they are not.
    """
    rows = [(number, record) for number, record in enumerate(records) if record.get("k") in ("oom", "step")]
    events = [(number, record) for number, record in rows if record["k"] == "oom"]
    if not events or (not finished and _died_of_it(records)):
        return None
    last = events[-1][0]
    steps = [(number, record) for number, record in rows if record["k"] == "step"]
    after = [record for number, record in steps if number > last]
    if not after and not finished:
        return None
    retried = cost_ns = 0
    usual = [d for _, record in steps if (d := integer(record.get("duration_ns"))) is not None]
    typical = round(median(usual)) if usual else 0
    for step in dict.fromkeys(integer(record.get("step")) for _, record in events):
        first = next(number for number, record in events if integer(record.get("step")) == step)
        done = next((record for number, record in steps if number > first), None)
        if done is None:
            continue
        retried += 1
        cost_ns += max(0, (integer(done.get("duration_ns")) or 0) - typical)
    return Recovery(
        events=len(events),
        steps_after=len(after),
        retried_steps=retried,
        cost_ns=cost_ns if usual and timed else None,
        kept_bytes=_kept(steps, last),
    )


def _died_of_it(records: Sequence[Record]) -> bool:
    return any(record.get("k") == "exception" and record.get("is_oom") for record in records)


def _kept(steps: Sequence[tuple[int, Record]], event: int) -> int | None:
    """Allocated bytes between steps after the last event, beyond those before it: what the failed step left behind."""
    lows = [
        (number, low) for number, r in steps if (low := integer(r.get("low_allocated_bytes"))) is not None
    ]
    before = [low for number, low in lows if number < event]
    after = [low for number, low in lows if number > event]
    return min(after) - before[-1] if before and after else None


__all__ = ["recovery"]
