"""This machine as the collectors see it now: takes their records in and keeps the newest of each."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from oomscope.collect.base import PERIOD_S, Device, Record, State, Tier
from oomscope.collect.registry import entries
from oomscope.collect.supervisor import Status, SupervisedCollector

#: Events (Xid, kills) that are remembered.
_MAX_EVENTS = 200


@dataclass(slots=True)
class Machine:
    """The newest readings.

    A `gpu` record has only the fields whose tier was due; here each GPU's newest value of every field stands
    together.
    """

    gpus: dict[str, Record] = field(default_factory=dict)
    host: Record = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)
    drivers: dict[str, str] = field(default_factory=dict)
    events: deque[Record] = field(default_factory=lambda: deque(maxlen=_MAX_EVENTS))

    def take(self, record: Record) -> None:
        kind = record.get("k")
        if kind == "gpu":
            uuid = str(record.get("uuid"))
            self.gpus[uuid] = {**self.gpus.get(uuid, {}), **record}
        elif kind == "host":
            self.host = {**self.host, **record}
        elif kind == "devices":
            self._take_devices(record)
        elif kind in ("xid", "oom_kill", "fault", "process_end"):
            self.events.append(record)

    def _take_devices(self, record: Record) -> None:
        fresh = [Device(**row) for row in record.get("devices", ())]
        names = {device.uuid for device in fresh}
        self.devices = [device for device in self.devices if device.uuid not in names] + fresh
        if record.get("driver"):
            self.drivers[str(record.get("collector"))] = str(record["driver"])

    def holders(self) -> dict[str, list[Record]]:
        """Device UUID -> processes on it."""
        return {uuid: list(row.get("processes", ())) for uuid, row in self.gpus.items()}


class MachineWatch:
    """Runs collectors and keeps a `Machine` up to date. Call `poll` often.

    Args:
        names: collectors to run; all of this installation by default.
        period_s: of the fast tier.
    """

    def __init__(
        self,
        names: Iterable[str] | None = None,
        *,
        period_s: float = PERIOD_S[Tier.FAST],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        chosen = list(names) if names is not None else [entry.name for entry in entries()]
        self.machine = Machine()
        self.collectors = [
            SupervisedCollector(name, period_s, environ=os.environ if environ is None else environ)
            for name in chosen
        ]

    @property
    def statuses(self) -> dict[str, Status]:
        return {collector.name: collector.status for collector in self.collectors}

    def poll(self) -> bool:
        """True when something new came."""
        changed = False
        for collector in self.collectors:
            for record in collector.poll():
                self.machine.take(record)
                changed = True
        return changed

    def first_reading(self, timeout_s: float = 5.0) -> None:
        """Waits until every collector has delivered, or has said that it cannot."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.poll()
            if all(status.state is not State.STARTING for status in self.statuses.values()):
                return
            time.sleep(0.02)

    def watch(self, pids: Iterable[int]) -> None:
        wanted = sorted(set(pids))
        for collector in self.collectors:
            collector.watch(wanted)

    def close(self) -> None:
        for collector in self.collectors:
            collector.close()
