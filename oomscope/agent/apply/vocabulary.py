"""Cross entropy over a large vocabulary without the logits ever being stored whole.

A large output layer returns a stand-in that knows its input and its weight. Row-wise views of it stay
stand-ins; a cross entropy of it is computed in chunks of rows, and its backward computes the chunks again.
Whatever else the script does with it gets the true logits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from .runtime import APPLIED, NO_EFFECT, Runtime

FIX = "fused-ce"

#: Output layers below this width are left alone: their logits are small beside the rest.
MIN_VOCABULARY = 4096


def install(runtime: Runtime, options: dict[str, Any]) -> None:
    """Fuse large output layers with the cross entropy that follows, and chunk cross entropies of other large inputs.

    Args:
        runtime: hooks and reporting.
        options: `min_vocabulary` (default 4096).
    """
    smallest = int(options.get("min_vocabulary", MIN_VOCABULARY))
    linear = nn.Linear.forward
    entropy = F.cross_entropy
    is_compiling = torch.compiler.is_compiling

    def forward(self: nn.Linear, input: torch.Tensor) -> Any:
        if (
            is_compiling()
            or self.out_features < smallest
            or not self.training
            or not torch.is_grad_enabled()
            or torch._C._current_graph_task_id() != -1
        ):
            return linear(self, input)
        return LazyLogits.of(input, self.weight, self.bias)

    @functools.wraps(entropy)
    def cross_entropy(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not _is_plain(input, target, args, kwargs, smallest):
            return entropy(input, target, *args, **kwargs)
        ignore, reduction = kwargs.get("ignore_index", -100), kwargs.get("reduction", "mean")
        if isinstance(input, LazyLogits) and input.materialised is None:
            runtime.report(
                FIX, APPLIED, f"output layer of {input.shape[-1]} classes fused with its cross entropy"
            )
            return _loss_of_lazy(input, target, ignore, reduction)
        if not input.requires_grad:
            return entropy(input, target, *args, **kwargs)
        runtime.report(FIX, APPLIED, f"cross entropy over {input.shape[-1]} classes in chunks")
        whole = input.materialise() if isinstance(input, LazyLogits) else input
        total, count = _ChunkedEntropy.apply(whole, target, ignore)
        return total if reduction == "sum" else total / count

    runtime.patches.attr(nn.Linear, "forward", forward)
    runtime.patches.attr(F, "cross_entropy", cross_entropy)
    runtime.settle(
        lambda: (
            None
            if runtime.state(FIX)
            else runtime.report(FIX, NO_EFFECT, f"no cross entropy over {smallest} or more classes")
        )
    )


def _is_plain(logits: Any, target: Any, args: Any, kwargs: Any, smallest: int) -> bool:
    """Whether this is the common form: rows by classes, class indices, no weights, no smoothing."""
    return (
        not args
        and set(kwargs)
        <= {"ignore_index", "reduction", "weight", "label_smoothing", "size_average", "reduce"}
        and all(kwargs.get(name) is None for name in ("weight", "size_average", "reduce"))
        and not kwargs.get("label_smoothing")
        and kwargs.get("reduction", "mean") in ("mean", "sum")
        and isinstance(logits, torch.Tensor)
        and logits.dim() == 2
        and logits.shape[1] >= smallest
        and logits.is_floating_point()
        and target.dtype == torch.long
    )


def _rows_per_chunk(rows: int, width: int, classes: int) -> int:
    """So many rows that a chunk of logits is about as large as the hidden states themselves, at least 128."""
    return max(128, math.ceil(rows * width / classes))


class LazyLogits(torch.Tensor):  # type: ignore[misc]
    """What a large output layer returns: hidden states, weight, bias, and the shape of their product."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: Any
    compute: torch.dtype
    """Type in which the product is computed: that of autocast at the time of the call."""
    materialised: Any

    @staticmethod
    def of(hidden: torch.Tensor, weight: torch.Tensor, bias: Any) -> LazyLogits:
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        compute = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
        return LazyLogits._make(hidden, weight, bias, compute, compute)

    @staticmethod
    def _make(hidden: Any, weight: Any, bias: Any, compute: torch.dtype, dtype: torch.dtype) -> LazyLogits:
        shape = (*hidden.shape[:-1], weight.shape[0])
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits, shape, dtype=dtype, device=hidden.device, requires_grad=False
        )
        made.hidden, made.weight, made.bias, made.compute = hidden, weight, bias, compute
        made.materialised = None
        return made

    def _like(self, hidden: torch.Tensor, dtype: Any = None) -> LazyLogits:
        return self._make(hidden, self.weight, self.bias, self.compute, dtype or self.dtype)

    def materialise(self) -> torch.Tensor:
        """The true logits, made once."""
        if self.materialised is None:
            with torch._C.DisableTorchFunctionSubclass():
                with torch.autocast(
                    self.hidden.device.type, dtype=self.compute, enabled=_is_low(self.compute)
                ):
                    product = F.linear(self.hidden, self.weight, self.bias)
                self.materialised = product.to(self.dtype)
        return self.materialised

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_true, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        name = getattr(func, "__name__", "")
        if isinstance(first, LazyLogits):
            if name in _QUESTIONS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if first.materialised is None and not kwargs:
                view = _lazy_view(first, name, args[1:])
                if view is not None:
                    return view
        args, kwargs = tree_map(_true, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


_QUESTIONS = frozenset(
    {"__get__", "size", "dim", "numel", "__len__", "is_floating_point", "ndimension", "nelement", "stride"}
)


def _true(value: Any) -> Any:
    return value.materialise() if isinstance(value, LazyLogits) else value


def _is_low(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _lazy_view(logits: LazyLogits, name: str, args: Any) -> Any:
    """The result of a row-wise view or cast as another stand-in; None when it is neither."""
    hidden, classes = logits.hidden, logits.weight.shape[0]
    width = hidden.shape[-1]
    if name == "contiguous":
        return logits
    if name == "float":
        return logits._like(hidden, torch.float32)
    if name in ("view", "reshape"):
        shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        if len(shape) > 0 and shape[-1] == classes:
            return logits._like(hidden.reshape(*shape[:-1], width))
        return None
    if name == "flatten" and len(args) == 2 and args[0] == 0 and args[1] % logits.dim() == logits.dim() - 2:
        return logits._like(hidden.flatten(0, args[1]))
    if name == "to" and len(args) == 1:
        if isinstance(args[0], torch.dtype):
            return logits._like(hidden, args[0])
        if isinstance(args[0], (str, torch.device)) and torch.device(args[0]).type == hidden.device.type:
            return logits
        return None
    if name == "__getitem__":
        return _lazy_rows(logits, args[0])
    return None


def _lazy_rows(logits: LazyLogits, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, (slice, int)) or part is Ellipsis for part in parts):
        return None
    touches_classes = len(parts) >= logits.dim() or Ellipsis in parts
    if touches_classes and parts[-1] != slice(None):
        return None
    return logits._like(logits.hidden[index])


def _loss_of_lazy(logits: LazyLogits, target: Any, ignore: int, reduction: str) -> torch.Tensor:
    total, count = _FusedEntropy.apply(
        logits.hidden, logits.weight, logits.bias, target, ignore, logits.compute
    )
    return total if reduction == "sum" else total / count


class _FusedEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Sum of the cross entropies of `hidden @ weight.T + bias`, and the number of rows that count."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, target: Any, ignore: int, compute: torch.dtype
    ) -> Any:
        rows = _rows_per_chunk(hidden.shape[0], hidden.shape[1], weight.shape[0])
        total = hidden.new_zeros((), dtype=_wide(compute))
        normaliser = hidden.new_empty(hidden.shape[0], dtype=_wide(compute))
        cast = weight.to(compute)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = _product(hidden[part], cast, bias, compute)
            total += _row_losses(logits, target[part], ignore, normaliser[part])
        ctx.save_for_backward(hidden, weight, bias, target, normaliser)
        ctx.rows, ctx.ignore, ctx.compute = rows, ignore, compute
        count = (target != ignore).sum()
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        hidden, weight, bias, target, normaliser = ctx.saved_tensors
        cast = weight.to(ctx.compute)
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = _product(hidden[part], cast, bias, ctx.compute)
            slope = _slope(logits, target[part], ctx.ignore, normaliser[part], gradient).to(ctx.compute)
            if for_hidden is not None:
                for_hidden[part] = slope @ cast
            if for_weight is not None:
                for_weight += slope.t() @ hidden[part].to(ctx.compute)
            if for_bias is not None:
                for_bias += slope.sum(0)
        return for_hidden, for_weight, for_bias, None, None, None


