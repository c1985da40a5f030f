"""FSDP2 in place of DistributedDataParallel, for a trial: the script's own `DDP(model)` call shards instead.

Numerically this is the same training. A checkpoint is not: `torch.save(model.state_dict())` on rank 0 would
write one rank's shards without a word. So such a save is refused while the trial runs; to adopt the fix,
change the source.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from .blocks import find_block_groups
from .runtime import APPLIED, NO_EFFECT, REFUSED, Runtime

FIX = "fsdp2"


def install(runtime: Runtime, options: dict[str, Any]) -> None:
    """`DistributedDataParallel(model)` shards `model` over the ranks.

    Args:
        runtime: hooks and reporting.
        options: `reshard` (free the gathered parameters of a block after its forward; default true),
            `cpu_offload`.
    """
    from torch.distributed import fsdp

    if not hasattr(fsdp, "fully_shard"):
        runtime.report(FIX, REFUSED, f"fully_shard comes with torch 2.6; this is torch {torch.__version__}")
        return
    _Sharding(runtime, options).start()


class _Sharding:
    def __init__(self, runtime: Runtime, options: dict[str, Any]) -> None:
        self.runtime = runtime
        self.options = options

    def start(self) -> None:
        real = nn.parallel.DistributedDataParallel
        sharding = self

        class Replacement(type):
            """What the script gets under the name of DistributedDataParallel."""

            def __call__(cls, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return sharding.wrap(module)

            def __instancecheck__(cls, instance: Any) -> bool:
                # A sharded model must not pass for a DDP model: torch's checkpoint code would look for
                # `.module.`.
                return isinstance(instance, real)

        made = Replacement("DistributedDataParallel", (), {"__doc__": real.__doc__})
        for place in (nn.parallel, nn.parallel.distributed):
            self.runtime.patches.attr(place, "DistributedDataParallel", made)
        self._guard_save()
        self.runtime.watch_optimizers()
        self.runtime.settle(self._settle)

    def _settle(self) -> None:
        if self.runtime.state(FIX) is None:
            self.runtime.report(FIX, NO_EFFECT, "the script wraps no model in DistributedDataParallel")

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard `model` in place and give it what users of DDP touch."""
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        arguments: dict[str, Any] = {}
        if self.options.get("cpu_offload"):
            arguments["offload_policy"] = CPUOffloadPolicy()
        if not any(parameter.is_cuda for parameter in model.parameters()):
            from torch.distributed.device_mesh import init_device_mesh

            arguments["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
        before = dict(model.named_parameters())
        # DDP sends rank 0's values to everybody when it is made: keep that promise.
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)
        groups = find_block_groups(model)
        for group in groups:
            for block in group.modules:
                fully_shard(block, reshard_after_forward=bool(self.options.get("reshard", True)), **arguments)
        fully_shard(model, **arguments)
        after = dict(model.named_parameters())
        self._remap({id(before[name]): after[name] for name in before})
        model.__class__ = type(f"Sharded{type(model).__name__}", (_LikeDDP, type(model)), {})
        blocks = sum(len(group.modules) for group in groups)
        self.runtime.report(FIX, APPLIED, f"{blocks} blocks and the root over {dist.get_world_size()} ranks")
        return model

    def _remap(self, new: dict[int, Any]) -> None:
        """Optimizers that were made before the model was wrapped get the sharded parameters."""
        for optimizer in list(self.runtime.optimizers):
            if any(
                id(p) in new and p in optimizer.state for g in optimizer.param_groups for p in g["params"]
            ):
                self.runtime.report(FIX, REFUSED, "an optimizer holds state of the unsharded parameters")
            for group in optimizer.param_groups:
                group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]

    def _guard_save(self) -> None:
        original = torch.save
        runtime = self.runtime

        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            from torch.distributed.tensor import DTensor

            if any(isinstance(leaf, DTensor) for leaf in tree_flatten(obj)[0]):
                runtime.emit(
                    {
                        "k": "fix",
                        "id": FIX,
                        "state": "save_skipped",
                        "detail": "torch.save of a sharded model was skipped: it would write this rank's part only",
                    }
                )
                return None
            return original(obj, *args, **kwargs)

        self.runtime.patches.attr(torch, "save", save)


class _LikeDDP:
    """The parts of DistributedDataParallel that scripts use, on a sharded model."""

    @property
    def module(self) -> Any:
        return self

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication, as DDP's `no_sync` does."""
        sharded: Any = self
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    def _set_static_graph(self) -> None:
        return None
