"""Fixes of the optimizer: fused steps, 8-bit states, sharded states, and the step inside backward."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from typing import Any, Callable

import torch

from .runtime import APPLIED, NO_EFFECT, REFUSED, Refused, Runtime

#: Optimizers of torch with a fused implementation. Source: their `fused` argument, torch 2.4 and later.
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def install_fused(runtime: Runtime, options: dict[str, Any]) -> None:
    """One kernel for the whole step: no params-sized temporaries of the foreach implementation."""
    changed = []

    def replace(cls: Any) -> None:
        original = cls.__init__

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            # AdamW inherits from Adam since torch 2.8 and passes its arguments on: act for the class itself
            # only.
            if type(self) is cls:
                kwargs = _with_fused(runtime, cls.__name__, kwargs)
                changed.append(cls.__name__)
            original(self, *args, **kwargs)

        runtime.patches.attr(cls, "__init__", __init__)

    for name in _FUSED:
        cls = getattr(torch.optim, name)
        if "__init__" in vars(cls) and "fused" in inspect.signature(cls.__init__).parameters:
            replace(cls)
    runtime.settle(
        lambda: (
            None
            if changed
            else runtime.report("optim-fused", REFUSED, "the optimizer has no fused implementation")
        )
    )


def _with_fused(runtime: Runtime, name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an optimizer with `fused=True`, unless the script chose an implementation itself."""
    if kwargs.get("fused"):
        runtime.report("optim-fused", REFUSED, "already active: fused=True")
    elif kwargs.get("differentiable") or kwargs.get("foreach"):
        runtime.report("optim-fused", REFUSED, f"{name} was asked for another implementation")
    else:
        runtime.report("optim-fused", APPLIED, f"{name}(fused=True)")
        return {**kwargs, "fused": True}
    return kwargs


#: 8-bit optimizers, the first that can be imported is used: (module, class for Adam, class for AdamW).
_EIGHT_BIT = (("torchao.optim", "Adam8bit", "AdamW8bit"), ("bitsandbytes.optim", "Adam8bit", "AdamW8bit"))


def install_eight_bit(runtime: Runtime, options: dict[str, Any]) -> None:
    """Adam and AdamW keep their states in 8 bit.

    Raises:
        Refused: neither torchao nor bitsandbytes is installed.
    """
    for module, adam, adamw in _EIGHT_BIT:
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        for name, new in (("Adam", getattr(found, adam)), ("AdamW", getattr(found, adamw))):
            _swap(runtime, "optim-8bit", name, new)
        return
    raise Refused("neither torchao nor bitsandbytes is installed")


def _swap(runtime: Runtime, fix: str, name: str, new: Callable[..., Any]) -> None:
    """`torch.optim.<name>` makes a `new`, with the arguments that it knows."""
    known = set(inspect.signature(new).parameters)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(new).parameters.values())

    def make(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        kept = {key: value for key, value in kwargs.items() if takes_all or key in known}
        dropped = sorted(set(kwargs) - set(kept))
        without = f", without {', '.join(dropped)}" if dropped else ""
        runtime.report(fix, APPLIED, f"{name} becomes {getattr(new, '__name__', new)}{without}")
        return new(parameters, *args, **kept)

    runtime.patches.attr(torch.optim, name, make)


def install_zero1(runtime: Runtime, options: dict[str, Any]) -> None:
    """Each rank keeps the optimizer state of its share of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for name in ("Adam", "AdamW", "SGD"):
        cls = getattr(torch.optim, name)

        def make(parameters: Any, *args: Any, _cls: Any = cls, **kwargs: Any) -> Any:
            import torch.distributed as dist

            if not dist.is_initialized() or dist.get_world_size() < 2:
                runtime.report("zero1", REFUSED, "only one rank")
                return _cls(parameters, *args, **kwargs)
            names = list(inspect.signature(_cls.__init__).parameters)[2:]
            kwargs = {**dict(zip(names, args)), **kwargs}
            runtime.report("zero1", APPLIED, f"{_cls.__name__} over {dist.get_world_size()} ranks")
            return ZeroRedundancyOptimizer(parameters, optimizer_class=_cls, **kwargs)

        runtime.patches.attr(torch.optim, name, make)
    runtime.settle(
        lambda: (
            None
            if runtime.state("zero1")
            else runtime.report("zero1", REFUSED, "no Adam, AdamW or SGD optimizer was made")
        )
    )


def install_in_backward(runtime: Runtime, options: dict[str, Any]) -> None:
    """Step each parameter as soon as its gradient is complete, and free the gradient.

    Only right without clipping, accumulation and a gradient scaler: the catalogue does not offer it then, and
    a call of `clip_grad_*` during the trial is an error of the plan that is reported.
    """
    _InBackward(runtime).start()


class _InBackward:
    fix = "optim-in-bwd"

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.making = False

    def start(self) -> None:
        self.runtime.watch_optimizers()
        self.runtime.on_optimizer.append(self._on_optimizer)
        self.runtime.settle(self._settle)

    def _settle(self) -> None:
        if self.runtime.state(self.fix) is None:
            self.runtime.report(self.fix, NO_EFFECT, "no optimizer was made")

    def _on_optimizer(self, optimizer: Any) -> None:
        if self.making:
            return
        self.making = True
        try:
            self._take_over(optimizer)
        finally:
            self.making = False

    def _take_over(self, optimizer: Any) -> None:
        cls = type(optimizer)
        known = set(inspect.signature(cls.__init__).parameters)
        count = 0
        inner: dict[Any, Any] = {}
        for group in optimizer.param_groups:
            arguments = {key: value for key, value in group.items() if key in known and key != "params"}
            for parameter in group["params"]:
                one = cls([parameter], **arguments)
                self.runtime.optimizers.discard(one)
                inner[parameter] = one
                handle = parameter.register_post_accumulate_grad_hook(self._hook(one, group))
                self.runtime.patches.handle(handle)
                count += 1

        def step(self: Any, closure: Any = None) -> Any:
            """The parameters were updated during backward."""
            return None if closure is None else closure()

        told: Any = torch.optim.Optimizer.profile_hook_step(step)  # calls the hooks of those who count steps
        # LRScheduler reads `step.__func__`: it must be a bound method.
        self.runtime.patches.attr(optimizer, "step", types.MethodType(told, optimizer))
        self.runtime.patches.attr(optimizer, "_oomscope_inner", inner)
        self.runtime.report(
            self.fix, APPLIED, f"{count} parameters of {cls.__qualname__} step inside backward"
        )

    def _hook(self, one: Any, group: dict[str, Any]) -> Callable[[torch.Tensor], None]:
        plain = getattr(type(one).step, "__wrapped__", type(one).step)

        def hook(parameter: torch.Tensor) -> None:
            own = one.param_groups[0]
            for (
                key,
                value,
            ) in group.items():  # a scheduler writes lr, momentum, betas into the script's own groups
                if key != "params":
                    own[key] = value
            plain(one)
            parameter.grad = None

        return hook
