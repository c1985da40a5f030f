"""Exact micro-batches inside the forward call: loop, loss, scheduler and log of the script stay as they are.

The outermost module call runs in k chunks without a graph. In backward each chunk is run again with one, and
gets its part of the gradient of the outputs. The loss sees the whole batch, so the gradients are those of the
whole batch for every loss, also for those that are no mean over samples; classical gradient accumulation is
wrong for most of these.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .runtime import APPLIED, REFUSED, Refused, Runtime, trains

FIX = "microbatch-exact"


def install(runtime: Runtime, options: dict[str, Any]) -> None:
    """Run every training call of a model in chunks.

    Args:
        runtime: hooks and reporting.
        options: `chunks` (default 4).
    """
    chunks = int(options.get("chunks", 4))
    blocked: dict[int, str] = {}
    kinds: dict[Any, str] = {}

    def around(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if id(module) in blocked or not trains(module):
            return call(*args, **kwargs)
        reason = _why_not(module, args, kwargs)
        batch = _batch_size(args, kwargs)
        if reason is None and batch is not None and batch >= 2:
            try:
                result = _Run(runtime, module, call, args, kwargs, min(chunks, batch), batch, kinds).outputs()
            except Refused as refusal:
                reason = str(refusal)
            else:
                runtime.report(FIX, APPLIED, f"{min(chunks, batch)} chunks of the batch of {batch} samples")
                return result
        if reason is not None:
            blocked[id(module)] = reason
            runtime.report(FIX, REFUSED, f"{reason} in {type(module).__qualname__}")
        return call(*args, **kwargs)

    # Innermost: autocast and others stay outside and see one call.
    runtime.around(around, innermost=True)
    runtime.settle(lambda: _settle(runtime))


def _settle(runtime: Runtime) -> None:
    if runtime.state(FIX) is None:
        runtime.report(FIX, REFUSED, "no training call with a batch of two or more samples")


def _why_not(module: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Why this call cannot be cut, or None."""
    if any(isinstance(each, _BatchNorm) and each.training for each in module.modules()):
        return "BatchNorm, whose statistics need the whole batch,"
    if any(type(each).__name__.startswith(("FSDP", "FullySharded")) for each in module.modules()):
        return "FSDP, which frees gathered parameters between calls only,"
    leaves, _ = tree_flatten((args, kwargs))
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        return "an input that needs a gradient"
    return None


def _batch_size(args: Any, kwargs: Any) -> int | None:
    leaves, _ = tree_flatten((args, kwargs))
    first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
    return None if first is None else int(first.size(0))


class _Chunked(torch.autograd.Function):  # type: ignore[misc]
    """Joins the chunks' outputs; its backward runs the chunks again."""

    @staticmethod
    def forward(ctx: Any, run: _Run, direct: bool, anchor: torch.Tensor, *parameters: torch.Tensor) -> Any:
        ctx.run, ctx.direct, ctx.parameters = run, direct, parameters
        outputs = run.first_pass()
        ctx.mark_non_differentiable(*[each for each in outputs if not each.is_floating_point()])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.run.second_pass(gradients, ctx.parameters, ctx.direct)
        return (None, None, None, *found)


