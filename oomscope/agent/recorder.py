"""What is kept for the moment of an out-of-memory error: allocation history, stack, counters, snapshot.

The allocator calls its observers before the exception exists, so all tensors are still alive: after it has
unwound, the memory that mattered is gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import threading
import time
from types import FrameType
from typing import Any, Callable

from .guard import guarded
from .history import start_history
from .probes import Progress
from .readings import DeviceMemory, HostMemory

#: Innermost frames kept in a record.
MAX_FRAMES = 64
#: A snapshot is only written while this much of the disk stays free.
MIN_FREE_DISK_BYTES = 256 << 20

Frame = tuple[str, int, str]


def stack_of(frame: FrameType | None, own: str) -> list[Frame]:
    """(file, line, function) of `frame` and its callers, innermost first.

    Without the agent's own (folder `own`).
    """
    frames: list[Frame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(own):
            frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return frames


class Recorder:
    """Arms torch's history and out-of-memory observer; writes snapshots.

    Args:
        config: agent.json.
        name: gives (rank, step) for file names.
        on_oom: called after the record and the snapshot are written (tells the other ranks).
    """

    def __init__(
        self,
        torch: Any,
        config: dict[str, Any],
        progress: Progress,
        device: DeviceMemory,
        host: HostMemory,
        emit: Callable[[dict[str, Any]], None],
        *,
        own_folder: str,
        snapshot_name: Callable[[int, str], str],
        on_oom: Callable[[dict[str, Any]], None],
    ) -> None:
        self.last_oom: dict[str, Any] | None = None
        self._torch = torch
        self._config = config
        self._progress = progress
        self._device = device
        self._host = host
        self._emit = emit
        self._own = own_folder
        self._snapshot_name = snapshot_name
        self._on_oom = on_oom
        self._armed = False
        self._oom_snapshots = 0

    @guarded("history")
    def arm(self) -> None:
        """Once CUDA is initialised: attach the observer and switch the bounded history on."""
        if self._armed:
            return
        self._armed = True
        attach = getattr(self._torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self.observe)
        start_history(self._torch, self._config.get("history") or {})

    @guarded("oom")
    def observe(self, device: int, requested: int, capacity: int, free: int) -> None:
        """Called by torch's allocator at each out-of-memory error, caught or not.

        In the thread that asked for memory.
        """
        t = time.time_ns()
        frames = stack_of(sys._getframe(), self._own)
        in_backward = self._progress.in_backward > 0
        if not frames or threading.current_thread() is not threading.main_thread():
            # Backward runs in a thread of the autograd engine that has no Python frames: show who called it.
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            frames = frames or stack_of(main, self._own)
        stats = self._device.peaks.now(device)
        peaks = self._device.peaks.peek(device, stats)
        phase = self._progress.phase
        record: dict[str, Any] = {
            "k": "oom",
            "t": t,
            "step": self._progress.step,
            "micro_step": self._progress.micro_step,
            "phase": phase if phase != "other" else guess_phase(frames),
            "device": device,
            "requested_bytes": requested,
            "device_free_bytes": free,
            "capacity_bytes": capacity,
            "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
            "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
            "peak_allocated_bytes": self._device.peaks.overall(device, peaks, "allocated_bytes.all"),
            "peak_reserved_bytes": self._device.peaks.overall(device, peaks, "reserved_bytes.all"),
            "retries": stats.get("num_alloc_retries"),
            "message": None,
            "frames": frames,
            "caught": None,
            "in_backward": in_backward,
            "grad_enabled": self._torch.is_grad_enabled(),
            "snapshot": None,
        }
        if self._oom_snapshots == 0:  # one is enough when a script catches the error and tries again
            record["snapshot"] = self.snapshot("oom")
            self._oom_snapshots += 1
        self.last_oom = record
        self._emit(record)
        self._on_oom(record)

    @guarded("snapshot")
    def snapshot(self, reason: str) -> str | None:
        """Write the allocator's snapshot; returns its path relative to the attempt, or None."""
        folder = os.path.join(self._config["attempt_dir"], "snapshots")
        space = os.statvfs(folder)
        if space.f_bavail * space.f_frsize < MIN_FREE_DISK_BYTES:
            self._emit(
                {"k": "snapshot", "path": None, "bytes": 0, "sha256": None, "reason": "the disk is full"}
            )
            return None
        content = self._torch.cuda.memory._snapshot()
        name = self._snapshot_name(self._progress.step, reason)
        path = os.path.join(folder, name)
        digest = hashlib.sha256()
        temporary = path + ".part"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as stream:
                # Protocol 4 is what torch itself writes, so that torch's viewer opens the file too.
                pickle.dump(content, _Hashing(stream, digest), protocol=4)
            os.rename(temporary, path)
        except OSError:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
        fact = {
            "path": f"snapshots/{name}",
            "bytes": os.path.getsize(path),
            "sha256": digest.hexdigest(),
            "reason": reason,
        }
        with open(path[: -len(".pickle")] + ".json", "w") as stream:
            json.dump({**fact, "step": self._progress.step, "t": time.time_ns()}, stream)
        self._emit({"k": "snapshot", **fact})
        return str(fact["path"])


class _Hashing:
    """A writable file that hashes what passes."""

    def __init__(self, stream: Any, digest: Any) -> None:
        self._stream = stream
        self._digest = digest

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return int(self._stream.write(data))


#: Parts of file names that tell a phase; the innermost frame with one decides.
_PHASE_FILES = (
    ("/torch/optim/", "optimizer"),
    ("/torch/autograd/__init__.py", "backward"),
    (
        "/torch/autograd/graph.py",
        "backward",
    ),  # not function.py: a custom function's forward passes through it as well
    ("/torch/serialization.py", "save"),
    ("/torch/distributed/checkpoint/", "save"),
    ("/torch/distributed/fsdp/_state_dict_utils.py", "save"),
    ("/torch/utils/data/", "data"),
    ("/torch/nn/modules/module.py", "forward"),
)
#: Names of functions that tell more than their file.
_PHASE_FUNCTIONS = {
    "state_dict": "save",
    "load_state_dict": "resume",
    "load": "resume",
    "from_pretrained": "load",
    "to": "init",
    "cuda": "init",
    "_apply": "init",
    "convert": "init",
}


def guess_phase(frames: list[Frame]) -> str:
    """The phase that a stack shows, for jobs whose phases are not tracked: torch's own files tell."""
    for file, _, function in frames:
        if function == "from_pretrained":
            return "load"
        for mark, phase in _PHASE_FILES:
            if mark in file:
                return _PHASE_FUNCTIONS.get(function, phase)
    return "other"
