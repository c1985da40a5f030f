"""Watches what the script does, so that no fix is suggested that is active already or that cannot apply.

Runs in prediction runs and with `--detail` only: it counts calls of a dozen torch functions and changes none
of them.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from importlib.util import find_spec
from typing import Any, Callable

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from . import knobs
from .blocks import find_block_groups
from .checkpointing import checkpointing_of_its_own
from .runtime import Runtime, device_type, has_trainable, trains

_LOW = (torch.float16, torch.bfloat16)
#: Framework -> module whose import shows that the script uses it: their packages import each other.
_FRAMEWORKS = {
    "transformers": "transformers.training_args",
    "lightning": "lightning.pytorch.trainer.trainer",
    "pytorch_lightning": "pytorch_lightning.trainer.trainer",
    "accelerate": "accelerate.accelerator",
}
_ENGINES = ("DeepSpeedEngine", "PipelineEngine")
#: The optimizer's state is complete after its first step; with several optimizers, a little later.
_STATE_STEPS = 8
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def install(runtime: Runtime, options: dict[str, Any]) -> None:
    """Start watching; one record `observed` follows after the first optimizer step, and one at the end."""
    _Observer(runtime).start()


class _Observer:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.facts: dict[str, Any] = {
            "autocast": False,
            "accumulation": 1,
            "block_groups": [],
            "checkpointing": None,
            "clips": False,
            "closure": False,
            "empty_cache_calls": 0,
            "eval_with_grad": 0,
            "has_batchnorm": False,
            "has_convolution": False,
            "logits_bytes": 0,
            "scaler": False,
            "zero_grad_keeps": False,
        }
        self.seen: set[int] = set()
        self.batches: set[int] = set()
        self.sizes: set[int] = set()
        self.backwards = 0
        self.main_parameters = -1
        self.engine = False
        self.steps = 0
        self.knobs: list[dict[str, Any]] = []

    def start(self) -> None:
        self.runtime.around(self._around)
        self.runtime.watch_backward()
        self.runtime.on_backward.append(self._on_backward)
        self.runtime.settle(self._emit)
        self.runtime.on_step.append(self._on_step)
        self._count(torch_checkpoint, "checkpoint", self._on_checkpoint)
        self._count(torch.cuda.memory, "empty_cache", self._on_empty_cache, also=(torch.cuda,))
        self._count(torch.nn.functional, "cross_entropy", self._on_cross_entropy)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._count(nn.utils.clip_grad, name, self._on_clip, also=(nn.utils,))
        self._count(torch.amp.GradScaler, "scale", self._on_scale)
        self._count(torch.optim.Optimizer, "zero_grad", self._on_zero_grad)
        self._count(nn.Module, "zero_grad", self._on_zero_grad)
        knobs.record(self.runtime, self.knobs)
        atexit.register(self._emit)

    def _count(
        self, owner: Any, name: str, callback: Callable[..., None], also: tuple[Any, ...] = ()
    ) -> None:
        """Call `callback` with the arguments of every call of `owner.name`, before it runs."""
        original = getattr(owner, name)
        guarded = self.runtime.guarded

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                guarded("observe", lambda: callback(*args, **kwargs))
            return original(*args, **kwargs)

        for place in (owner, *also):
            self.runtime.patches.attr(place, name, counted)

    # -- what the calls tell
    # -----------------------------------------------------------------------------------------

    def _around(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.runtime.guarded("observe", lambda: self._on_root_call(module, args, kwargs))
        return call(*args, **kwargs)

    def _on_root_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not trains(module):
            if torch.is_grad_enabled() and not module.training and has_trainable(module):
                self.facts["eval_with_grad"] += 1
            return
        self.facts["autocast"] |= bool(torch.is_autocast_enabled(device_type(module)))
        first = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.dim()), None)
        if first is not None:
            self.batches.add(int(first.size(0)))
            self.sizes.add(int(first.numel()))
        if id(module) not in self.seen:
            self.seen.add(id(module))
            self._on_model(module)

    def _on_model(self, root: nn.Module) -> None:
        count = sum(parameter.numel() for parameter in root.parameters())
        if count <= self.main_parameters:
            return
        self.main_parameters = count
        facts = self.facts
        facts["root_class"] = type(root).__qualname__
        facts["block_groups"] = [
            {"class": group.class_name, "count": len(group.names), "path": group.path}
            for group in find_block_groups(root)[:8]
        ]
        kinds = [type(module).__name__ for module in root.modules()]
        facts["has_batchnorm"] = any("BatchNorm" in kind for kind in kinds)
        facts["has_convolution"] = any(kind.startswith(("Conv", "LazyConv")) for kind in kinds)
        self.engine |= any(kind in _ENGINES for kind in kinds)
        facts["compiled"] = "OptimizedModule" in kinds
        facts["ddp"] = "DistributedDataParallel" in kinds
        facts["bucket_view"] = any(getattr(m, "gradient_as_bucket_view", False) for m in root.modules())
        facts["fsdp"] = any("FullyShardedDataParallel" in kind or kind.startswith("FSDP") for kind in kinds)
        facts["checkpointing"] = facts["checkpointing"] or checkpointing_of_its_own(root)
        facts["low_precision_parameters"] = all(p.dtype in _LOW for p in root.parameters())
        facts["parameters_bytes"] = sum(_bytes(p) for p in root.parameters())
        facts["largest_parameter_bytes"] = max((_bytes(p) for p in root.parameters()), default=0)

    def _on_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.facts["checkpointing"] is None:
            self.facts["checkpointing"] = "the script calls torch.utils.checkpoint itself"

    def _on_empty_cache(self, *args: Any, **kwargs: Any) -> None:
        self.facts["empty_cache_calls"] += 1

    def _on_cross_entropy(self, input: Any, *args: Any, **kwargs: Any) -> None:
        size = _bytes(input)
        if size > self.facts["logits_bytes"]:
            self.facts["logits_bytes"] = size
            self.facts["vocabulary"] = int(input.size(1 if input.dim() > 1 else 0))
            self.facts["fusable_head"] = _comes_from_linear(input)

    def _on_clip(self, *args: Any, **kwargs: Any) -> None:
        self.facts["clips"] = True

    def _on_scale(self, *args: Any, **kwargs: Any) -> None:
        self.facts["scaler"] = True

    def _on_zero_grad(self, owner: Any, set_to_none: bool = True) -> None:
        self.facts["zero_grad_keeps"] |= not set_to_none

    def _on_backward(self, tensor: torch.Tensor) -> None:
        self.backwards += 1

    def _on_step(self, optimizer: Any) -> None:
        self.facts["accumulation"] = max(self.facts["accumulation"], self.backwards)
        self.backwards = 0
        facts = self.facts
        facts["optimizer"] = type(optimizer).__qualname__
        facts["closure"] = isinstance(optimizer, torch.optim.LBFGS)
        facts["optimizer_fused"] = bool(optimizer.defaults.get("fused"))
        facts["optimizer_foreach"] = optimizer.defaults.get("foreach")
        self.steps += 1
        if self.steps > _STATE_STEPS:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        facts["gradients_bytes"] = sum(_bytes(p) for p in parameters if p.requires_grad)
        states = (value for state in optimizer.state.values() for value in state.values())
        facts["optimizer_bytes"] = sum(_bytes(v) for v in states if isinstance(v, torch.Tensor))

    def _emit(self) -> None:
        self.runtime.guarded("observe", self._emit_record)

    def _emit_record(self) -> None:
        facts = self.facts
        facts["batch_size"] = max(self.batches, default=None)
        facts["batch_varies"] = len(self.sizes) > 1
        facts["frameworks"] = [name for name, module in _FRAMEWORKS.items() if module in sys.modules]
        facts["frameworks"] += ["deepspeed"] * self.engine
        facts["knobs"] = self.knobs
        facts["eight_bit_library"] = any(find_spec(name) for name in ("torchao", "bitsandbytes"))
        facts["alloc_conf"] = next((os.environ[v] for v in _ALLOCATOR_VARIABLES if os.environ.get(v)), "")
        facts["torch_version"] = [int(part) for part in torch.__version__.split(".")[:2]]
        self.runtime.emit({"k": "observed", **facts})


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _comes_from_linear(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the result of a matrix product but for views and casts."""
    node = tensor.grad_fn
    for _ in range(8):
        name = type(node).__name__
        if name.startswith(("Addmm", "Mm", "Linear")):
            return True
        if not name.startswith(("View", "UnsafeView", "Slice", "ToCopy", "Clone", "Reshape", "T", "Alias")):
            return False
        node = node.next_functions[0][0] if node is not None and node.next_functions else None
    return False
