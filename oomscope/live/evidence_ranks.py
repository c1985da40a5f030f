"""Records of an attempt as facts about its ranks.

Unknown kinds and malformed fields are skipped, never trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oomscope.core.diagnosis.evidence import (
    ExceptionFact,
    HolderFact,
    ModelFact,
    OomFact,
    RankFact,
    StepRow,
    Where,
)
from oomscope.core.diagnosis.message import Frame

Record = Mapping[str, Any]
MAX_ROWS = 4000
"""Longer series are thinned evenly; the last rows all stay."""


def integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def frames(value: Any) -> tuple[Frame, ...]:
    """[[file, line, function], …] as frames; entries of another shape are skipped."""
    if not isinstance(value, list):
        return ()
    return tuple(
        Frame(str(entry[0]), entry[1], str(entry[2]))
        for entry in value
        if isinstance(entry, list) and len(entry) >= 3 and isinstance(entry[1], int)
    )


def step_row(record: Record) -> StepRow | None:
    step = integer(record.get("step"))
    if step is None:
        return None
    return StepRow(
        step=step,
        low=integer(record.get("low_allocated_bytes")),
        peak=integer(record.get("peak_allocated_bytes")),
        reserved=integer(record.get("reserved_bytes")),
        peak_reserved=integer(record.get("peak_reserved_bytes")),
        rss=integer(record.get("rss_bytes")),
        input_numel=integer(record.get("input_numel")),
        retries=integer(record.get("retries")),
        end_ns=integer(record.get("t")),
        micro_steps=integer(record.get("micro_steps")),
    )


def thin(rows: Sequence[StepRow]) -> tuple[StepRow, ...]:
    if len(rows) <= MAX_ROWS:
        return tuple(rows)
    stride = len(rows) // (MAX_ROWS // 2) + 1
    return (*rows[: -MAX_ROWS // 2 : stride], *rows[-MAX_ROWS // 2 :])


def oom_fact(record: Record, simulated: bool, count: int) -> OomFact:
    return OomFact(
        step=integer(record.get("step")),
        micro_step=integer(record.get("micro_step")),
        phase=word(record.get("phase")),
        device=integer(record.get("device")),
        requested_bytes=integer(record.get("requested_bytes")),
        device_free_bytes=integer(record.get("device_free_bytes")),
        allocated_bytes=integer(record.get("allocated_bytes")),
        reserved_bytes=integer(record.get("reserved_bytes")),
        peak_allocated_bytes=integer(record.get("peak_allocated_bytes")),
        peak_reserved_bytes=integer(record.get("peak_reserved_bytes")),
        capacity_bytes=integer(record.get("capacity_bytes")),
        retries=integer(record.get("retries")),
        frames=frames(record.get("frames")),
        in_backward=bool(record.get("in_backward")),
        records_gradients=on if isinstance(on := record.get("grad_enabled"), bool) else None,
        simulated=simulated,
        count=count,
        source="simulated allocator" if simulated else "allocator",
    )


def exception_fact(record: Record) -> ExceptionFact:
    return ExceptionFact(
        type=str(record.get("type") or ""),
        message=str(record.get("message") or ""),
        is_oom=bool(record.get("is_oom")),
        frames=frames(record.get("frames")),
    )


def model_fact(record: Record) -> ModelFact:
    groups = record.get("block_groups")
    return ModelFact(
        parameters_bytes=integer(record.get("parameters_bytes")),
        gradients_bytes=integer(record.get("gradients_bytes")),
        optimizer_bytes=integer(record.get("optimizer_bytes")),
        optimizer=word(record.get("optimizer")),
        autocast=record.get("autocast") if isinstance(record.get("autocast"), bool) else None,
        has_batchnorm=record.get("has_batchnorm") if isinstance(record.get("has_batchnorm"), bool) else None,
        ddp=record.get("ddp") if isinstance(record.get("ddp"), bool) else None,
        block_groups=tuple(
            (str(g.get("class")), integer(g.get("count")) or 0, str(g.get("path")))
            for g in (groups if isinstance(groups, list) else [])
            if isinstance(g, dict)
        ),
        root_class=word(record.get("root_class")),
    )


def composition(record: Record) -> tuple[tuple[str, int], ...]:
    """(category, bytes) at the peak; activations and what lives only inside an operation count together."""
    rows = record.get("composition")
    totals: dict[str, int] = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("bytes"), int):
            name = str(row.get("category"))
            totals[name] = totals.get(name, 0) + row["bytes"]
    return tuple(sorted(totals.items(), key=lambda item: -item[1]))


def holder_facts(records: Iterable[Record]) -> tuple[HolderFact, ...]:
    """The last word on each growing variable, most bytes per step first; `where` is its function's line."""
    found: dict[tuple[str, str], HolderFact] = {}
    for record in records:
        path, scope = word(record.get("path")), word(record.get("scope"))
        if record.get("k") != "holder" or path is None or scope is None:
            continue
        per_step, line = record.get("count_per_step"), integer(record.get("line")) or 0
        file = word(record.get("file"))
        found[path, scope] = HolderFact(
            path=path,
            scope=scope,
            owner=word(record.get("owner")) or "",
            item=word(record.get("item")) or "",
            count=integer(record.get("count")) or 0,
            per_step=float(per_step) if isinstance(per_step, (int, float)) else 0.0,
            bytes_per_step=integer(record.get("bytes_per_step")) or 0,
            has_graph=bool(record.get("has_graph")),
            where=Where(file, line, scope.rpartition(" of ")[2]) if file else None,
        )
    return tuple(sorted(found.values(), key=lambda fact: -fact.bytes_per_step))


