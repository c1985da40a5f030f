"""Ranks without an agent on the screens: what is seen from outside, in the files the agent would write."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from oomscope.collect.base import Record
from oomscope.collect.gpumap import Assignment
from oomscope.collect.machine import Machine
from oomscope.collect.stacks import StackDump, guess_from_locals, phase_of
from oomscope.launch.discover import Rank
from oomscope.protocol import layout
from oomscope.protocol.records import PROTOCOL_VERSION, encode


class ObservedRank:
    """Appends `hello`, `rank` and `reading` records of one rank, with `role` "observed".

    The step is a guess from local variables and the phase one from the stack; device numbers are NVML's, which count
    the whole process and not torch's allocator.
    """

    def __init__(self, rank: Rank, procs: Path) -> None:
        self._rank = rank
        self._path = procs / layout.proc_file(rank.rank, socket.gethostname(), rank.pid)
        self._sequence = 0
        self._device: str | None = None

    def write(self, machine: Machine, gpu: Assignment | None, stack: StackDump | None) -> None:
        """One reading; nothing when /proc no longer has the process."""
        rows = machine.host.get("processes", ())
        row = next((each for each in rows if each["pid"] == self._rank.pid), None)
        if row is None:
            return
        records: list[Record] = []
        if self._sequence == 0:
            records.append(self._hello())
        device = machine.gpus.get(gpu.uuid) if gpu is not None and gpu.uuid is not None else None
        if device is not None and self._device != device["uuid"]:
            self._device = device["uuid"]
            records.append(self._rank_record(device))
        records.append(_reading(row, device, stack))
        self._append(records)

    def _append(self, records: list[Record]) -> None:
        lines = []
        for record in records:
            lines.append(encode({"t": time.time_ns(), "n": self._sequence, **record}))
            self._sequence += 1
        try:
            descriptor = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError:
            return
        with open(descriptor, "ab", buffering=0) as file:
            file.write(b"".join(lines))

    def _hello(self) -> Record:
        rank = self._rank
        return {
            "k": "hello",
            "version": PROTOCOL_VERSION,
            "pid": rank.pid,
            "start_time": rank.start_ticks,
            "host": socket.gethostname(),
            "argv": list(rank.command[1:]),
            "identity": {"rank": rank.rank, "local_rank": rank.local_rank, "world_size": rank.world_size},
            "torch": None,
            "simulated": False,
            "role": "observed",
        }

    def _rank_record(self, device: Record) -> Record:
        return {
            "k": "rank",
            "rank": self._rank.rank,
            "local_rank": self._rank.local_rank,
            "world_size": self._rank.world_size,
            "device": None,
            "gpu_name": device.get("name"),
            "gpu_uuid": device.get("uuid"),
            "capacity_bytes": device.get("total_bytes"),
            "simulated": False,
        }


def _reading(row: Record, device: Record | None, stack: StackDump | None) -> Record:
    guess: dict[str, Any] = guess_from_locals(stack) if stack is not None else {}
    thread = stack.main if stack is not None else None
    reading: Record = {
        "k": "reading",
        "rss_bytes": row["rss_bytes"],
        "peak_rss_bytes": row["rss_bytes"],
        "step": guess.get("step", 0),
        "phase": (phase_of(thread) if thread is not None else None) or "other",
    }
    if device is not None and "used_bytes" in device:
        reading["device_total_bytes"] = device["total_bytes"]
        reading["device_free_bytes"] = device["total_bytes"] - device["used_bytes"]
    return reading
