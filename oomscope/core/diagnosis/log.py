"""Read a log of any size in one pass: out-of-memory texts, other tracebacks, and the rank that failed first.

The scan looks for a few literal words with `bytes.find` (a gigabyte in seconds) and gives only the
neighbourhood of a hit to the parser. Memory stays bounded: at most one buffer of a few megabytes is held.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from oomscope.core.diagnosis.message import OomMessage
from oomscope.core.diagnosis.messages import merge, parse_lines

_BLOCK = 1 << 20
_BEFORE = 32 << 10
"""Bytes above a hit that are parsed with it: the traceback."""
_AFTER = 6 << 10
"""Bytes below: a wrapped text with its process list."""
_SMALL = 64 << 10
"""A pasted text is parsed whole: it may be wrapped inside every word that the search looks for."""
_MAX_MESSAGES = 2000
"""More texts than this are counted, not kept: a job that retries for hours repeats itself."""

#: Words of which every form has at least one (a test has a sample of each form). Each costs a pass over the
#: log (3 ms for 10 MB), so the list is short; the allocator's own text has three, in case it is wrapped inside one.
_TRIGGERS = tuple(
    word.encode()
    for word in (
        "ut of memory", "ried to allocate", "total capac", "alid cuDNN algorithm", "NVML_SUCCESS",
        "ailed to CUDA", "ERROR_OUT_OF", "No space left on device", "unable to write to file",
        "annot allocate memory", "bad_alloc", "aging file is too", "exitcode", "xit code", "with code",
        "xit status", "return code", "SIGKILL", "Killed", "exited unexpectedly", "MemoryError", "Bus error",
        "_STATUS_", "slurmstepd", "dev/shm", "posix_memalign(", "oom-kill", " memory limit",
        "NCCL error in", "low on memory", "rrorMemoryAllocation", "rrorOutOfMemory",
        "driver error", "unable to find an engine", "CUFFT_ALLOC", "cient shared", "with status",
    )
)  # fmt: skip
_TRACEBACK = b"Traceback (most recent call last)"
_ROOT_CAUSE = "Root Cause (first observed failure)"
_ROOT_RANK = re.compile(r"\[?\d*\]?:?.*?rank\s*:\s*(\d+)\s*\(local_rank:", re.DOTALL)
_LAUNCHES = (
    b"torch/distributed/run.py",
    b"torch.distributed.run",
    b"*****************************************\nSetting OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class LogReading:
    """What a log says."""

    messages: tuple[OomMessage, ...]
    first_rank: int | None
    """The rank whose text (or death) came first; None when the log does not say."""
    first_rank_reason: str
    tracebacks: int
    """Python tracebacks in all."""
    other_tracebacks: int
    """Tracebacks that do not belong to an out-of-memory text."""
    lines: int
    bytes_read: int
    dropped: int
    """Places beyond the limit that were counted and not read; 0 when everything was read."""

    @property
    def jobs(self) -> int:
        """Runs that the log holds, judged by its texts; at least 1."""
        return 1 + max((message.job for message in self.messages), default=0)

    @property
    def events(self) -> tuple[OomMessage, ...]:
        """The messages that are a shortage of memory."""
        return tuple(message for message in self.messages if message.is_oom)


class LogScanner:
    """Feed bytes, then `finish()`. UTF-16 (PowerShell's redirection) is recognised by its byte-order mark."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._first_line = 1
        self._done = 0
        self._size = 0
        self._tracebacks = 0
        self._found: list[OomMessage] = []
        self._recent: set[tuple[int | None, str, str]] = set()
        self._dropped = 0
        self._root_rank: int | None = None
        self._launches: list[int] = []
        self._decoder: codecs.IncrementalDecoder | None = None

    def feed(self, data: bytes) -> None:
        if self._size == 0 and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self._size += len(data)
        self._buffer += self._decoder.decode(data).encode() if self._decoder else data
        if len(self._buffer) - self._done >= _BLOCK:
            self._scan(last=False)

    def finish(self) -> LogReading:
        self._scan(last=True)
        lines = (
            self._first_line
            - 1
            + self._buffer.count(b"\n")
            + (not self._buffer.endswith(b"\n") and bool(self._buffer))
        )
        messages = tuple(_number_jobs(merge(sorted(self._found, key=lambda m: m.line or 0)), self._launches))
        rank, reason = first_rank(messages, self._root_rank)
        with_traceback = sum(
            1
            for message in messages
            if message.frames and (message.is_oom or message.kind.endswith("maybe_oom"))
        )
        return LogReading(
            messages=messages,
            first_rank=rank,
            first_rank_reason=reason,
            tracebacks=self._tracebacks,
            other_tracebacks=max(0, self._tracebacks - with_traceback),
            lines=lines,
            bytes_read=self._size,
            dropped=self._dropped,
        )

    def _scan(self, *, last: bool) -> None:
        """Parse around every hit up to the safe end of the buffer, then drop what no later hit can need."""
        buffer = bytes(self._buffer)
        end = len(buffer) if last else max(self._done, len(buffer) - _AFTER)
        self._tracebacks += buffer.count(_TRACEBACK, self._done, min(len(buffer), end + len(_TRACEBACK) - 1))
        for word in _LAUNCHES:
            at = buffer.find(word, self._done, end)
            while at >= 0:
                self._launches.append(self._first_line + buffer.count(b"\n", 0, at))
                at = buffer.find(word, at + len(word), end)
        small = last and self._done == 0 and len(buffer) <= _SMALL
        for start, stop in [(0, len(buffer))] if small else _windows(buffer, self._done, end):
            self._parse(buffer, start, stop)
        self._done = end
        drop = max(0, end - _BEFORE)
        cut = buffer.rfind(b"\n", 0, drop) + 1
        if cut == 0 and drop > 4 * _BLOCK:
            cut = drop  # one endless line: cut it anywhere
        self._first_line += buffer.count(b"\n", 0, cut)
        self._done -= cut
        del self._buffer[:cut]

    def _parse(self, buffer: bytes, start: int, stop: int) -> None:
        if len(self._found) >= _MAX_MESSAGES:
            self._dropped += 1
            return
        number = self._first_line + buffer.count(b"\n", 0, start)
        text = buffer[start:stop].decode("utf-8", "replace")
        for message in parse_lines(enumerate(text.split("\n"), number)):
            key = (message.line, message.kind, message.text[:40])
            if key not in self._recent:
                self._recent.add(key)
                self._found.append(message)
        root = text.find(_ROOT_CAUSE)
        if root >= 0 and self._root_rank is None:
            match = _ROOT_RANK.search(text, root, root + 2000)
            self._root_rank = int(match.group(1)) if match else None


def _windows(buffer: bytes, begin: int, end: int) -> list[tuple[int, int]]:
    """Neighbourhoods of all hits in `[begin, end)`, snapped to lines and merged, in order."""
    hits: list[int] = []
    for word in _TRIGGERS:
        at = buffer.find(word, begin, end)
        while at >= 0:
            hits.append(at)
            at = buffer.find(word, at + len(word), end)
    windows: list[tuple[int, int]] = []
    for at in sorted(hits):
        if windows and at + 200 < windows[-1][1]:
            start, stop = windows[-1]
            windows[-1] = (start, max(stop, _line_end(buffer, at + _AFTER)))
            continue
        start = buffer.rfind(b"\n", 0, max(0, at - _BEFORE)) + 1
        start = max(start, at - 2 * _BEFORE, windows[-1][1] if windows else 0)
        windows.append((start, _line_end(buffer, at + _AFTER)))
    return windows


def _line_end(buffer: bytes, at: int) -> int:
    """End of the line at `at`, or 4 KiB on when the line is endless."""
    if at >= len(buffer):
        return len(buffer)
    found = buffer.find(b"\n", at, at + 4096)
    return found + 1 if found >= 0 else min(len(buffer), at + 4096)


def scan(chunks: Iterable[bytes]) -> LogReading:
    """Read a whole log from `chunks`."""
    scanner = LogScanner()
    for chunk in chunks:
        scanner.feed(chunk)
    return scanner.finish()


def scan_text(text: str) -> LogReading:
    """Read a log that is already a string."""
    return scan([text.encode("utf-8", "replace")])


def first_rank(messages: Iterable[OomMessage], root_rank: int | None = None) -> tuple[int | None, str]:
    """(rank, reason) of the first failure.

    The launcher's own root cause, else time stamps, else the order of the log.
    """
    ranked = [m for m in messages if m.rank is not None and m.is_oom]
    if not ranked:
        return None, "no rank stands in the log"
    ranks = {m.rank for m in ranked}
    if len(ranks) == 1:
        return ranked[0].rank, "only this rank reports it"
    stamps = [m.time_s for m in ranked if m.time_s is not None]
    if len(stamps) == len(ranked) and len(set(stamps)) > 1:
        first = min(ranked, key=lambda m: m.time_s or 0.0)
        return first.rank, "earliest time stamp"
    if root_rank is not None and root_rank in ranks:
        return root_rank, "the launcher's root cause"
    return ranked[0].rank, "first in the log"


def _number_jobs(messages: list[OomMessage], launches: list[int]) -> list[OomMessage]:
    """Give each message the number of its run.

    A new run begins where the same rank dies again after a launcher started, or where the same GPU suddenly
    has another capacity.
    """
    job = 0
    died: set[int | None] = set()
    capacities: dict[tuple[int | None, int | None], int] = {}
    numbered: list[OomMessage] = []
    last_line = 0
    for message in messages:
        line = message.line or 0
        gpu = (message.rank, message.gpu)
        known = capacities.get(gpu)
        other_card = (
            known is not None
            and message.capacity_bytes is not None
            and abs(known - message.capacity_bytes) > 0.02 * known
        )
        restarted = any(last_line < at <= line for at in launches) and message.rank in died
        if numbered and (other_card or restarted):
            job += 1
            died, capacities = set(), {}
        died.add(message.rank)
        if message.capacity_bytes is not None:
            capacities[gpu] = message.capacity_bytes
        last_line = line
        numbered.append(replace(message, job=job))
    return numbered