def last(records: Iterable[Record], kind: str) -> Record | None:
    found = None
    for record in records:
        if record.get("k") == kind:
            found = record
    return found


def rank_fact(records: Sequence[Record]) -> RankFact:
    """One process's records as a rank."""
    hello, joined = last(records, "hello") or {}, last(records, "rank") or {}
    identity = hello.get("identity") if isinstance(hello.get("identity"), dict) else {}
    ooms = [record for record in records if record.get("k") == "oom"]
    failure, reading = last(records, "exception"), last(records, "reading") or {}
    simulated = bool(joined.get("simulated")) or last(records, "simulated") is not None
    rows = [row for record in records if record.get("k") == "step" and (row := step_row(record)) is not None]
    fatal = _fatal(ooms, failure)
    peak = last(records, "peak") or {}
    free, total = integer(reading.get("device_free_bytes")), integer(reading.get("device_total_bytes"))
    times = [t for r in (fatal, failure) if r is not None and (t := integer(r.get("t"))) is not None]

    def highest(name: str) -> int | None:
        values = [v for r in (*records, peak) if (v := integer(r.get(name))) is not None]
        return max(values, default=None)

    def known(name: str) -> int | None:
        value = integer(joined.get(name))
        return value if value is not None else integer((identity or {}).get(name))

    return RankFact(
        rank=known("rank"),
        local_rank=known("local_rank"),
        device=integer(joined.get("device")),
        gpu_name=word(joined.get("gpu_name")),
        capacity_bytes=integer(joined.get("capacity_bytes")),
        simulated=simulated,
        steps=thin(rows),
        oom=oom_fact(fatal, simulated, len(ooms)) if fatal is not None else None,
        exception=exception_fact(failure) if failure is not None else None,
        peak_allocated_bytes=highest("peak_allocated_bytes"),
        peak_reserved_bytes=highest("peak_reserved_bytes"),
        device_used_bytes=total - free if free is not None and total is not None else None,
        peak_rss_bytes=highest("peak_rss_bytes"),
        failed_ns=min(times, default=None),
    )


def _fatal(ooms: Sequence[Record], failure: Record | None) -> Record | None:
    """The event that ended the process: the last one, unless the process went on or died of something else."""
    if not ooms:
        return None
    if ooms[-1].get("caught") is True and not (failure and failure.get("is_oom")):
        return None
    return ooms[-1]
