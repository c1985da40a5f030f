"""Checkpoints: the phases `save` and `resume`, and where the files went.

Both are moments at which jobs run out of memory, and a rerun may start from a file that was written here.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

from .guard import guarded
from .patching import AfterImport, Patches
from .probes import Progress

#: (module, function, phase) of what is wrapped. A function that stands in two modules gets one wrapper for
#: both: pickle finds a function by its name and refuses it when another one stands there.
_FUNCTIONS = (
    ("torch", "save", "save"),
    ("torch", "load", "resume"),
    ("torch.serialization", "save", "save"),
    ("torch.serialization", "load", "resume"),
    ("torch.distributed.checkpoint.state_dict_saver", "save", "save"),
    ("torch.distributed.checkpoint.state_dict_loader", "load", "resume"),
    ("torch.distributed.checkpoint", "save", "save"),
    ("torch.distributed.checkpoint", "load", "resume"),
)


class CheckpointProbe:
    """Wraps torch's save and load functions; emits a `checkpoint` record after a file was written."""

    def __init__(self, progress: Progress, emit: Callable[[dict[str, Any]], None]) -> None:
        self._progress = progress
        self._emit = emit
        self._wrappers: dict[Any, Any] = {}

    def install(self, torch: Any, patches: Patches, after_import: AfterImport) -> None:
        """Arm the hooks."""
        for module, name, phase in _FUNCTIONS:
            wrap = functools.partial(self._wrap, patches, name, phase)
            if module == "torch":
                wrap(torch)
            else:
                after_import.when(module, guarded("checkpoints")(wrap))

    def _wrap(self, patches: Patches, name: str, phase: str, module: Any) -> None:
        inner = getattr(module, name, None)
        if inner is None or inner in self._wrappers.values():
            return
        if inner in self._wrappers:
            patches.attribute(module, name, self._wrappers[inner])
            return
        progress, wrote = self._progress, self._wrote

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = progress.enter(phase)
            try:
                result = inner(*args, **kwargs)
            finally:
                progress.enter(before)
            if phase == "save":
                wrote(args, kwargs)
            return result

        self._wrappers[inner] = call
        patches.attribute(module, name, call)

    @guarded("checkpoints")
    def _wrote(self, args: Any, kwargs: Any) -> None:
        target = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("checkpoint_id"))
        if not isinstance(target, (str, os.PathLike)):
            return  # into a buffer: not a checkpoint that a rerun could start from
        path = os.path.abspath(os.fspath(target))
        size = os.path.getsize(path) if os.path.isfile(path) else None
        self._emit({"k": "checkpoint", "path": path, "bytes": size, "step": self._progress.step})
