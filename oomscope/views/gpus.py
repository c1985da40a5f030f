"""What the driver last said of each rank's GPU: the newest `gpu` records in the host/ folder of an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomscope.protocol import layout
from oomscope.store.tail import Tail
from oomscope.views.coerce import integer, objects, text

#: An unchanged reading is written again every ten seconds (collect.recorder); this much older is out of date.
_STALE_NS = 25 * 10**9
#: Of a host file that is there already only the end is read: eight GPUs write about 250 bytes a second each.
_LAST_BYTES = 256 << 10


@dataclass(frozen=True)
class GpuReading:
    """One GPU; None where the hardware does not answer."""

    utilization_pct: int | None
    temperature_c: int | None
    power_w: float | None


class GpuReadings:
    """The newest reading of every GPU on the hosts of one attempt."""

    def __init__(self, attempt: Path) -> None:
        self._folder = attempt / layout.HOST_DIR
        self._tails: dict[Path, Tail] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self._of_pid: dict[tuple[str, int], str] = {}

    def poll(self) -> None:
        """Read what is new."""
        for path in self._folder.glob("*.jsonl"):
            if path not in self._tails:
                self._tails[path] = Tail(path, last=_LAST_BYTES)
            for record in self._tails[path].poll():
                if record.get("k") == "gpu":
                    self._take(path.stem, record)

    def _take(self, node: str, record: Mapping[str, Any]) -> None:
        name = _plain(text(record, "uuid"))
        # A record has only what was due at its time; the rest stands from before.
        self._records[name] = {**self._records.get(name, {}), **record}
        for process in objects(record, "processes"):
            pid = integer(process, "pid")
            if pid is not None:
                self._of_pid[node, pid] = name

    def of(self, uuid: str | None, host: str, pid: int, now_ns: int) -> GpuReading | None:
        """The GPU that the agent names, else the one on whose process list `pid` of `host` stands.

        None when there is no reading, or only an old one.
        """
        name = _plain(uuid) if uuid else self._of_pid.get((host.split(".")[0], pid))
        record = self._records.get(name) if name else None
        if record is None or now_ns - (integer(record, "t") or 0) > _STALE_NS:
            return None
        power = integer(record, "power_mw")
        return GpuReading(
            integer(record, "utilization_pct"),
            integer(record, "temperature_c"),
            None if power is None else power / 1000,
        )


def _plain(uuid: str) -> str:
    """NVML says "GPU-2f1c…", torch the same without the prefix."""
    return uuid.removeprefix("GPU-").lower()
