"""What attaching costs a running two-rank gloo job: pauses of the training loop, speed of the dump of all ranks.

    python benchmarks/attach.py [--cycles 40] [--workers 2] [--json]

Every training step leaves its time in a file. First the job runs alone, then through cycles of attach and detach. The
longest gap between two steps is to stay below 35 ms (the step itself, the machine's noise and our pause together), the
job must end with code 0 and the losses of an undisturbed job, and peers must dump within 10 ms of each other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from oomscope.launch.attach_session import AttachSession
from oomscope.launch.attachment import Options
from oomscope.launch.discover import discover
from oomscope.store.tail import read_records

JOB = ROOT / "tests" / "integration" / "attach" / "jobs" / "train.py"


def start(beat: Path, steps: int, workers: int) -> subprocess.Popen[bytes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "HEARTBEAT": str(beat), "STEPS": str(steps), "STEP_MS": "10", "WORKERS": str(workers), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
    ]
    process = subprocess.Popen([*command, str(JOB)], env=env, stdout=subprocess.DEVNULL)
    while any(len(read(beat, rank)) < 20 for rank in range(2)):
        if process.poll() is not None:
            raise SystemExit("the job did not start")
        time.sleep(0.1)
    return process


def read(beat: Path, rank: int) -> list[tuple[int, str]]:
    """Time in ns and loss of every step."""
    try:
        lines = Path(f"{beat}.{rank}").read_text().splitlines()
    except OSError:
        return []
    return [(int(line.split()[0]), line.split()[1]) for line in lines if len(line.split()) == 2]


def gaps_ms(beat: Path, between: tuple[int, int]) -> list[float]:
    """Gaps between steps of all ranks inside a stretch of time (monotonic ns)."""
    found = []
    for rank in range(2):
        times = [t for t, _ in read(beat, rank) if between[0] <= t <= between[1]]
        found += [(b - a) / 1e6 for a, b in itertools.pairwise(times)]
    return sorted(found)


def cycle_through(session: AttachSession, cycles: int) -> dict[str, float]:
    """Attaches and detaches; figures of the injections and the dumps."""
    stopped, total, delays, thread = [], [], [], 0
    for number in range(cycles):
        session.attach_agents()
        for each in session.ranks:
            if each.agent != "active":
                raise SystemExit(f"attach {number} failed: {each.why_not_higher}")
            stopped.append(each.report.stopped_us / 1000)
            total.append(each.report.total_ms)
            thread += each.report.thread == each.rank.pid
        if number == cycles - 1:
            session.dump()
            time.sleep(1.0)
            for path in session.attempt.procs.iterdir():
                delays += [row["delay_ns"] / 1e6 for row in read_records(path) if row["k"] == "dump"]
        if session.detach():
            raise SystemExit(f"detach {number} failed")
        for each in session.ranks:
            each.place.lease.write_text("")
        for path in session.attempt.procs.iterdir():
            path.unlink()
        session.view = type(session.view)(session.session)
    session.recorder.stop()
    stopped.sort()
    return {
        "helper_thread_stopped_median_ms": statistics.median(stopped),
        "helper_thread_stopped_max_ms": stopped[-1],
        "injection_median_ms": statistics.median(total),
        "main_thread_stopped": thread,
        "dump_delay_max_ms": max(delays) if delays else float("nan"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=40)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps = 400 + options.cycles * 60
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OOMSCOPE_HOME"] = folder
        beat = Path(folder) / "attached"
        process = start(beat, steps, options.workers)
        calm_from = time.monotonic_ns()
        time.sleep(3)
        calm_to = time.monotonic_ns()
        session = AttachSession(discover(str(process.pid)), Options(agent=True))
        time.sleep(2)  # the collectors start: two interpreters that compete for the processors
        busy_from = time.monotonic_ns()
        figures = cycle_through(session, options.cycles)
        end = time.monotonic_ns()
        code = process.wait()
        alone = Path(folder) / "alone"
        start(alone, steps, options.workers).wait()
        calm, busy = gaps_ms(beat, (calm_from, calm_to)), gaps_ms(beat, (busy_from, end))
        starting = gaps_ms(beat, (calm_to, busy_from))
        same = [[loss for _, loss in read(beat, rank)] for rank in range(2)] == [
            [loss for _, loss in read(alone, rank)] for rank in range(2)
        ]
    result = {
        "cycles": options.cycles,
        "job_exit_code": code,
        "losses_unchanged": same,
        "step_gap_alone_median_ms": statistics.median(calm),
        "step_gap_alone_max_ms": calm[-1],
        "step_gap_while_collectors_start_max_ms": starting[-1],
        "step_gap_median_ms": statistics.median(busy),
        "step_gap_p99_ms": busy[int(len(busy) * 0.99)],
        "step_gap_max_ms": busy[-1],
        **figures,
    }
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<40}{value:.2f}" if isinstance(value, float) else f"{name:<40}{value}")


if __name__ == "__main__":
    main()
