"""Loads memory snapshots that nobody vouches for.

The bytes are unpickled in a child process that can make no Python object but numbers, text and containers,
has an address-space and a
time limit, and hands arrays back. Whatever the file does, the caller gets a `Snapshot` or one
`SnapshotError`.

    snapshot = load_snapshot(Path("rank0.pickle"))
    with SnapshotLoader() as loader:               # one child for many files
        ranks = [loader.load(path) for path in snapshot_files(folder)]
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from oomscope.errors import SnapshotError
from oomscope.store._snapshot_bytes import size_of
from oomscope.store._snapshot_names import SUFFIXES, identity_of, snapshot_files
from oomscope.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from oomscope.core.snapshot.model import Snapshot

__all__ = [
    "SUFFIXES", "Limits", "Selection", "SnapshotLoader", "estimated_bytes", "identity_of", "load_snapshot",
    "snapshot_files",
]  # fmt: skip

OnProgress = Callable[[float, str], None]
"""Called with the part done (0 to 1) and a word for what is going on."""

GROWTH = 5.0
"""Unpickled bytes per byte of pickle; 4.2 to 4.7 measured on real files of 4 and 199 MB with CPython 3.11."""

HEADROOM = 256 * MIB
"""Room for the interpreter's and numpy's own growth, whatever the file."""


_CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from oomscope.store._snapshot_child import main; main(int(sys.argv[2]), float(sys.argv[3]))"
)
_PIPE = 1 << 20
"""Bytes that a pipe holds: what an ordinary user may ask of Linux; without effect elsewhere."""
_DEATHS = {
    "SIGKILL": "out of memory?",
    "SIGXCPU": "too much work",
    "SIGSEGV": "nested too deeply, or damaged",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loading process may use."""

    memory_bytes: int | None = None
    """Address space beyond the empty process; None = from the file's size, at most 80 % of what the machine
    has free."""
    seconds: float | None = None
    """Wall-clock time per file; None = 30 s and 60 s per GiB of pickle."""

    def seconds_for(self, file_bytes: int) -> float:
        return self.seconds if self.seconds is not None else 30.0 + 60.0 * file_bytes / GIB


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of each device's history to keep; all by default."""

    last: int | None = None
    """Only the last rows."""
    start: int | None = None
    stop: int | None = None
    """Rows from `start` up to, not including, `stop`. Rows after `stop` are loaded but not looked at: the
    segments are the
    state after them."""


def estimated_bytes(file_bytes: int) -> int:
    """Peak memory that loading a pickle of `file_bytes` may take."""
    return int(file_bytes * (GROWTH + 1)) + HEADROOM


def load_snapshot(
    path: Path | str,
    *,
    limits: Limits | None = None,
    selection: Selection | None = None,
    on_progress: OnProgress | None = None,
) -> Snapshot:
    """The snapshot in `path`: a pickle of any protocol, gzip, zstd, or torch's HTML page.

    Raises:
        SnapshotError: not a snapshot, refused, damaged, or beyond the limits. It says which.
    """
    with SnapshotLoader(limits=limits) as loader:
        return loader.load(Path(path), selection=selection, on_progress=on_progress)


