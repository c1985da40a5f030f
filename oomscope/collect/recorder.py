"""Writes what the collectors see into `host/NODE.jsonl` of an attempt, while a job runs.

Memory of a GPU matters when it changes, so an unchanged reading is written only every ten seconds: eight GPUs
make about 30 MB a day instead of 300.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from oomscope.collect.base import PERIOD_S, Record, State, Tier
from oomscope.collect.supervisor import Status, SupervisedCollector
from oomscope.protocol import layout
from oomscope.units import MIB

#: A change of used memory below this is noise of the driver.
_NOISE_BYTES = MIB
_REPEAT_NS = 10 * 10**9
_POLL_S = 0.25
#: Kernel messages of processes are kept from a little before the start: the job may have started first.
_BEFORE_NS = 10 * 10**9
#: How long one collector's start may keep the next one waiting.
_APART_S = 3.0
#: After this much a host file is not continued; the job's own records matter more than ours.
MAX_BYTES = 256 * MIB


class Thinner:
    """Decides which records are worth a line."""

    def __init__(self) -> None:
        self._last: dict[str, Record] = {}

    def keep(self, record: Record) -> bool:
        key = record["k"] if record["k"] == "host" else f"{record['k']}:{record.get('uuid')}"
        if record["k"] not in ("gpu", "host"):
            return True
        last = self._last.get(key)
        if (
            last is not None
            and not _is_full(record)
            and record["t"] - last["t"] < _REPEAT_NS
            and not _differs(last, record)
        ):
            return False
        self._last[key] = record
        return True


def _is_full(record: Record) -> bool:
    """Is it a reading of the slow tier, which has everything? Those come every ten seconds anyway."""
    return "unsupported" in record or any("shm_total_bytes" in row for row in record.get("processes", ()))


def _differs(old: Record, new: Record) -> bool:
    if new["k"] == "host":
        fields = ("mem_available_bytes", "shm_free_bytes")
        moved = any(abs(new.get(name, 0) - old.get(name, 0)) > 64 * MIB for name in fields)
        kills = (new.get("cgroup") or {}).get("oom_kills") != (old.get("cgroup") or {}).get("oom_kills")
        return bool(moved or kills or _resident(old) != _resident(new))
    if old.get("state") != new.get("state") or _holders(old) != _holders(new):
        return True
    return bool(abs(new.get("used_bytes", 0) - old.get("used_bytes", 0)) > _NOISE_BYTES)


def _resident(record: Record) -> dict[int, int]:
    """Resident size of the watched processes in steps of 64 MiB."""
    return {row["pid"]: row["rss_bytes"] // (64 * MIB) for row in record.get("processes", ())}


def _holders(record: Record) -> dict[int, int]:
    return {row["pid"]: (row["used_bytes"] or 0) // _NOISE_BYTES for row in record.get("processes", ())}


class HostRecorder:
    """Runs collectors in the background and appends their records to one file.

    Use as a context manager around a job, or `start` and `stop`. `watch` may be called from any thread.

    Args:
        folder: the attempt; the file is `folder/host/NODE.jsonl`.
        names: collectors to run.
        on_record: called from the recorder's thread with every record, also with those not written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        names: Iterable[str] = ("host", "nvidia"),
        period_s: float = PERIOD_S[Tier.FAST],
        environ: Mapping[str, str] | None = None,
        on_record: Callable[[Record], None] | None = None,
        node: str | None = None,
    ) -> None:
        self.path = Path(folder) / layout.HOST_DIR / f"{node or node_name()}.jsonl"
        self._collectors = [SupervisedCollector(name, period_s, environ=environ) for name in names]
        self._thinner = Thinner()
        self._on_record = on_record
        self._begun = time.monotonic()
        self._stop = threading.Event()
        self._wanted: list[int] | None = None
        self._host_records = 0
        self._since = time.time_ns() - _BEFORE_NS
        self._ask_again = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oomscope-host", daemon=True)

    @property
    def statuses(self) -> dict[str, Status]:
        return {collector.name: collector.status for collector in self._collectors}

    def start(self) -> HostRecorder:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread.start()
        return self

    def watch(self, pids: Iterable[int]) -> None:
        """The processes of the job, whenever they change."""
        self._wanted = sorted(set(pids))

    def settle(self, timeout_s: float = 1.0) -> None:
        """Asks for one more reading and waits for it: how the job ended stands in the first one after its end."""
        if not self._wanted:
            return
        before, deadline = self._host_records, time.monotonic() + timeout_s
        self._ask_again = True
        self._wake.set()
        while self._host_records == before and time.monotonic() < deadline:
            if self._collectors[0].status.state is not State.OK:
                return
            time.sleep(0.01)

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(5.0)

    def __enter__(self) -> HostRecorder:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        number, asked = 0, False
        told: list[int] | None = None
        try:
            while not self._stop.is_set():
                if self._ask_again or self._wanted != told:
                    told, asked, self._ask_again = self._wanted, self._ask_again, False
                    for collector in self._collectors:
                        collector.watch(told or ())
                number = self._round(descriptor, number)
                # The answer to a question comes within milliseconds.
                self._wake.wait(_POLL_S / 20 if asked else _POLL_S)
                self._wake.clear()
            self._round(descriptor, number)
        finally:
            for collector in self._collectors:
                collector.close()
            os.close(descriptor)

    def _awake(self) -> Iterator[SupervisedCollector]:
        """The collectors to ask: the next one starts when the one before has delivered, or has taken too long.

        Two interpreters that start at once beside a job on few cores are felt in its steps.
        """
        late = time.monotonic() - self._begun > _APART_S
        for collector in self._collectors:
            yield collector
            if collector.status.state is State.STARTING and not late:
                return

    def _round(self, descriptor: int, number: int) -> int:
        lines = []
        for collector in self._awake():
            for record in collector.poll():
                self._host_records += record["k"] == "host"
                if record["k"] in ("oom_kill", "fault") and record["t"] < self._since:
                    continue  # the kernel log goes back to the boot; other people's ends are none of this job's
                if self._on_record is not None:
                    self._on_record(record)
                if self._thinner.keep(record):
                    lines.append(json.dumps({**record, "n": number}, separators=(",", ":")))
                    number += 1
        if lines and os.fstat(descriptor).st_size < MAX_BYTES:
            try:
                os.write(descriptor, ("\n".join(lines) + "\n").encode())
            except OSError:
                # A full disk must not disturb the job; the gap shows in the sequence numbers.
                return number
        return number


def node_name(host: str = "") -> str:
    """A host's name (default: this one's) as a file name."""
    name = (host or socket.gethostname()).split(".")[0]
    return "".join(char if char.isalnum() or char in "-_" else "_" for char in name) or "localhost"


def read_host_records(folder: Path, limit_bytes: int = MAX_BYTES) -> list[Record]:
    """All records of `folder/host/*.jsonl` in order of time; lines that do not parse are left out."""
    records: list[Record] = []
    for path in sorted((Path(folder) / layout.HOST_DIR).glob("*.jsonl")):
        with path.open("rb") as file:
            data = file.read(limit_bytes)
        for line in data.split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if (
                isinstance(record, dict)
                and isinstance(record.get("t"), int)
                and isinstance(record.get("k"), str)
            ):
                record.setdefault("node", path.stem)
                records.append(record)
    records.sort(key=lambda each: each["t"])
    return records
