"""Which reading of the driver belongs to which rank, and when it is too old to be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oomscope.views.gpus import GpuReading, GpuReadings

S = 10**9


def write(attempt: Path, node: str, *records: dict[str, Any]) -> None:
    path = attempt / "host" / f"{node}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.writelines(json.dumps({"k": "gpu", "n": 0, **each}) + "\n" for each in records)


def test_found_by_uuid_with_or_without_prefix(tmp_path: Path) -> None:
    write(tmp_path, "a", {"t": S, "uuid": "GPU-2F1C", "utilization_pct": 97, "temperature_c": 64})
    write(tmp_path, "a", {"t": 2 * S, "uuid": "GPU-2f1c", "power_mw": 651_300})
    readings = GpuReadings(tmp_path)
    readings.poll()
    assert readings.of("2f1c", "a", 1, 3 * S) == GpuReading(97, 64, 651.3)
    assert readings.of("GPU-2f1c", "a", 1, 3 * S) == GpuReading(97, 64, 651.3)
    assert readings.of("ffff", "a", 1, 3 * S) is None


def test_found_by_process_on_its_own_host_only(tmp_path: Path) -> None:
    process = [{"pid": 7, "used_bytes": 1}, {"pid": "x"}]
    write(tmp_path, "a", {"t": S, "uuid": "GPU-1", "utilization_pct": 5, "processes": process})
    readings = GpuReadings(tmp_path)
    readings.poll()
    assert readings.of(None, "a.example.org", 7, S) == GpuReading(5, None, None)
    assert readings.of(None, "b", 7, S) is None


def test_old_reading_is_not_shown(tmp_path: Path) -> None:
    write(tmp_path, "a", {"t": S, "uuid": "GPU-1", "utilization_pct": 5})
    readings = GpuReadings(tmp_path)
    readings.poll()
    assert readings.of("1", "a", 1, 60 * S) is None
    write(tmp_path, "a", {"t": 59 * S, "uuid": "GPU-1", "utilization_pct": 6})
    readings.poll()
    assert readings.of("1", "a", 1, 60 * S) == GpuReading(6, None, None)


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a", {"t": S, "uuid": "GPU-old", "utilization_pct": 1, "pad": "x" * 300_000})
    write(tmp_path, "a", {"t": S, "uuid": "GPU-new", "utilization_pct": 2})
    readings = GpuReadings(tmp_path)
    readings.poll()
    assert readings.of("old", "a", 1, S) is None
    assert readings.of("new", "a", 1, S) is not None


def test_torn_and_foreign_records_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, "a", {"t": "now", "uuid": 7, "utilization_pct": "hot", "processes": "none"})
    (tmp_path / "host" / "b.jsonl").write_text('{"k": "gpu", "uuid"\n[1]\n')
    readings = GpuReadings(tmp_path)
    readings.poll()
    assert readings.of("7", "a", 1, S) == GpuReading(None, None, None)
