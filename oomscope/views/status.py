"""Title and alert line of a session: its state in a word, and the one fact that matters most now."""

from __future__ import annotations

from collections.abc import Sequence

from oomscope.views import wording
from oomscope.views.compare import AttemptRow, Comparison
from oomscope.views.diagnosis import Diagnosis
from oomscope.views.events import Progress
from oomscope.views.fixes import Fixes
from oomscope.views.headline import Alert, Fact, Headline
from oomscope.views.ranks import RankRow

_STATES = {
    "starting": ("○", "info", "STARTING"),
    "running": ("●", "ok", "LIVE"),
    "stopping": ("●", "warn", "STOPPING"),
    "diagnosing": ("◐", "warn", "DIAGNOSING"),
    "predicting": ("◐", "warn", "PREDICTING"),
    "waiting": ("◆", "warn", "YOUR TURN"),
    "oom": ("✖", "error", "OUT OF MEMORY"),
    "failed": ("✖", "error", "FAILED"),
    "done": ("✔", "ok", "DONE"),
    "lost": ("✖", "warn", "LOST"),
}


def headline(
    state: str,
    *,
    script: str,
    attempt: int,
    ranks: Sequence[RankRow],
    nodes: int = 1,
    rank: int | None = None,
) -> Headline:
    """Title of the session; step and phase are those of `rank`, else of the rank furthest behind."""
    glyph, severity, word = _STATES.get(state, ("?", "warn", state.upper()))
    facts = [Fact(script or "job", 9)]
    if attempt > 1:
        facts.append(Fact(f"attempt {attempt}", 8))
    if ranks:
        count = wording.plural(len(ranks), "rank")
        facts.append(Fact(count if nodes < 2 else f"{count} on {nodes} nodes", 8))
        device = next((row for row in ranks if row.on_device), None)
        if device is not None:
            name = wording.short_gpu(device.gpu) or "GPU"
            facts.append(Fact(f"{name} (simulated)" if device.simulated else name, 6))
        else:
            facts.append(Fact("CPU, host memory", 6))
        steps = [row.step for row in ranks if row.step is not None]
        if steps:
            facts.append(Fact(f"step {min(steps)}", 7))
        phases = {row.phase for row in ranks if row.phase}
        if len(phases) == 1 and state == "running":
            facts.append(Fact(phases.pop(), 3))
    return Headline(glyph, severity, word, tuple(facts))


def alert(
    state: str,
    *,
    ranks: Sequence[RankRow],
    diagnosis: Diagnosis | None,
    fixes: Fixes | None,
    progress: Progress | None,
    comparison: Comparison | None,
    exception: str = "",
) -> Alert | None:
    """The most urgent fact: the job's end, then a coming one, then what is unusual, then headroom."""
    if state == "predicting":
        said = progress.sentence() if progress else "predicting what each fix would do"
        verdict = diagnosis.verdict if diagnosis else None
        return Alert("warn", f"{verdict.clause()}: {said}" if verdict else said, "2", "why")
    if state == "diagnosing":
        return Alert("warn", "out of memory; finding the cause")
    if state == "waiting":
        return _choose(diagnosis, fixes)
    last = comparison.attempts[-1] if comparison and comparison.attempts else None
    if state == "done" and last is not None and last.number > 1 and not last.running:
        return _proved(last)
    if state in ("oom", "failed", "lost"):
        return _ended(state, ranks, diagnosis, exception, None if last is None else last.exit_code)
    broken = next((row for row in ranks if row.state in ("oom", "failed")), None)
    if broken is not None and state != "done":
        return Alert(
            "error",
            f"rank {broken.rank} {'ran out of memory' if broken.state == 'oom' else 'failed'}",
            "2",
            "why",
        )
    if state == "done":
        if diagnosis is not None and diagnosis.recovered:
            return Alert("warn", f"finished; {diagnosis.recovered}", "2", "why")
        if diagnosis is not None and diagnosis.verdict is not None and not diagnosis.failed:
            return Alert("warn", f"finished; {diagnosis.verdict.clause()}", "2", "why")
        return Alert("ok", "finished without running out of memory" + _peak_clause(ranks))
    return _coming(ranks) or _calm(ranks)


def _cause(diagnosis: Diagnosis | None) -> str:
    verdict = diagnosis.verdict if diagnosis else None
    return f"out of memory: {verdict.clause()}" if verdict else "out of memory"


