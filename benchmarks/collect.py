"""What watching a machine with eight GPUs costs, against the fake NVIDIA library.

    python benchmarks/collect.py [--seconds 20] [--gpus 8] [--delay-us 50] [--json]

The collector child runs as in `oomscope run`, at its default rate. Its CPU time is read from /proc, without the start
of the interpreter. `--delay-us` is what one NVML call takes: 50 µs is what published measurements assume for a simple
call, and sleeping in the fake stands for waiting in the driver. Target: 1 % of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tools")]

import fakenvml

from oomscope.collect.recorder import HostRecorder, read_host_records
from oomscope.collect.supervisor import SupervisedCollector


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def collector_share(name: str, seconds: float, environ: dict[str, str], pids: list[int]) -> dict[str, float]:
    """Share of one core that the child of `name` takes, and what one sample takes."""
    collector = SupervisedCollector(name, environ=environ)
    collector.watch(pids)
    costs: list[int] = []
    accept = collector._accept

    def spy(record: dict[str, Any], now: float) -> bool:
        if record["k"] == "tick":
            costs.append(record["cost_us"])
        return accept(record, now)

    collector._accept = spy
    while len(costs) < 2:
        collector.poll()
        time.sleep(0.02)
    child = collector._child
    assert child is not None
    before, started = cpu_s(child.pid), time.monotonic()
    while time.monotonic() - started < seconds:
        collector.poll()
        time.sleep(0.25)
    share = (cpu_s(child.pid) - before) / (time.monotonic() - started)
    collector.close()
    costs.sort()
    return {
        "core_pct": 100 * share,
        "sample_median_ms": costs[len(costs) // 2] / 1000,
        "sample_max_ms": costs[-1] / 1000,
    }


def recorder_cost(seconds: float, environ: dict[str, str], pids: list[int]) -> dict[str, float]:
    """CPU of the recorder's thread in this process, and bytes written a day."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = HostRecorder(Path(folder), environ=environ)
        with recorder:
            recorder.watch(pids)
            time.sleep(2)
            before, size, started = time.process_time(), recorder.path.stat().st_size, time.monotonic()
            time.sleep(seconds)
            passed = time.monotonic() - started
            share = (time.process_time() - before) / passed
            rate = (recorder.path.stat().st_size - size) / passed
        records = len(read_host_records(Path(folder)))
    return {"core_pct": 100 * share, "mib_per_day": rate * 86400 / (1 << 20), "records": records}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--delay-us", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fake = fakenvml.FakeNvml(Path(folder), options.gpus)
        for index in range(options.gpus):
            fake.processes(index, [{"pid": os.getpid(), "used_mib": 100}])
        fake.state.delay_us = options.delay_us
        environ, pids = fake.environ(), [os.getpid()]
        calls = sum(fake.calls().values())
        result = {"nvidia": collector_share("nvidia", options.seconds, environ, pids)}
        result["nvidia"]["calls_per_s"] = (sum(fake.calls().values()) - calls) / options.seconds
        result["host"] = collector_share("host", options.seconds, environ, pids)
        result["recorder"] = recorder_cost(options.seconds, environ, pids)
        fake.close()
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{options.gpus} GPUs, {options.delay_us} µs a call, {options.seconds:.0f} s each; target 1 % of a core"
    )
    for name, figures in result.items():
        print(f"{name:<10}" + "  ".join(f"{key} {value:.2f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
