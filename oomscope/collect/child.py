"""The process a collector runs in: `python -m oomscope.collect.child NAME [--period S] [--count N]`.

Whoever starts it puts it behind the job on the processors. Writes one JSON record a line to stdout. Reads
`{"watch": [pid, …]}` lines from stdin, and ends when stdin closes, so that no collector outlives the program that
wanted it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import sys
import threading
import time
from typing import Any

from oomscope.collect.base import PERIOD_S, Collector, Record, Tier
from oomscope.collect.registry import build
from oomscope.errors import OomscopeError

EXIT_UNAVAILABLE = 3


class Schedule:
    """Which tiers are due. A tier that is late is asked once, not once per missed period."""

    def __init__(self, fast_s: float, now: float) -> None:
        scale = fast_s / PERIOD_S[Tier.FAST]
        self._period = {tier: period * scale for tier, period in PERIOD_S.items()}
        self._next = dict.fromkeys(Tier, now)

    def due(self, now: float) -> frozenset[Tier]:
        # Half a fast period of tolerance: the tiers stay aligned although sleeping is never exact.
        slack = self._period[Tier.FAST] / 2
        tiers = frozenset(tier for tier, when in self._next.items() if when <= now + slack)
        for tier in tiers:
            following = self._next[tier] + self._period[tier]
            self._next[tier] = following if following > now else now + self._period[tier]
        return tiers

    def wait_s(self, now: float) -> float:
        return max(0.0, min(self._next.values()) - now)


class Child:
    """Runs one collector until stdin closes."""

    def __init__(self, collector: Collector, period_s: float) -> None:
        self._collector = collector
        self._events: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._schedule = Schedule(period_s, time.monotonic())
        self._input = b""

    def run(self, count: int | None = None) -> int:
        availability = self._collector.probe()
        if not availability.ok:
            _write(
                {
                    "k": "collector",
                    "name": self._collector.name,
                    "state": "unavailable",
                    "code": availability.code,
                    "why": availability.help,
                }
            )
            return EXIT_UNAVAILABLE
        devices = self._collector.devices()
        hello: Record = {
            "k": "devices",
            "collector": self._collector.name,
            "devices": [each.to_json() for each in devices],
        }
        driver = getattr(self._collector, "driver", None)
        if callable(driver):
            hello["driver"] = driver()
        _write(hello)
        if devices:
            threading.Thread(target=self._wait_for_events, daemon=True).start()
        done = 0
        while count is None or done < count:
            self._sample()
            done += 1
            if done == count or not self._sleep():
                break
        # No close(): unloading a driver library can hang as well, and the process ends here.
        return 0

    def _sample(self) -> None:
        tiers = self._schedule.due(time.monotonic()) | {Tier.FAST}
        started = time.perf_counter_ns()
        records = self._collector.sample(tiers)
        cost_us = (time.perf_counter_ns() - started) // 1000
        while not self._events.empty():
            records.append(self._events.get())
        tick = {"k": "tick", "collector": self._collector.name, "cost_us": cost_us, "tiers": sorted(tiers)}
        _write(*records, tick)

    def _sleep(self) -> bool:
        """Waits for the next tier or an order, which is answered with a reading; False when stdin is closed."""
        left = self._schedule.wait_s(time.monotonic())
        ready, _, _ = select.select([0], [], [], left)
        return self._read_orders() if ready else True

    def _read_orders(self) -> bool:
        data = os.read(0, 65536)
        if not data:
            return False
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            try:
                order: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(order, dict) and isinstance(order.get("watch"), list):
                self._collector.watch(int(pid) for pid in order["watch"])
        return True

    def _wait_for_events(self) -> None:
        while True:
            for record in self._collector.events(1.0):
                self._events.put({"t": time.time_ns(), **record})


def _write(*records: Record) -> None:
    now = time.time_ns()
    lines = [json.dumps({"t": now, **record}, separators=(",", ":"), default=str) for record in records]
    os.write(1, ("\n".join(lines) + "\n").encode())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="oomscope.collect.child", description=__doc__)
    parser.add_argument("name")
    parser.add_argument(
        "--period", type=float, default=PERIOD_S[Tier.FAST], help="seconds of the fast tier, at least 0.1"
    )
    parser.add_argument("--count", type=int, help="stop after so many samples")
    options = parser.parse_args(argv)
    try:
        collector = build(options.name)
    except OomscopeError as error:
        _write(
            {
                "k": "collector",
                "name": options.name,
                "state": "unavailable",
                "code": "plugin",
                "why": error.message,
            }
        )
        return EXIT_UNAVAILABLE
    return Child(collector, max(0.1, options.period)).run(options.count)


if __name__ == "__main__":
    sys.exit(main())
