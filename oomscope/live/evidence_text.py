"""Evidence from what people have at hand: a pasted text, a log file, a snapshot file.

No session needed, and no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from oomscope.core.diagnosis.arithmetic import analyse
from oomscope.core.diagnosis.evidence import Evidence, Signal
from oomscope.core.diagnosis.log import LogReading, LogScanner
from oomscope.core.diagnosis.message import DEVICE_KINDS, OomMessage
from oomscope.core.diagnosis.signals import from_frames
from oomscope.errors import InputError

CHUNK = 1 << 20
_HEAD = 4096
_PICKLE = re.compile(rb"\x80[\x02-\x05]|\(dp?0|\(lp?0|\}q|\]q")
SHORT_TEXT = 4000
"""A text of at most so many characters may be a person's description."""


def _heard(about: str) -> tuple[Signal, ...]:
    """Signals of a person's words; the table of words is large, and most logs come without any."""
    if not about.strip():
        return ()
    from oomscope.core.diagnosis.words import from_words

    return from_words(about)


def is_snapshot(head: bytes) -> bool:
    """Whether the first bytes of a file are a pickle, compressed or inside torch's HTML page."""
    if _PICKLE.match(head) or head[:4] == b"\x28\xb5\x2f\xfd":
        return True
    if head[:2] == b"\x1f\x8b":
        return b".pickle" in head or b".pkl" in head
    return (
        head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")) and b"_memory_viz" in head
    ) or (b"MemoryViz" in head)


def reject_binary(head: bytes, name: str) -> None:
    """Refuse what is neither text nor a snapshot.

    Raises:
        InputError: the bytes hold NULs (and are no UTF-16 text).
    """
    utf16 = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    if b"\x00" in head and not utf16:
        raise InputError(
            f"{name} is a binary file: neither a log nor a memory snapshot",
            hint="give the job's output, or a snapshot written by torch.cuda.memory._dump_snapshot",
        )


def read_stream(stream: IO[bytes], name: str) -> LogReading:
    """Read a log to its end, in bounded memory.

    Raises:
        InputError: binary.
    """
    scanner = LogScanner()
    first = stream.read(_HEAD)
    reject_binary(first, name)
    scanner.feed(first)
    for chunk in _chunks(stream):
        scanner.feed(chunk)
    return scanner.finish()


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK):
        yield chunk


def from_reading(reading: LogReading, *, source: str, about: str = "", job: int | None = None) -> Evidence:
    """Evidence of a log: the first failing rank's message of one job (default: the last), with its stack.

    Args:
        reading: the log.
        source: "log", "text" or "standard input".
        about: what a person adds in words; weak evidence.
        job: number of the run inside the log, from 0.
    """
    number = reading.jobs - 1 if job is None else job
    mine = [m for m in reading.messages if m.job == number]
    message = choose(mine, reading.first_rank)
    signals: list[Signal] = list(from_frames(message.frames, "traceback")) if message is not None else []
    if message is not None and "clone()" in message.before:
        signals.append(Signal("op:clone", "a clone() of the state dict failed", "message"))
    signals += _heard(about)
    ranks = sorted({m.rank for m in mine if m.rank is not None and m.is_oom})
    if len(ranks) > 1:
        signals.append(Signal("uses:ranks", f"ranks {', '.join(map(str, ranks))} report it", "log"))
    notes = []
    if reading.jobs > 1:
        notes.append(f"the log holds {reading.jobs} runs; run {number + 1} is judged (--job chooses)")
    if reading.dropped:
        notes.append(f"{reading.dropped} further places were not read: the log repeats itself")
    return Evidence(
        sources=(source,),
        messages=reading.messages,
        first_rank=reading.first_rank,
        first_rank_reason=reading.first_rank_reason if reading.first_rank is not None else "",
        message=message,
        arithmetic=analyse(message) if message is not None else None,
        signals=tuple(signals),
        notes=tuple(notes),
    )


def choose(messages: Iterable[OomMessage], rank: int | None) -> OomMessage | None:
    """The message to judge: of the first failing rank, rather an allocator's with numbers than a library's echo."""
    candidates = [
        m for m in messages if m.is_oom or m.kind.endswith("_maybe_oom") or m.kind == "host_maybe_kill"
    ]
    of_rank = [m for m in candidates if m.rank == rank] if rank is not None else []
    pool = of_rank or candidates
    fatal = [m for m in pool if not m.is_warning] or pool

    def worth(message: OomMessage) -> tuple[bool, bool]:
        return message.allocated_bytes is not None, message.kind in DEVICE_KINDS

    return max(fatal, key=worth, default=None)


def description(text: str) -> str:
    """The part of a short pasted text that is a person's own words; "" for logs and long texts."""
    if len(text) > SHORT_TEXT or "Traceback (most recent call last)" in text:
        return ""
    lines = [line for line in text.splitlines() if "Tried to allocate" not in line and "PyTorch" not in line]
    return "\n".join(lines)


def from_snapshot(path: Path, *, about: str = "") -> Evidence:
    """Evidence of a snapshot file alone.

    Raises:
        SnapshotError: not a snapshot, damaged, or beyond the limits.
    """
    from oomscope.live.evidence import with_snapshot_facts
    from oomscope.live.evidence_snapshot import read_snapshot

    found = read_snapshot(path, device=None, steps=(), oom=None, strict=True)
    evidence = with_snapshot_facts(Evidence(), found)
    frames = evidence.oom.frames if evidence.oom is not None else ()
    signals = (*(from_frames(frames, "snapshot") if frames else ()), *_heard(about))
    return replace(evidence, signals=signals)