class _ChunkedEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Sum of cross entropies of given logits: keeps neither a float32 copy nor a softmax of them."""

    @staticmethod
    def forward(ctx: Any, logits: Any, target: Any, ignore: int) -> Any:
        rows = _rows_per_chunk(logits.shape[0], 512, logits.shape[1])
        total = logits.new_zeros((), dtype=_wide(logits.dtype))
        normaliser = logits.new_empty(logits.shape[0], dtype=_wide(logits.dtype))
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            total += _row_losses(logits[part].to(_wide(logits.dtype)), target[part], ignore, normaliser[part])
        ctx.save_for_backward(logits, target, normaliser)
        ctx.rows, ctx.ignore = rows, ignore
        count = (target != ignore).sum()
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        logits, target, normaliser = ctx.saved_tensors
        out = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            out[part] = _slope(
                logits[part].to(_wide(logits.dtype)), target[part], ctx.ignore, normaliser[part], gradient
            )
        return out, None, None


def _product(hidden: torch.Tensor, weight: torch.Tensor, bias: Any, compute: torch.dtype) -> torch.Tensor:
    return F.linear(hidden.to(compute), weight, None if bias is None else bias.to(compute)).to(_wide(compute))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Type of sums and exponentials: float32, as autocast takes it, unless the script computes in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_losses(logits: torch.Tensor, target: Any, ignore: int, normaliser: torch.Tensor) -> torch.Tensor:
    """The summed loss of a chunk; writes log-sum-exp of each row into `normaliser`."""
    torch.logsumexp(logits, 1, out=normaliser)
    chosen = logits.gather(1, target.clamp_min(0)[:, None])[:, 0]
    return ((normaliser - chosen) * (target != ignore)).sum()


def _slope(
    logits: torch.Tensor, target: Any, ignore: int, normaliser: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Derivative of the summed loss by the logits of a chunk."""
    slope = (logits - normaliser[:, None]).exp_()
    slope.scatter_add_(1, target.clamp_min(0)[:, None], torch.full_like(normaliser, -1.0)[:, None])
    return slope.mul_(((target != ignore) * gradient)[:, None])
