"""From the records of an attempt and of its first prediction run to what the catalogue of fixes looks at."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oomscope.core.fixes.model import BlockGroup, JobFacts, Knob
from oomscope.protocol.env import stored_environment
from oomscope.store.tail import read_attempt

#: Names of the simulated device's categories -> ours.
_CATEGORIES = {"activations": "activation"}

Record = Mapping[str, Any]


def records_of_rank(folder: Path, rank: int | None = None) -> list[Record]:
    """The records of one process: of `rank`, of the first that ran out of memory, or with the highest peak."""
    files: list[list[Record]] = [list(records) for records in read_attempt(folder).values() if records]
    if rank is not None:
        files = [records for records in files if _rank(records) == rank] or files
    if not files:
        return []
    return min(files, key=_interest)


def _rank(records: Iterable[Record]) -> int | None:
    found = _last(records, "rank") or _last(records, "hello") or {}
    rank = found.get("rank", (found.get("identity") or {}).get("rank"))
    return rank if isinstance(rank, int) else None


def _interest(records: list[Record]) -> tuple[float, float]:
    oom = _last(records, "oom")
    peak = (_last(records, "peak") or {}).get("peak_allocated_bytes") or 0
    return (float(oom.get("t") or 0) if oom else float("inf")), -float(peak)


def _last(records: Iterable[Record], kind: str) -> Record | None:
    found = None
    for record in records:
        if record.get("k") == kind:
            found = record
    return found


def facts_of_attempt(records: list[Record], findings: Mapping[str, Any] | None, **known: Any) -> JobFacts:
    """What the failed attempt itself tells, without any prediction run.

    Args:
        records: of the failing rank.
        findings: the diagnosis of the attempt, when there is one.
        known: fields that the caller knows better (capacity, environment, world size).
    """
    hello = _last(records, "hello") or {}
    oom = _last(records, "oom") or {}
    model = _last(records, "model") or {}
    peak = _last(records, "peak") or {}
    verdicts = (findings or {}).get("verdicts") or []
    where = next((verdict["where"] for verdict in verdicts if verdict.get("where")), None)
    identity = hello.get("identity") or {}
    values: dict[str, Any] = {
        "torch_version": _version(hello.get("torch")),
        "platform": "linux" if sys.platform == "linux" else sys.platform,
        "world_size": identity.get("world_size") or 1,
        "env": hello.get("env") or {},
        "requested_bytes": oom.get("requested_bytes"),
        "device_free_bytes": oom.get("device_free_bytes"),
        "oom_allocated_bytes": oom.get("allocated_bytes"),
        "oom_reserved_bytes": oom.get("reserved_bytes"),
        "oom_step": oom.get("step"),
        "oom_phase": oom.get("phase"),
        "peak_allocated_bytes": peak.get("peak_allocated_bytes") or oom.get("peak_allocated_bytes"),
        "peak_reserved_bytes": peak.get("peak_reserved_bytes") or oom.get("peak_reserved_bytes"),
        "peak_phase": peak.get("phase") or oom.get("phase"),
        "composition": composition(peak),
        "batch_varies": len(
            {r["input_numel"] for r in records if r.get("k") == "step" and r.get("input_numel")}
        )
        > 1,
        "rules": tuple(str(verdict.get("rule")) for verdict in verdicts),
        "where": (str(where["file"]), int(where["line"])) if where and where.get("line") else None,
        **_model(model),
        **known,
    }
    return JobFacts(**{key: value for key, value in values.items() if value is not None})


def _model(model: Record) -> dict[str, Any]:
    if not model:
        return {}
    return {
        "parameters_bytes": model.get("parameters_bytes"),
        "gradients_bytes": model.get("gradients_bytes"),
        "optimizer_bytes": model.get("optimizer_bytes"),
        "root_class": model.get("root_class"),
        "optimizer": model.get("optimizer"),
        "autocast": bool(model.get("autocast")),
        "has_batchnorm": bool(model.get("has_batchnorm")),
        "ddp": bool(model.get("ddp")),
        "block_groups": _groups(model.get("block_groups")),
    }


def _groups(value: Any) -> tuple[BlockGroup, ...]:
    groups = [each for each in value or () if isinstance(each, Mapping)]
    return tuple(
        BlockGroup(str(each.get("class")), int(each.get("count") or 0), str(each.get("path") or ""))
        for each in groups
    )


def step_peaks(records: Iterable[Record]) -> dict[int, int]:
    """Step -> peak of allocated bytes in it."""
    return {
        int(record["step"]): int(record["peak_allocated_bytes"])
        for record in records
        if record.get("k") == "step" and record.get("peak_allocated_bytes") and record.get("step") is not None
    }


def is_simulated(records: Iterable[Record]) -> bool:
    """Whether the rank ran on a simulated device."""
    return bool((_last(records, "rank") or {}).get("simulated"))


def composition(peak: Record) -> dict[str, int]:
    """Category -> bytes of a record "peak"."""
    parts = peak.get("composition") or ()
    return {
        _CATEGORIES.get(str(part["category"]), str(part["category"])): int(part["bytes"]) for part in parts
    }


def with_observation(facts: JobFacts, records: list[Record]) -> JobFacts:
    """`facts` completed by what a prediction run saw of the script."""
    seen = _last(records, "observed")
    peak = _last(records, "peak") or {}
    if seen is None:
        return facts
    names = {field.name for field in dataclasses.fields(JobFacts)}
    values = {key: value for key, value in seen.items() if key in names and value is not None}
    values.update(observed=True, composition=composition(peak) or facts.composition)
    values["torch_version"] = tuple((seen.get("torch_version") or facts.torch_version)[:2])
    values["block_groups"] = _groups(seen.get("block_groups"))
    values["frameworks"] = frozenset(seen.get("frameworks") or ())
    values["knobs"] = tuple(
        Knob(str(each["kind"]), tuple(each["options"]), each.get("value"), bool(each.get("is_flag")))
        for each in seen.get("knobs") or ()
    )
    if not seen.get("optimizer_bytes"):
        values["optimizer_bytes"] = facts.optimizer_bytes
    return dataclasses.replace(facts, **values)


def _version(text: Any) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", str(text or ""))
    return (int(match.group(1)), int(match.group(2))) if match else None


def current_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """The part of the job's environment that the catalogue may see."""
    return stored_environment(dict(os.environ if env is None else env))