def _choose(diagnosis: Diagnosis | None, fixes: Fixes | None) -> Alert:
    fitting = [row for row in fixes.rows if row.predicted and row.predicted.fits] if fixes else []
    if fitting or (fixes and fixes.recommended):
        count = wording.plural(len(fitting), "fix fits", "fixes fit") if fitting else "a combination fits"
        return Alert("error", f"{_cause(diagnosis)}; {count}", "4", "choose")
    said = "no single fix is predicted to fit" if fixes else "nothing is predicted"
    return Alert("error", f"{_cause(diagnosis)}; {said}", "4", "fixes")


def _proved(last: AttemptRow) -> Alert:
    """The rerun's end with what it reached beside what was predicted."""
    fixes = f" ({' + '.join(last.fixes)})" if last.fixes else ""
    said = f"attempt {last.number}{fixes}"
    if last.reached_bytes is None:
        said += " finished"
    else:
        said += f": {last.word} peak {wording.gib(last.reached_bytes)}"
        said += f" of {wording.gib(last.capacity_bytes)} GiB" if last.capacity_bytes else " GiB"
        said += f", predicted {wording.gib(last.predicted.peak_bytes)}" if last.predicted else ""
    return Alert("ok", said, "5", "proof")


#: Exit codes after Ctrl-C or SIGTERM, as a shell and as Python's subprocess count them. SIGKILL is not among them: the
#: kernel's out-of-memory killer sends it too.
_STOPPED = frozenset({130, 143, -2, -15})


def _ended(
    state: str, ranks: Sequence[RankRow], diagnosis: Diagnosis | None, exception: str, exit_code: int | None
) -> Alert:
    if diagnosis is not None and diagnosis.verdict is not None:
        return Alert("error", _cause(diagnosis), "2", "why")
    if state == "lost":
        return Alert("warn", "the supervisor is gone; what was recorded until then is shown", "ctrl+l", "log")
    if state == "oom" or any(row.state == "oom" for row in ranks):
        return Alert("error", "out of memory", "2", "why")
    if exit_code in _STOPPED and not exception:
        return Alert("warn", f"the job was stopped (exit code {exit_code})", "ctrl+l", "log")
    return Alert("error", f"the job failed: {exception}" if exception else "the job failed", "ctrl+l", "log")


def _coming(ranks: Sequence[RankRow]) -> Alert | None:
    growing = [row for row in ranks if row.is_growing]
    if growing:
        row = min(growing, key=lambda r: r.steps_left or 0)
        rate = wording.per_step(row.change.slope if row.change else None)
        unit = "MiB" if rate.endswith("M") else "GiB"
        left = wording.plural(row.steps_left or 0, "step")
        what = "OOM" if row.on_device else "host memory full"
        return Alert(
            "error",
            f"rank {row.rank}: {what} in ~{left} ({rate.rstrip('M')} {unit}/step)",
            "2",
            "diagnosis",
            row.rank,
        )
    for word, said in (
        ("retries", "the allocator had to flush its cache to go on"),
        ("tight", "less than 3 % of the card is free at the peak"),
        ("frag", "much of the reserved memory is unused even at the peak"),
        ("silent", "nothing was heard from it for a while"),
        ("lost", "its process is gone"),
    ):
        found = [row for row in ranks if row.severity == "warn" and word in row.status]
        if found:
            who = f"rank {found[0].rank}" if len(found) == 1 else wording.plural(len(found), "rank")
            return Alert("warn", f"{who}: {said}", rank=found[0].rank)
    return None


def _calm(ranks: Sequence[RankRow]) -> Alert | None:
    measured = [row for row in ranks if row.on_device and row.headroom_bytes is not None]
    if measured:
        row = min(measured, key=lambda r: r.headroom_bytes or 0)
        return Alert(
            "info", f"nothing unusual; least headroom {wording.size(row.headroom_bytes)}, rank {row.rank}"
        )
    if ranks and any(row.used_bytes is not None for row in ranks):
        return Alert("info", "nothing unusual" + _peak_clause(ranks))
    return Alert("info", "waiting for the first reading")


def _peak_clause(ranks: Sequence[RankRow]) -> str:
    known = [row for row in ranks if row.peak_bytes is not None]
    if not known:
        return ""
    row = max(known, key=lambda r: r.peak_bytes or 0)
    if row.on_device:
        return (
            f"; {wording.kind_of_number(row.simulated)} peak {wording.size(row.peak_bytes)}, rank {row.rank}"
        )
    return f"; peak host memory {wording.size(row.peak_bytes)}, rank {row.rank}"
