"""How fast and how small oomscope reads a long snapshot, beside bare unpickling and other tools on the same
file.

    python benchmarks/snapshots.py                          a made-up training history at a million rows
    python benchmarks/snapshots.py tile FILE EVENTS OUT     repeat a real history up to EVENTS rows
    python benchmarks/snapshots.py run FILE [--events 100000,1000000,3500000] [--repeat 3] [--json]
    python benchmarks/snapshots.py screen FILE [--events 1000000]     first picture and key presses

A tiled file repeats the rows of each device: addresses stay, times are shifted, frame lists are shared, one
pickle of protocol 4.
Take a history that returns to where it began (torch's own step loop does), else the tiled one looks cut.

Every tool runs in a process of its own; the best of the repeats counts, in wall-clock and in processor
seconds: on a shared machine only the
latter compare. "oomscope" is load, columns and all analyses, the child process and its start included; memory
is the sum of the
peaks of all its processes. Torch's `_memory_viz` and facebookresearch/mosaic are run as commands, and left
out when they are not there.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def tile(source: Path, events: int, target: Path) -> int:
    """Write a tiled copy; returns its number of rows."""
    gc.disable()
    raw = pickle.loads(source.read_bytes())
    traces = raw["device_traces"]
    copies = max(1, round(events / max(1, sum(map(len, traces)))))
    for device, rows in enumerate(traces):
        if rows and "time_us" in rows[0]:
            span = rows[-1]["time_us"] - rows[0]["time_us"] + 1000
            traces[device] = [
                {**row, "time_us": row["time_us"] + n * span} for n in range(copies) for row in rows
            ]
        else:
            traces[device] = [{**row} for _ in range(copies) for row in rows]
    with target.open("wb") as file:
        pickle.dump(raw, file, protocol=4)
    gc.enable()
    return sum(map(len, traces))


# -- what is measured, each in its own process -------------------------------------------------------


def bare(path: Path) -> None:
    """Nothing but unpickling, with the garbage collector off."""
    gc.disable()
    with path.open("rb") as file:
        pickle.load(file)


def ours(path: Path) -> None:
    """Load, columns, and everything that `inspect` says."""
    from oomscope.store.snapshots import load_snapshot

    snapshot = load_snapshot(path)
    from oomscope.core.snapshot.analysis import analyse
    from oomscope.report.snapshot_json import snapshot_json

    analyses = analyse(snapshot)
    snapshot_json(snapshot, analyses, [each.focus for each in analyses])


def child(name: str, path: Path) -> None:
    """Run one of them and print what it took."""
    work: dict[str, Callable[[Path], None]] = {"bare": bare, "oomscope": ours}
    wall, cpu = time.perf_counter(), _cpu()
    work[name](path)
    took = {"wall_s": time.perf_counter() - wall, "cpu_s": _cpu() - cpu, "peak_bytes": _peak()}
    sys.stdout.write(json.dumps(took))
    sys.stdout.flush()
    os._exit(0)  # freeing a million dictionaries is not what is measured


def _cpu() -> float:
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def _peak() -> int:
    """Peak of this process and of its largest child. Not ru_maxrss for the former: it also counts who started us."""
    status = Path("/proc/self/status").read_text()
    own = int(status.split("VmHWM:")[1].split()[0])
    return (own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024


def command(args: list[str]) -> dict[str, float] | None:
    """Time of a foreign command; None when it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.perf_counter()
    done = subprocess.run(args, capture_output=True, check=False)
    took = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.stderr.write(f"{args[0]}: {done.stderr.decode(errors='replace')[-300:]}\n")
        return None
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": took, "cpu_s": cpu}


def measure(name: str, path: Path) -> dict[str, float] | None:
    """One run of a tool on a file."""
    if name in ("bare", "oomscope"):
        done = subprocess.run(
            [sys.executable, __file__, "child", name, str(path)], capture_output=True, text=True, check=True
        )
        found: dict[str, float] = json.loads(done.stdout)
        return found
    if name == "_memory_viz stats":
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        script = Path(spec.origin).parent / "cuda" / "_memory_viz.py"
        return command([sys.executable, str(script), "stats", str(path)])
    mosaic = shutil.which("mosaic_get_memory_usage_peak")
    return None if mosaic is None else command([mosaic, "--snapshot", str(path)])


TOOLS = ("bare", "oomscope", "_memory_viz stats", "mosaic peak")


