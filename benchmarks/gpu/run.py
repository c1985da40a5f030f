"""Measured against simulated: ten configurations really trained for three steps, then simulated with the same torch.

On a machine with a GPU (about five minutes):

    python benchmarks/gpu/run.py measure results.json [--snapshots FOLDER]

Anywhere with the same torch version (no GPU needed):

    python benchmarks/gpu/run.py compare results.json

`compare` prints a Markdown table; commit it with the JSON file, which holds card, versions and date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from train import CONFIGURATIONS

TRAIN = str(HERE / "train.py")


def last_object(command: list[str]) -> dict[str, Any] | None:
    """The JSON object on the last line that `command` prints; None when it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        print(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def measure(output: Path, snapshots: Path | None) -> None:
    """Train every configuration on the GPU and write the peaks; once more with history when snapshots are wanted."""
    rows: dict[str, Any] = {}
    for name in CONFIGURATIONS:
        peaks = last_object([sys.executable, TRAIN, name])
        if peaks is not None:
            rows[name] = peaks
            print(name, peaks["max_memory_allocated"], peaks["max_memory_reserved"], flush=True)
        if snapshots is not None:
            snapshots.mkdir(parents=True, exist_ok=True)
            last_object([sys.executable, TRAIN, name, "--snapshot", str(snapshots / f"{name}.pickle")])
    output.write_text(json.dumps({"date": datetime.date.today().isoformat(), "rows": rows}, indent=1) + "\n")


def compare(measured: Path) -> None:
    """Simulate each row on a card of the same size and capability, and print the table."""
    data = json.loads(measured.read_text())
    first = next(iter(data["rows"].values()))
    print(f"{first['device']}, torch {first['torch']}, {data['date']}\n")
    print(
        "| configuration | measured allocated | simulated | error | measured reserved | simulated | error |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in data["rows"].items():
        major, minor = row["capability"]
        card = f"{row['total_bytes']},cc={major}.{minor}"
        simulated = last_object([sys.executable, "-m", "oomscope.simulate", "--card", card, TRAIN, name])
        cells = [name]
        for key in ("max_memory_allocated", "max_memory_reserved"):
            cells.append(f"{row[key] / 2**30:.3f}")
            value = simulated[key] if simulated else None
            cells += ["–", "–"] if value is None else [f"{value / 2**30:.3f}", f"{value / row[key] - 1:+.2%}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("measure")
    first.add_argument("output", type=Path)
    first.add_argument("--snapshots", type=Path)
    commands.add_parser("compare").add_argument("output", type=Path)
    args = parser.parse_args()
    if args.command == "measure":
        measure(args.output, args.snapshots)
    else:
        compare(args.output)


if __name__ == "__main__":
    main()
