"""How fast the allocator model replays a history, answers a what-if, and serves a simulated device.

    python benchmarks/allocator.py [--events 300000] [--json] [SNAPSHOT ...]

CPU time of one process, the best of several runs, pure Python. Without files, two synthetic histories are used:
training steps with recurring sizes (like most jobs) and noise of random sizes (the worst case: long lists of free
blocks). Files are memory snapshots; their numbers are what counts.

Targets: exact replay 0.5 million events a second, what-if of one setting 1.5 million events a second, memory
linear in the events.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oomscope.core.allocator.history import History, read_history
from oomscope.core.allocator.model import AllocatorConfig, CachingAllocator, TraceRow, VirtualDriver
from oomscope.core.allocator.replay import replay
from oomscope.core.allocator.requests import requests_of
from oomscope.core.allocator.simulate import Prepared, run
from oomscope.core.allocator.synth import SyntheticProcess
from oomscope.core.allocator.synth_workloads import random_stream, training
from oomscope.core.allocator.verify import verify
from oomscope.core.snapshot.parse import parse_snapshot

CONFS = ("", "expandable_segments:True", "max_split_size_mb:128")


def best(work: Callable[[], object], runs: int = 5) -> float:
    """Seconds of CPU time of the fastest of several runs."""
    times = []
    for _ in range(runs):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def synthetic(name: str, events: int) -> tuple[History, AllocatorConfig]:
    process = SyntheticProcess()
    if name == "training":
        layers = 48
        training(process, layers=layers, steps=max(2, events // (layers * 14)))
    else:
        random_stream(process, 1, requests=int(events / 1.9))
    snapshot = parse_snapshot(process.snapshot())
    return read_history(snapshot, snapshot.devices[0]), process.config


def from_file(path: str) -> tuple[History, AllocatorConfig]:
    from oomscope.store.snapshots import load_snapshot

    snapshot = load_snapshot(Path(path))
    device = snapshot.busiest()
    if device is None:
        raise SystemExit(f"{path} has no devices")
    checked = verify(snapshot, device)
    if not checked.exact:
        raise SystemExit(f"{path} is not reproduced: {checked.meaning}")
    return checked.history, checked.config


def measure(history: History, config: AllocatorConfig) -> dict[str, Any]:
    events = len(history)
    result: dict[str, Any] = {"events": events}
    result["replay_events_per_s"] = events / best(lambda: replay(history, config), 3)
    replayed = replay(history, config)
    assert replayed.exact, replayed.divergence
    trace = requests_of(replayed, history)
    for conf in CONFS:
        parsed = AllocatorConfig.parse(conf)
        prepared = Prepared(trace, parsed)
        seconds = best(lambda parsed=parsed, prepared=prepared: run(trace, parsed, prepared=prepared))  # type: ignore[misc]
        result[f"whatif_events_per_s {conf or 'defaults'}"] = events / seconds
    tracemalloc.start()
    replay(history, config)
    result["replay_peak_bytes_per_event"] = tracemalloc.get_traced_memory()[1] / events
    tracemalloc.stop()
    return result


def serve(detailed_stats: bool, traced: bool) -> float:
    """Microseconds of one malloc and one free, as the simulated device makes them."""
    rng = random.Random(1)
    sizes = [rng.choice([512, 4096, 100_000, 1 << 20, 3 << 20, 50 << 20]) for _ in range(1000)]
    rows: list[TraceRow] = []
    allocator = CachingAllocator(
        AllocatorConfig(),
        VirtualDriver(80 << 30),
        tracer=rows.append if traced else None,
        detailed_stats=detailed_stats,
    )
    live: list[int] = []

    def work() -> None:
        for size in sizes * 20:
            if len(live) > 300:
                allocator.free(live.pop(rng.randrange(len(live))))
            live.append(allocator.malloc(size))

    return best(work) / 20_000 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("files", nargs="*", metavar="SNAPSHOT")
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.files:
        for path in options.files:
            results[Path(path).name] = measure(*from_file(path))
    else:
        for name in ("training", "noise"):
            results[name] = measure(*synthetic(name, options.events))
            results[f"{name}, a tenth"] = measure(*synthetic(name, options.events // 10))
        results["serve"] = {
            "totals_us": serve(False, False),
            "statistics_us": serve(True, False),
            "statistics_and_rows_us": serve(True, True),
        }
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for name, numbers in results.items():
        print(name)
        for key, value in numbers.items():
            shown = f"{value / 1e6:.2f} M" if "per_s" in key else f"{value:,.1f}"
            print(f"  {key:<45} {shown}")


if __name__ == "__main__":
    main()