def run(source: Path, sizes: list[int], repeat: int) -> list[dict[str, Any]]:
    """Best of `repeat` runs of every tool on every size."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            path = Path(folder) / f"{size}.pickle"
            events = tile(source, size, path)
            best: dict[str, dict[str, float]] = {}
            for _ in range(repeat):
                for name in TOOLS:
                    took = measure(name, path)
                    if took is not None:
                        known = best.setdefault(name, took)
                        best[name] = {key: min(value, took[key]) for key, value in known.items()}
            rows.append(
                {"source": source.name, "events": events, "file_bytes": path.stat().st_size, "tools": best}
            )
            path.unlink()
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """A table with ratios to bare unpickling."""
    for row in rows:
        print(f"\n{row['source']} tiled to {row['events']:,} events, {row['file_bytes'] / 1e6:.0f} MB")
        base = row["tools"]["bare"]
        for name, took in row["tools"].items():
            memory = (
                f"{took['peak_bytes'] / row['events'] / 1e3:6.3f} GB/M events" if "peak_bytes" in took else ""
            )
            print(
                f"  {name:<18} wall {took['wall_s']:7.3f} s ({took['wall_s'] / base['wall_s']:5.2f}x bare)"
                f"   cpu {took['cpu_s']:7.3f} s ({took['cpu_s'] / base['cpu_s']:5.2f}x)   {memory}"
            )


def screen(source: Path, events: int) -> None:
    """Time to the first picture of the Snapshot screen, and the slowest of some key presses."""
    import asyncio

    from oomscope.tui.app import OomscopeApp
    from oomscope.tui.screens.snapshot import SnapshotScreen

    async def drive(path: Path) -> None:
        app = OomscopeApp(snapshot=path, start="snapshot", hz=0)
        async with app.run_test(size=(160, 48)) as pilot:
            wall, cpu = time.perf_counter(), _cpu()
            while not (isinstance(app.view, SnapshotScreen) and app.view._picture is not None):
                await pilot.pause(0.01)
            print(
                f"first picture: wall {time.perf_counter() - wall:.2f} s, cpu of this process {_cpu() - cpu:.2f} s"
            )
            worst: dict[str, float] = {}
            for key in (
                "left",
                "right",
                "plus",
                "minus",
                "v",
                "down",
                "pagedown",
                "o",
                "x",
                "b",
                "p",
                "m",
            ) * 3:
                before = time.thread_time()
                await pilot.press(key)
                worst[key] = max(worst.get(key, 0.0), time.thread_time() - before)
                await pilot.pause(0.3)
            print("slowest key presses, cpu of the UI thread, frame included:")
            print("  " + ", ".join(f"{key} {1e3 * took:.0f} ms" for key, took in worst.items()))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiled.pickle"
        print(f"{tile(source, events, path):,} events")
        asyncio.run(drive(path))


def made_up(folder: Path) -> Path:
    """A snapshot of training steps that never ran, for where no real one is at hand; returns its path."""
    from oomscope.core.allocator.synth import SyntheticProcess
    from oomscope.core.allocator.synth_workloads import training

    process = SyntheticProcess()
    training(process, layers=48, steps=20)
    path = folder / "made-up.pickle"
    path.write_bytes(pickle.dumps(process.snapshot(), protocol=4))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="do")
    one = commands.add_parser("tile")
    one.add_argument("file", type=Path)
    one.add_argument("events", type=int)
    one.add_argument("out", type=Path)
    many = commands.add_parser("run")
    many.add_argument("file", type=Path)
    many.add_argument("--events", default="100000,1000000,3500000")
    many.add_argument("--repeat", type=int, default=3)
    many.add_argument("--json", action="store_true")
    look = commands.add_parser("screen")
    look.add_argument("file", type=Path)
    look.add_argument("--events", type=int, default=1_000_000)
    inner = commands.add_parser("child")
    inner.add_argument("name")
    inner.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.do == "tile":
        print(f"{tile(args.file, args.events, args.out):,} events")
    elif args.do == "child":
        child(args.name, args.file)
    elif args.do == "screen":
        screen(args.file, args.events)
    elif args.do is None:
        with tempfile.TemporaryDirectory() as folder:
            show(run(made_up(Path(folder)), [1_000_000], 3))
    else:
        rows = run(args.file, [int(each) for each in args.events.split(",")], args.repeat)
        print(json.dumps(rows, indent=1)) if args.json else show(rows)


if __name__ == "__main__":
    main()
