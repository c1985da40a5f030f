"""Watches processes that are not our children: a pidfd tells when one ends, and on new kernels how.

The exit status of a foreign process can be read with PIDFD_GET_INFO, Linux 6.15 or newer
(include/uapi/linux/pidfd.h); on older kernels the end is seen and the status is None.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
from dataclasses import dataclass

from oomscope.collect.procfs import read_stat

_INFO_EXIT = 1 << 3
_INFO_SIZE = 64  # struct pidfd_info, first version: u64 mask, u64 cgroupid, 11 x u32 ids, s32 exit_code
_EXIT_OFFSET = 60
# _IOWR(0xFF, 11, struct pidfd_info)
_GET_INFO = (3 << 30) | (_INFO_SIZE << 16) | (0xFF << 8) | 11
#: The status appears when the parent reaps the process; a parent that never does must not hide the end from
#: us.
_ZOMBIE_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class End:
    """A process that ended; `status` as subprocess writes it (negative = signal), None when unknown."""

    pid: int
    start_ticks: int
    status: int | None


class ExitWatch:
    """A set of watched processes; `poll` returns those that ended since the last call."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, int]] = {}
        self._zombie_since: dict[int, float] = {}

    def add(self, pid: int) -> bool:
        """Watches `pid`; False when it does not exist or the kernel has no pidfd (before 5.3)."""
        if pid in self._files:
            return True
        stat = read_stat(pid)
        if stat is None or not hasattr(os, "pidfd_open"):
            return False
        try:
            self._files[pid] = (os.pidfd_open(pid), stat.start_ticks)
        except OSError:
            return False
        return True

    def poll(self, timeout_s: float = 0.0) -> list[End]:
        poller = select.poll()
        owners = {}
        for pid, (file, start) in self._files.items():
            poller.register(file, select.POLLIN)
            owners[file] = (pid, start)
        ended = []
        for file, _ in poller.poll(int(timeout_s * 1000)):
            pid, start = owners[file]
            status = exit_status(file)
            if status is None and self._may_still_tell(pid):
                continue
            ended.append(End(pid, start, status))
            os.close(file)
            del self._files[pid]
            self._zombie_since.pop(pid, None)
        return ended

    def _may_still_tell(self, pid: int) -> bool:
        stat = read_stat(pid)
        if stat is None or stat.state != "Z":
            return False
        now = time.monotonic()
        return now - self._zombie_since.setdefault(pid, now) < _ZOMBIE_GRACE_S

    def close(self) -> None:
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()


def exit_status(file: int) -> int | None:
    """Status of the ended process behind a pidfd: an exit code, -signal, or None when the kernel cannot tell.

    The kernel tells it only after the parent has reaped the process.
    """
    buffer = bytearray(_INFO_SIZE)
    struct.pack_into("<Q", buffer, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(file, _GET_INFO, buffer)
    except OSError:
        return None
    (mask,) = struct.unpack_from("<Q", buffer, 0)
    if not mask & _INFO_EXIT:
        return None
    (status,) = struct.unpack_from("<i", buffer, _EXIT_OFFSET)
    return os.waitstatus_to_exitcode(status)
