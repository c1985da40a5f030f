"""Activation checkpointing of a model that the script did not prepare for it.

The blocks keep their class, their names and their hooks: only `forward` of the instance is replaced. The
replacement is a bound method named `forward`, so that a deep copy is bound to the copy and a pickle restores
the class's own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint as torch_checkpoint

from ...protocol.recompute import KEPT_OPERATORS
from .blocks import BlockGroup, find_block_groups
from .runtime import APPLIED, REFUSED, Runtime, trains

_ORIGINAL = "_oomscope_forward"
_OURS = "_oomscope_checkpoints"


def install(runtime: Runtime, options: dict[str, Any], fix: str = "ckpt") -> None:
    """Checkpoint the block groups of every model that trains.

    Args:
        runtime: hooks and reporting.
        options: `every` (1: all blocks, n: each n-th), `groups` (at most that many), `selective` (keep the
            results of matrix products and attention), `offload` (keep what is saved in host memory instead of
            recomputing).
        fix: the id under which the result is reported.
    """
    if options.get("selective") and not hasattr(torch_checkpoint, "create_selective_checkpoint_contexts"):
        runtime.report(
            fix, REFUSED, f"selective checkpointing comes with torch 2.5; this is torch {torch.__version__}"
        )
        return
    _Checkpointing(runtime, options, fix).start()


class _Checkpointing:
    def __init__(self, runtime: Runtime, options: dict[str, Any], fix: str) -> None:
        self.runtime = runtime
        self.options = options
        self.fix = fix
        self.done: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.wrapped = 0
        self.ours = 0
        self.theirs = 0
        self.without_blocks: list[str] = []

    def start(self) -> None:
        self.runtime.around(self._around)
        self.runtime.settle(self._settle)

    def _around(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if module not in self.done and trains(module):
            self.done.add(module)
            self.runtime.guarded(self.fix, lambda: self._prepare(module))
        return call(*args, **kwargs)

    def _prepare(self, root: nn.Module) -> None:
        own = checkpointing_of_its_own(root)
        if own:
            self.runtime.report(self.fix, REFUSED, f"already active: {own}")
            return
        groups = find_block_groups(root)[: int(self.options.get("groups", 99))]
        if not groups:
            self.without_blocks.append(type(root).__qualname__)
            return
        self._drop_caches(root)
        every = int(self.options.get("every", 1))
        counts = [self._wrap_group(group, every) for group in groups]
        self.wrapped += sum(counts)
        places = ", ".join(
            f"{count} × {g.class_name} in {g.path or 'the model'}" for count, g in zip(counts, groups)
        )
        self.runtime.report(self.fix, APPLIED, places)

    def _wrap_group(self, group: BlockGroup, every: int) -> int:
        chosen = [block for index, block in enumerate(group.modules) if index % every == 0]
        for block in chosen:
            self._wrap(block)
        return len(chosen)

    def _wrap(self, block: nn.Module) -> None:
        patches = self.runtime.patches
        previous = vars(block).get("forward")
        if getattr(previous, _OURS, False):
            return  # a deep copy of a model that was prepared before
        if previous is not None:
            patches.attr(block, _ORIGINAL, previous)
        offload = bool(self.options.get("offload"))
        make = _offloading_forward if offload else functools.partial(_checkpointing_forward, owner=self)
        function = functools.wraps(type(block).forward)(make(type(block).forward))
        function.__name__ = "forward"
        setattr(function, _OURS, True)
        patches.attr(block, "forward", types.MethodType(function, block))

    def _drop_caches(self, root: nn.Module) -> None:
        """Switch key-value caches off, as Transformers does: the recomputation would fill them twice."""
        for module in root.modules():
            config = getattr(module, "config", None)
            if getattr(config, "use_cache", False) is True:
                self.runtime.patches.attr(config, "use_cache", False)

    def context(self, block: nn.Module) -> dict[str, Any]:
        """The `context_fn` argument for `block`, only when it is needed: torch.compile rejects most of them."""
        frozen = any(isinstance(each, _BatchNorm) for each in block.modules())
        selective = bool(self.options.get("selective"))
        if not frozen and not selective:
            return {}

        def contexts() -> tuple[Any, Any]:
            first, again = contextlib.nullcontext(), contextlib.nullcontext()
            if selective:
                first, again = torch_checkpoint.create_selective_checkpoint_contexts(expensive_operators())
            return first, (_frozen_statistics(block, again) if frozen else again)

        return {"context_fn": contexts}

    def _settle(self) -> None:
        if self.theirs and not self.ours:
            self.runtime.report(
                self.fix, REFUSED, "already active: the script checkpoints these blocks itself"
            )
        elif not self.wrapped and self.runtime.state(self.fix) is None:
            where = f" in {self.without_blocks[0]}" if self.without_blocks else ": no model was trained"
            self.runtime.report(self.fix, REFUSED, f"no block group{where}")


def _checkpointing_forward(plain: Callable[..., Any], owner: _Checkpointing) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = getattr(self, _ORIGINAL, None) or functools.partial(plain, self)
        if not torch.is_grad_enabled() or not self.training:
            return call(*args, **kwargs)
        context = owner.context(self)
        if torch.compiler.is_compiling():
            # A compiled graph takes no `context_fn` of ours; without it BatchNorm would count its batches twice.
            if context:
                return call(*args, **kwargs)
            return torch_checkpoint.checkpoint(call, *args, use_reentrant=False, **kwargs)
        if owner.runtime.recomputes() or _inside_checkpoint():
            owner.theirs += 1
            return call(*args, **kwargs)
        owner.ours += 1
        return torch_checkpoint.checkpoint(call, *args, use_reentrant=False, **context, **kwargs)

    return forward


def _inside_checkpoint() -> bool:
    """Whether a checkpoint of the script's own is running this block: its hook then takes what is saved.

    Only non-reentrant checkpoints have one; a reentrant one runs its first pass without a graph, which is seen before.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:  # torch < 2.6
        return _has_caller(torch_checkpoint.__file__, "checkpoint")
    hooks = top(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == torch_checkpoint.__name__


def _has_caller(file: str, function: str) -> bool:
    """Whether `function` of `file` is among the callers."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def _offloading_forward(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = getattr(self, _ORIGINAL, None) or functools.partial(plain, self)
        if not torch.is_grad_enabled() or not self.training:
            return call(*args, **kwargs)
        with torch.autograd.graph.save_on_cpu(pin_memory=_can_pin()):
            return call(*args, **kwargs)

    return forward


@functools.lru_cache(maxsize=1)
def _can_pin() -> bool:
    """Whether host memory can be pinned: not without a GPU, and not on a simulated one."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _frozen_statistics(block: nn.Module, inner: Any) -> Iterator[None]:
    """While a block is recomputed, its BatchNorm layers must not count the batch a second time.

    Momentum 0 keeps the running statistics, and keeps the same tensors saved for backward
    (`track_running_stats=False` would change their number, which checkpointing rejects).
    """
    layers = [
        m for m in block.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats
    ]
    before = [(layer, layer.momentum, layer._buffers["num_batches_tracked"]) for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
        layer._buffers["num_batches_tracked"] = None
    try:
        with inner:
            yield
    finally:
        for layer, momentum, counted in before:
            layer.momentum = momentum
            layer._buffers["num_batches_tracked"] = counted


def checkpointing_of_its_own(root: nn.Module) -> str | None:
    """What shows that the model is checkpointed by its own library, or None."""
    for name, module in root.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            return f"{name or type(root).__qualname__}.gradient_checkpointing is True"
        if type(module).__name__ in ("CheckpointWrapper", "OffloadWrapper"):
            return f"{name} is a {type(module).__name__}"
    return None


def expensive_operators() -> list[Any]:
    """Operators whose results selective checkpointing keeps: products, convolutions, attention."""
    packets = (getattr(torch.ops.aten, name, None) for name in KEPT_OPERATORS)
    return [packet.default for packet in packets if packet is not None]
