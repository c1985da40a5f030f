"""What all run-time fixes share: the outermost module call, optimizers, backward, and reporting.

One wrapper on `nn.Module.__call__` serves every fix. torch's global module hooks cost six times as much a
call and break `torch.compile`; this wrapper steps aside while a graph is compiled, and costs an inner call
one test.
"""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from typing import Any, Callable

import torch
from torch import nn

from .patching import Patches, PostImport

Emit = Callable[["dict[str, Any]"], None]
Around = Callable[[nn.Module, Callable[..., Any], Any, Any], Any]

APPLIED = "applied"
REFUSED = "refused"
NO_EFFECT = "no_effect"


class Refused(Exception):  # noqa: N818  # a result, not an error
    """A fix cannot be applied to this script; the message is the reason."""


class _Depth(threading.local):
    """Where the current thread is: inside a module call, or inside a chunk that backward runs again."""

    inside = False
    replaying = False


class Runtime:
    """Installs hooks on demand and takes them back.

    Attributes:
        arounds: called around each outermost module call, the last one outermost; `around(module, call, args,
            kwargs)`.
        on_optimizer: called with each optimizer after its `__init__`.
        on_backward: called with the tensor before `Tensor.backward`; may return another tensor to use
            instead.
        on_step: called with each optimizer after its `step`.
    """

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.patches = Patches()
        self.imports = PostImport()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.arounds: list[Around] = []
        self.on_optimizer: list[Callable[[Any], None]] = []
        self.on_backward: list[Callable[[torch.Tensor], torch.Tensor | None]] = []
        self.on_step: list[Callable[[Any], None]] = []
        self._settle: list[Callable[[], None]] = []
        self._reported: dict[str, str] = {}
        self._depth = _Depth()
        self._installed: set[str] = set()

    def replaying(self) -> bool:
        """Whether a fix is running a forward pass of its own inside backward (micro-batches)."""
        return self._depth.replaying

    def set_replaying(self, value: bool) -> None:
        self._depth.replaying = value

    def recomputes(self) -> bool:
        """Whether this call is a checkpoint's recomputation: it must do exactly what the first call did."""
        return torch._C._current_graph_task_id() != -1 and not self._depth.replaying

    # -- reporting
    # ---------------------------------------------------------------------------------------------------

    def report(self, fix: str, state: str, detail: str) -> None:
        """Tell the session what became of `fix`; the same state is told once."""
        if self._reported.get(fix) == state:
            return
        self._reported[fix] = state
        self.emit({"k": "fix", "id": fix, "state": state, "detail": detail})

    def state(self, fix: str) -> str | None:
        """The last reported state of `fix`."""
        return self._reported.get(fix)

    def settle(self, action: Callable[[], None]) -> None:
        """Run `action` once, when one optimizer step (or the process) is over: time to say what failed."""
        self.watch_optimizers()
        if not self._settle:
            atexit.register(self._run_settle)
        self._settle.append(action)

    def at_end(self, action: Callable[[], None]) -> None:
        """Run `action` when the process ends."""
        atexit.register(self.guarded, "at_end", action)

    def _run_settle(self) -> None:
        actions, self._settle = self._settle, []
        for action in actions:
            self.guarded("settle", action)

    def guarded(self, probe: str, action: Callable[[], Any]) -> Any:
        """The result of `action`, or None with an `agent_error` record: our faults never reach the job."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001  # the agent guard
            self.emit(
                {"k": "agent_error", "probe": f"apply.{probe}", "error": f"{type(error).__name__}: {error}"}
            )
            return None

    # -- hooks
    # -------------------------------------------------------------------------------------------------------

    def _once(self, name: str) -> bool:
        new = name not in self._installed
        self._installed.add(name)
        return new

    def around(self, function: Around, *, innermost: bool = False) -> None:
        """Call `function` around every outermost module call from now on."""
        if innermost:
            self.arounds.insert(0, function)
        else:
            self.arounds.append(function)
        if self._once("calls"):
            self._watch_calls()

    def _watch_calls(self) -> None:
        original = nn.Module.__call__
        is_compiling = torch.compiler.is_compiling
        depth = self._depth
        graph_task = torch._C._current_graph_task_id
        root_call = self._root_call

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            # Dynamo folds the first test away, so a compiled graph never sees ours. A call inside backward is
            # a recomputation: it must run exactly as the first time.
            if is_compiling() or depth.inside or graph_task() != -1:
                return original(self, *args, **kwargs)
            return root_call(original, self, args, kwargs)

        self.patches.attr(nn.Module, "__call__", __call__)

    def _root_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._depth.inside = True
        try:
            call: Callable[..., Any] = functools.partial(original, module)
            for around in self.arounds:
                call = functools.partial(_apply_around, around, module, call)
            return call(*args, **kwargs)
        finally:
            self._depth.inside = False

    def watch_backward(self) -> None:
        """Run `on_backward` before each outermost `Tensor.backward`."""
        if not self._once("backward"):
            return
        original = torch.Tensor.backward

        @functools.wraps(original)
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            for callback in self.on_backward:
                replaced = callback(tensor)
                tensor = tensor if replaced is None else replaced
            return original(tensor, *args, **kwargs)

        self.patches.attr(torch.Tensor, "backward", backward)

    def watch_optimizers(self) -> None:
        """Keep `optimizers` up to date and run `on_optimizer` and `on_step`."""
        if not self._once("optimizers"):
            return
        from torch.optim import optimizer as module

        original = module.Optimizer.__init__
        runtime = self

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            runtime.optimizers.add(self)
            for callback in runtime.on_optimizer:
                callback(self)

        self.patches.attr(module.Optimizer, "__init__", __init__)
        self.patches.handle(module.register_optimizer_step_post_hook(self._stepped))

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for callback in self.on_step:
            callback(optimizer)
        if self._settle:
            self._run_settle()

    def undo(self) -> None:
        """Take every patch back and forget every callback."""
        self._settle.clear()
        self.imports.remove()
        self.patches.undo()
        for callbacks in (self.arounds, self.on_optimizer, self.on_backward, self.on_step):
            callbacks.clear()
        self._installed.clear()


def _apply_around(
    around: Around, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return around(module, call, args, kwargs)


def trains(module: nn.Module) -> bool:
    """Whether this call is part of training: training mode, grad mode, and something to train."""
    return module.training and torch.is_grad_enabled() and has_trainable(module)


def has_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def device_type(module: nn.Module) -> str:
    """Device type of the first parameter, "cpu" without one."""
    first = next(module.parameters(), None)
    return "cpu" if first is None else first.device.type
