"""Ranks that were ended by SIGTERM, told in their own record files once they are gone.

A rank cannot say so itself: a Python handler may never run, and would turn torchrun's shutdown of a tenth of a
second into thirty. The agent has faulthandler write the stacks of all threads from the signal handler in C; a file
that holds such stacks is the evidence, and its time of change is when the signal came.
"""

from __future__ import annotations

import os
from pathlib import Path

from oomscope.protocol import layout
from oomscope.protocol.records import TERM, encode
from oomscope.store.tail import read_records


def tell_terminations(attempt_dir: Path) -> list[str]:
    """Append a `term` record for each process that left stacks and is not told of yet; the names of their files.

    Only for processes that have ended: nobody else may append to the file of one that lives.
    """
    told = []
    for stacks in sorted((attempt_dir / layout.STACKS_DIR).glob("*.txt")):
        path = attempt_dir / layout.PROCS_DIR / f"{stacks.stem}.jsonl"
        try:
            found = stacks.stat()
            records = read_records(path) if found.st_size else []
        except OSError:
            continue
        if records and not any(record.get("k") == TERM for record in records):
            _append(path, records, f"{layout.STACKS_DIR}/{stacks.name}", found.st_mtime_ns)
            told.append(path.name)
    return told


def _append(path: Path, records: list[dict[str, object]], stacks: str, when_ns: int) -> None:
    last = records[-1].get("n")
    number = last + 1 if isinstance(last, int) else 0
    line = encode({"t": when_ns, "k": TERM, "n": number, "signal": "SIGTERM", "stacks": stacks})
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.write(descriptor, b"\n" + line)  # what it wrote last may be torn
        finally:
            os.close(descriptor)
    except OSError:
        return
