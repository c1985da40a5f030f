"""The process that touches untrusted pickles, and hands columns back.

It unpickles without globals and under limits. Requests are JSON lines on standard input, one file each; an
answer is one JSON line on
standard output, followed by the arrays when there are any. A crash, a hang or too much memory costs this
process only;
`oomscope.store.snapshots` starts another.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import pickle
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

from oomscope.core.snapshot.identity import Identity
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot
from oomscope.core.snapshot.parse import parse_snapshot
from oomscope.core.snapshot.scan import Unscannable, scan
from oomscope.core.snapshot.scanned_rows import ScannedRows
from oomscope.errors import SnapshotError
from oomscope.store._snapshot_bytes import Buffer, pickle_bytes, release
from oomscope.store._snapshot_convert import convert
from oomscope.store._snapshot_wire import pack

DAMAGE = (
    pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, KeyError, IndexError,
    OverflowError, MemoryError, RecursionError, UnicodeDecodeError,
)  # fmt: skip
"""What a damaged or hostile pickle makes the unpickler and the parser raise."""


class NoGlobals(pickle.Unpickler):
    """An unpickler that makes numbers, text, lists, tuples and dictionaries, and nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"it refers to the Python object {module}.{name}, which a snapshot never does"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it holds a persistent id, which a snapshot never does")


def unpickle(data: Buffer) -> object:
    """The object in `data`; bytes after the end of the pickle are ignored."""
    return NoGlobals(_Reader(data)).load()


class _Reader:
    """A buffer as a file; with `peek` it is asked once per 128 KiB, not once per opcode."""

    def __init__(self, data: Buffer) -> None:
        self._view = memoryview(data)
        self._position = 0

    def peek(self, count: int) -> bytes:
        return bytes(self._view[self._position : self._position + count])

    def read(self, count: int) -> bytes:
        part = self.peek(count)
        self._position += len(part)
        return part

    def readinto(self, target: Any) -> int:
        wanted = memoryview(target).cast("B")
        part = self._view[self._position : self._position + len(wanted)]
        wanted[: len(part)] = part
        self._position += len(part)
        return len(part)

    def readline(self) -> bytes:
        end = self._position
        while end < len(self._view):
            found = bytes(self._view[end : end + 4096]).find(b"\n")
            end = end + found + 1 if found >= 0 else min(end + 4096, len(self._view))
            if found >= 0:
                break
        line = bytes(self._view[self._position : end])
        self._position = end
        return line


SCAN_FROM = 1 << 20
"""Bytes from which a file is scanned; below it, unpickling takes a few milliseconds."""


def reference_of(head: bytes) -> int:
    """Reference of the object that was memoized last in a stream that stops there."""
    unpickler = NoGlobals(_Reader(head))
    unpickler.load()
    return len(unpickler.memo.copy()) - 1  # only the C unpickler has it


def forgetting(data: Buffer) -> Callable[[int], None]:
    """What lets go of the pages of a mapped file that have been read."""

    def forget(end: int) -> None:
        if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            data.madvise(mmap.MADV_DONTNEED, 0, end - end % mmap.PAGESIZE)

    return forget


def names_of(request: dict[str, Any]) -> dict[str, Any]:
    return {"name": Path(request["path"]).name, "identity": Identity(*request["identity"])}


class Worker:
    """Answers requests on a pair of binary streams."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests = requests
        self._answers = answers

    def serve(self) -> None:
        """Answer until the requests end."""
        for line in self._requests:
            self._answer(json.loads(line))

    def _answer(self, request: dict[str, Any]) -> None:
        path = Path(request["path"])
        try:
            head, arrays = self._do(request, path)
        except SnapshotError as error:
            text = error.message if str(path) in error.message else f"{path}: {error.message}"
            self._say({"error": text, "hint": error.hint})
        except DAMAGE as error:
            self._say({"error": f"{path}: {describe(error)}", "hint": None})
        else:
            self._say(head)
            for array in arrays:
                self._answers.write(memoryview(array).cast("B") if len(array) else b"")
            self._answers.flush()

    def _do(self, request: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[Any]]:
        data = pickle_bytes(path, limit=request["unfold_limit"])
        self.progress(0.05, "reading")
        if request["do"] == "convert":
            return {"done": convert(unpickle(data), request)}, []
        snapshot = self._load(data, request)
        head, arrays = pack(snapshot)
        return {"snapshot": head}, arrays

    def _load(self, data: Buffer, request: dict[str, Any]) -> Snapshot:
        snapshot = self._scanned(data, request) if len(data) >= SCAN_FROM and request["scan"] else None
        if snapshot is None:
            raw = unpickle(data)
            release(data)
            self.progress(0.6, "unpickled")
            snapshot = parse_snapshot(raw, **names_of(request))
            del raw
        self.progress(0.9, "parsed")
        for device in snapshot.devices:
            select(device, request)
        return snapshot

    def _scanned(self, data: Buffer, request: dict[str, Any]) -> Snapshot | None:
        """The snapshot by way of `scan`; None when the stream does not suit it, damaged ones included."""
        view = memoryview(data)
        try:
            scanned = scan(view, reference_of, forgetting(data))
            self.progress(0.5, "scanned")
            found = unpickle(scanned.rest)
            if type(found) is not tuple or len(found) != 2 or type(found[1]) is not list:
                return None
            rows = ScannedRows(scanned, found[1])
            scanned.rest = b""
            return parse_snapshot(found[0], runs=rows, **names_of(request))
        except (Unscannable, SnapshotError, *DAMAGE):
            return None
        finally:
            view.release()

    def progress(self, fraction: float, text: str) -> None:
        self._say({"progress": fraction, "text": text})

    def _say(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message).encode() + b"\n")
        self._answers.flush()


def select(device: DeviceSnapshot, request: dict[str, Any]) -> None:
    """Keep the rows that were asked for: the last ones, or `start` to `stop`."""
    count = len(device.events)
    start, stop = request.get("start") or 0, request.get("stop")
    if request.get("last") is not None:
        start = max(0, count - request["last"])
    start = min(start, count)
    if start:
        device.events = device.events.sliced(start, count)
        device.skipped_events = start
    if stop is not None and stop < count:
        device.window = max(0, stop - start)


def describe(error: BaseException) -> str:
    """One sentence for what the unpickler or parser raised."""
    if isinstance(error, MemoryError):
        return "needs more memory than the limit allows (damaged, or larger than it looks)"
    if isinstance(error, RecursionError):
        return "nested too deeply for a memory snapshot"
    if isinstance(error, EOFError):
        return "ends in the middle: the file is cut off"
    text = str(error)[:200].replace("\n", " ")
    if "refers to" in text or "persistent id" in text:
        return f"refused: {text}"
    return f"not a readable pickle ({text or type(error).__name__})"


def limit_resources(extra_bytes: int, seconds: float) -> None:
    """Allow `extra_bytes` of address space beyond what is mapped now, and `seconds` of processor time."""
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        mapped = 1 << 30
    _limit(resource.RLIMIT_AS, mapped + extra_bytes)
    _limit(resource.RLIMIT_CPU, int(seconds) + 1)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, hard))


def main(extra_bytes: int, seconds: float) -> None:
    """Answer requests from standard input until it ends.

    Answers leave through a copy of standard output, and whatever else writes there goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit_resources(extra_bytes, seconds)
    # The collector would walk a million new dictionaries again and again: 2.5 times slower. Nothing here
    # makes cycles.
    gc.disable()
    Worker(sys.stdin.buffer, answers).serve()
