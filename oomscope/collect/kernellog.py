"""Facts in the kernel log: who was killed for memory, GPU faults (Xid), crashes.

Reading it needs a right that containers and hardened hosts often withhold (`kernel.dmesg_restrict`);
`read` says so.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from oomscope.collect.base import Record
from oomscope.units import KIB

_KILLED = re.compile(
    r"(?P<scope>Memory cgroup out of memory|Out of memory)[^:]*: "
    r"Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)"
    r".*?anon-rss:(?P<anon>\d+)kB(?:.*?shmem-rss:(?P<shmem>\d+)kB)?"
)
_XID = re.compile(
    r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?:, pid='?(?P<pid>\d+|<unknown>)'?)?"
)
_TRAP = re.compile(r"traps: (?P<name>\S+)\[(?P<pid>\d+)\] (?:trap|general protection)")
_SEGFAULT = re.compile(r"(?P<name>\S+)\[(?P<pid>\d+)\]: segfault at")

#: Longest part of a line that is kept; kernel lines come from outside and end up on a screen.
_MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class KernelLog:
    """Records with their time in microseconds after boot, or why there are none."""

    records: list[tuple[int, Record]]
    why: str = ""


def parse(text: str) -> Record | None:
    """The record in one line of the kernel log, or None. The text is kept, without control characters."""
    clean = "".join(char if char.isprintable() else " " for char in text)[:_MAX_TEXT].strip()
    if found := _KILLED.search(text):
        return {
            "k": "oom_kill",
            "pid": int(found["pid"]),
            "name": found["name"],
            "anon_rss_bytes": int(found["anon"]) * KIB,
            "shmem_rss_bytes": int(found["shmem"] or 0) * KIB,
            "scope": "cgroup" if found["scope"].startswith("Memory cgroup") else "machine",
            "text": clean,
        }
    if found := _XID.search(text):
        record: Record = {
            "k": "xid",
            "bus": found["bus"].lower(),
            "code": int(found["code"]),
            "source": "kernel log",
            "text": clean,
        }
        if (found["pid"] or "").isdigit():
            record["pid"] = int(found["pid"])
        return record
    if found := _TRAP.search(text) or _SEGFAULT.search(text):
        return {"k": "fault", "pid": int(found["pid"]), "name": found["name"], "text": clean}
    return None


class Reader:
    """Reads /dev/kmsg without blocking; each call of `read` gives what is new since the last."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._file: int | None = None
        self.why = ""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.why = _refusal(path, error)

    def read(self, limit: int = 20_000) -> KernelLog:
        """What is new, at most `limit` lines; each line of /dev/kmsg is one system call."""
        if self._file is None:
            return KernelLog([], self.why)
        out = []
        for line in self._lines(limit):
            head, _, text = line.partition(";")
            fields = head.split(",")
            record = parse(text.split("\n", 1)[0])
            if record is not None and len(fields) >= 3 and fields[2].isdigit():
                out.append((int(fields[2]), record))
        return KernelLog(out, self.why)

    def _lines(self, limit: int) -> Iterator[str]:
        assert self._file is not None
        for _ in range(limit):
            try:
                chunk = os.read(self._file, 8192)
            except BlockingIOError:
                return
            except OSError as error:
                if (
                    error.errno == errno.EPIPE
                ):  # lines were overwritten before we read them: go on with the oldest
                    continue
                self.why = _refusal("/dev/kmsg", error)
                return
            if not chunk:
                return
            yield chunk.decode(errors="replace")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _refusal(path: str, error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.EACCES):
        return (
            f"the kernel log may not be read ({path}): kernel.dmesg_restrict is set, or this is a container"
        )
    return f"the kernel log cannot be read: {path}: {error.strerror}"
