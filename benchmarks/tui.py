"""CPU time of one frame of the Live screen: polling the session folder, building the frame, painting, encoding.

The job is made up: between two frames every rank appends the record of one step, as an agent would. What is timed is
everything the viewer does for one tick, the terminal's bytes encoded (a headless test app skips that, so it is done
here). Target: 15 ms for 8 ranks at 160x48.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tools"))

import recorded_sessions as recorded

from oomscope.protocol.records import encode
from oomscope.tui.app import OomscopeApp

GIB = 1 << 30


def append_step(files: list[Path], step: int) -> None:
    """One more step of every rank, with the newest time so that no rank counts as silent."""
    for rank, path in enumerate(files):
        low = int((26 + rank * 0.3) * GIB) + (step * 7919 * (rank + 1)) % GIB
        record = {
            "t": time.time_ns(), "k": "step", "n": step, "step": step, "micro_steps": 1,
            "low_allocated_bytes": low,
            "peak_allocated_bytes": low + 11 * GIB, "peak_reserved_bytes": low + 14 * GIB,
            "reserved_bytes": low + 13 * GIB,
            "rss_bytes": GIB, "peak_rss_bytes": GIB, "loss": 2.0, "input_numel": 1, "duration_ns": 1, "retries": 0,
        }  # fmt: skip
        with path.open("ab") as stream:
            stream.write(encode(record))


async def measure(ranks: int, size: tuple[int, int], frames: int, steps: int = 2000) -> list[float]:
    """CPU milliseconds of each frame."""
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        session = recorded.eight_ranks(Path(folder), ranks=ranks, steps=steps)
        files = sorted(session.attempts()[0].procs.iterdir())
        app = OomscopeApp(session, hz=0)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            app.poll_now()
            await pilot.pause()
            for frame in range(frames):
                append_step(files, steps + frame)
                started = time.process_time()
                app.poll_now()
                update = app.screen._compositor.render_update(full=True)
                update.render_segments(app.console)
                costs.append((time.process_time() - started) * 1000)
                await asyncio.sleep(0)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = ((8, (80, 24)), (8, (160, 48)), (64, (160, 48)))
    results = {}
    for ranks, size in cases:
        costs = sorted(asyncio.run(measure(ranks, size, arguments.frames)))
        name = f"live_{ranks}_ranks_{size[0]}x{size[1]}"
        results[name] = {"median_ms": statistics.median(costs), "p95_ms": costs[int(len(costs) * 0.95) - 1]}
        if not arguments.json:
            print(
                f"{name:<28} median {results[name]['median_ms']:5.1f} ms   p95 {results[name]['p95_ms']:5.1f} ms"
            )
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