class SnapshotLoader:
    """One loading process for one or many files; it is replaced when a file kills it."""

    def __init__(self, *, limits: Limits | None = None, scan: bool = True) -> None:
        """`scan=False` unpickles every row; for tests and comparisons."""
        self._limits = limits or Limits()
        self._scan = scan
        self._child: subprocess.Popen[bytes] | None = None
        self._allowed = 0
        self._errors: IO[bytes] | None = None

    def __enter__(self) -> SnapshotLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(
        self, path: Path, *, selection: Selection | None = None, on_progress: OnProgress | None = None
    ) -> Snapshot:
        """The snapshot in `path`.

        Raises:
            SnapshotError: as for `load_snapshot`.
        """
        identity = identity_of(path)
        request = {
            "do": "load",
            "scan": self._scan,
            "identity": [identity.rank, identity.step, identity.pid],
            **asdict(selection or Selection()),
        }
        head, payload = self._ask(path, request, on_progress)
        from oomscope.store._snapshot_wire import unpack

        return unpack(head["snapshot"], payload)

    def convert(
        self,
        path: Path,
        target: Path,
        *,
        scrub: bool = False,
        names: tuple[str, ...] = (),
        on_progress: OnProgress | None = None,
    ) -> dict[str, Any]:
        """Rewrite `path` in torch's own schema with pickle protocol 4; with `scrub`, without names of people.

        Returns:
            "target", "bytes", and "replaced": name -> what stands in for it.

        Raises:
            SnapshotError: as for `load_snapshot`, or `target` cannot be written.
        """
        request = {"do": "convert", "target": str(target.absolute()), "scrub": scrub, "names": list(names)}
        head, _ = self._ask(path, request, on_progress)
        done: dict[str, Any] = head["done"]
        return done

    def close(self) -> None:
        """End the loading process."""
        child, self._child = self._child, None
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
        child.kill()
        child.wait()
        if self._errors is not None:
            self._errors.close()

    def _ask(
        self, path: Path, request: dict[str, Any], on_progress: OnProgress | None
    ) -> tuple[dict[str, Any], memoryview]:
        size = size_of(path)
        seconds = self._limits.seconds_for(size)
        allowed = self._memory_for(path, size)
        child = self._running(allowed, seconds)
        request = {**request, "path": str(path.absolute()), "unfold_limit": int(self._allowed / (GROWTH + 1))}
        answers = _Answers(child, time.monotonic() + seconds)
        try:
            answers.send(request)
            # Brings numpy in, while the other process works.
            from oomscope.store._snapshot_wire import payload_bytes

            while "progress" in (head := answers.line()):
                if on_progress is not None:
                    on_progress(head["progress"], head["text"])
            if "error" in head:
                raise SnapshotError(head["error"], hint=head["hint"])
            payload = answers.read(payload_bytes(head["snapshot"])) if "snapshot" in head else memoryview(b"")
        except TimeoutError as error:
            self.close()
            raise SnapshotError(
                f"{path} was not read within {seconds:.0f} s", hint="raise the limit with --max-seconds"
            ) from error
        except (EOFError, BrokenPipeError) as error:
            raise SnapshotError(f"{path}: {self._obituary()}") from error
        if on_progress is not None:
            on_progress(1.0, "loaded")
        return head, payload

    def _memory_for(self, path: Path, size: int) -> int:
        """Bytes to allow for a file of `size` bytes.

        Raises:
            SnapshotError: the machine does not have that much free.
        """
        if self._limits.memory_bytes is not None:
            return self._limits.memory_bytes
        needed = estimated_bytes(size)
        free = _free_memory()
        if needed > 0.8 * free:
            raise SnapshotError(
                f"{path} is {format_bytes(size)}; reading it may take {format_bytes(needed)} of memory, and "
                f"{format_bytes(free)} are free",
                hint="give a limit yourself with --max-memory, or read it on a machine with more memory",
            )
        return max(needed, min(2 * needed, int(0.8 * free)), 2 * GIB if size > 64 * MIB else 0)

    def _running(self, allowed: int, seconds: float) -> subprocess.Popen[bytes]:
        """A loading process that may use at least `allowed` bytes."""
        if self._child is not None and self._child.poll() is None and self._allowed >= allowed:
            return self._child
        self.close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        self._allowed = allowed
        root = str(Path(__file__).resolve().parents[2])
        search = [root, *(entry for entry in sys.path if entry and entry != root)]
        environment = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        # The processor-time limit covers all files of this process; the wall-clock limit is per file.
        self._child = subprocess.Popen(
            [
                sys.executable, "-I", "-S", "-c", _CHILD,
                json.dumps(search), str(allowed), str(4 * seconds + 3600),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
            pipesize=_PIPE,
        )  # fmt: skip
        return self._child

    def _obituary(self) -> str:
        """Why the loading process ended."""
        child, errors = self._child, self._errors
        code = child.wait() if child is not None else None
        last = ""
        if errors is not None:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
            last = lines[-1][:200] if lines else ""
        self.close()
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
            return f"the process that read it was ended by {name} ({_DEATHS.get(name, 'damaged?')})"
        if "MemoryError" in last:
            return "needs more memory than the limit allows (damaged, or larger than it looks)"
        return f"the process that read it failed ({last or f'exit code {code}'})"


def _free_memory() -> int:
    """Bytes of memory that the machine can give without swapping."""
    try:
        text = Path("/proc/meminfo").read_text()
        return int(text.split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        import psutil  # for other systems; slow to import

        return int(psutil.virtual_memory().available)


class _Answers:
    """The pipes to a loading process, with a deadline."""

    def __init__(self, child: subprocess.Popen[bytes], deadline: float) -> None:
        if child.stdin is None or child.stdout is None:
            raise ValueError("the child needs pipes")
        self._stdin = child.stdin
        self._out = child.stdout.fileno()
        self._deadline = deadline
        self._rest = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)

    def send(self, request: dict[str, Any]) -> None:
        self._stdin.write(json.dumps(request).encode() + b"\n")
        self._stdin.flush()

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0 or not self._selector.select(left):
            raise TimeoutError

    def line(self) -> dict[str, Any]:
        """The next JSON line.

        Raises:
            TimeoutError: the deadline passed.
            EOFError: the process ended.
        """
        while (end := self._rest.find(b"\n")) < 0:
            self._wait()
            chunk = os.read(self._out, 1 << 20)
            if not chunk:
                raise EOFError
            self._rest += chunk
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        found: dict[str, Any] = json.loads(line)
        return found

    def read(self, count: int) -> memoryview:
        """Exactly `count` bytes; raises as `line` does."""
        # Mapped, and so not filled with zeros first; there is no mapping of 0 bytes.
        view = memoryview(mmap.mmap(-1, count)) if count else memoryview(bytearray())
        have = min(len(self._rest), count)
        view[:have] = self._rest[:have]
        del self._rest[:have]
        while have < count:
            self._wait()
            got = os.readv(self._out, [view[have:]])
            if not got:
                raise EOFError
            have += got
        return view.toreadonly()