class _Run:
    """One call cut into chunks along the first dimension of its inputs."""

    def __init__(
        self,
        runtime: Runtime,
        module: nn.Module,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        chunks: int,
        batch: int,
        kinds: dict[Any, str],
    ) -> None:
        self.runtime = runtime
        self.module = module
        self.call = call
        self.batch = batch
        self.known_kinds = kinds
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.cut = [
            index
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) == batch
        ]
        # As Tensor.tensor_split: the first batch % chunks parts are one longer.
        self.sizes = [batch // chunks + (index < batch % chunks) for index in range(chunks)]
        self.devices = sorted(
            {
                leaf.device.index or 0
                for leaf in self.leaves
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda
            }
        )
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if kind == "cpu" or torch.cuda.is_available()
        ]
        self.states: list[Any] = []
        self.kinds: list[str] = []
        self.others: dict[int, Any] = {}
        self.out_spec: Any = None

    def outputs(self) -> Any:
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        # DistributedDataParallel reduces when a parameter's gradient is accumulated: it must happen once, at
        # the end.
        direct = not isinstance(self.module, nn.parallel.DistributedDataParallel)
        anchor = torch.empty(0, requires_grad=True)
        joined = iter(_Chunked.apply(self, direct, anchor, *(() if direct else parameters)))
        whole = [
            self.others[index] if kind == "object" else next(joined) for index, kind in enumerate(self.kinds)
        ]
        return tree_unflatten(whole, self.out_spec)

    def _part(self, index: int, leaves: list[Any]) -> tuple[Any, Any]:
        start = sum(self.sizes[:index])
        stop = start + self.sizes[index]
        part = [leaf[start:stop] if place in self.cut else leaf for place, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(part, self.spec)
        return args, kwargs

    def first_pass(self) -> list[torch.Tensor]:
        parts = []
        for index in range(len(self.sizes)):
            self.states.append(self._random_state())
            args, kwargs = self._part(index, self.leaves)
            with torch.no_grad():
                leaves, self.out_spec = tree_flatten(self.call(*args, **kwargs))
            parts.append(leaves)
        outputs: list[torch.Tensor] = []
        for place in range(len(parts[0])):
            outputs += self._join(place, [part[place] for part in parts])
        return outputs

    def _join(self, place: int, column: list[Any]) -> list[torch.Tensor]:
        first = column[0]
        if not isinstance(first, torch.Tensor):
            self.kinds.append("object")
            self.others[place] = first
            return []
        if first.dim() and all(part.size(0) == size for part, size in zip(column, self.sizes)):
            self.kinds.append("rows")
            return [torch.cat(column)]
        if first.dim() == 0 and first.is_floating_point():
            kind = self._scalar_kind(place)
            self.kinds.append(kind)
            weights = [size / self.batch if kind == "mean" else 1.0 for size in self.sizes]
            return [torch.stack([part * weight for part, weight in zip(column, weights)]).sum()]
        raise Refused(f"output {place} of shape {tuple(first.shape)} has no batch dimension")

    def _scalar_kind(self, place: int) -> str:
        """Whether a scalar output (a loss) is a mean or a sum over the samples: measured, never guessed."""
        key = (id(self.module), place)
        if key not in self.known_kinds:
            self.known_kinds[key] = self._measure_scalar(place)
        return self.known_kinds[key]

    def _measure_scalar(self, place: int) -> str:
        count = min(4, self.batch)
        share = max(1, count // 4)
        modes = [(module, module.training) for module in self.module.modules()]
        state = self._random_state()
        try:
            for module, _ in modes:
                module.training = False
            whole, one, rest = (
                self._scalar(place, a, b) for a, b in ((0, count), (0, share), (share, count))
            )
        finally:
            for module, training in modes:
                module.training = training
            self._set_random_state(state)
        mean = one * share / count + rest * (1 - share / count)
        allowed = 1e-3 * max(abs(whole), 1e-6)
        if abs(whole - mean) <= allowed:
            return "mean"
        if abs(whole - one - rest) <= allowed:
            return "sum"
        raise Refused("a scalar output that is neither a mean nor a sum over the samples")

    def _scalar(self, place: int, start: int, stop: int) -> float:
        part = [leaf[start:stop] if index in self.cut else leaf for index, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(part, self.spec)
        with torch.no_grad():
            leaves, _ = tree_flatten(self.call(*args, **kwargs))
        return float(leaves[place].double().item())

    def second_pass(self, gradients: Any, parameters: Any, direct: bool) -> list[Any]:
        total: list[Any] = [None] * len(parameters)
        state = self._random_state()
        self.runtime.set_replaying(True)
        try:
            for index in range(len(self.sizes)):
                outputs, parts = self._replay(index, gradients)
                if direct:
                    torch.autograd.backward(outputs, parts)
                    continue
                found = torch.autograd.grad(outputs, parameters, parts, allow_unused=True)
                for place, each in enumerate(found):
                    if each is not None:
                        total[place] = each if total[place] is None else total[place].add_(each)
        finally:
            self.runtime.set_replaying(False)
            self._set_random_state(state)
        return total

    def _replay(self, index: int, gradients: Any) -> tuple[list[Any], list[Any]]:
        """The outputs of chunk `index` with their graph, and the part of the gradient that belongs to each."""
        self._set_random_state(self.states[index])
        args, kwargs = self._part(index, self.leaves)
        args, kwargs = tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            leaves, _ = tree_flatten(self.call(*args, **kwargs))
        start = sum(self.sizes[:index])
        stop = start + self.sizes[index]
        outputs, parts = [], []
        incoming = iter(gradients)
        for kind, leaf in zip(self.kinds, leaves):
            if kind == "object":
                continue
            gradient = next(incoming)
            if gradient is None or not leaf.requires_grad:
                continue
            outputs.append(leaf)
            share = self.sizes[index] / self.batch
            parts.append(
                gradient[start:stop] if kind == "rows" else gradient * (share if kind == "mean" else 1.0)
            )
        return outputs, parts

    def _random_state(self) -> Any:
        return torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in self.devices]

    def _set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        for device, each in zip(self.devices, state[1]):
            torch.cuda.set_rng_state(each, device)
