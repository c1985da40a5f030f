"""Collectives: handles whose futures carry the tensor, and values as if every rank had the same."""

from __future__ import annotations

from typing import Any

import torch

from .replace import replace


class Work(torch.distributed.Work):  # type: ignore[misc]  # torch is not followed
    """A finished asynchronous operation.

    The fake group's own futures are empty, and DDP wants the tensors.
    """

    def __init__(self, inner: Any, value: Any) -> None:
        super().__init__()
        self._inner = inner
        self._value = value

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._value)
        return future

    def wait(self, *_timeout: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def install(mode: Any) -> None:
    """Replace `all_reduce` and the gathers."""
    c10d = torch.distributed.distributed_c10d
    plain_reduce, plain_gather = c10d.all_reduce, c10d.all_gather

    def all_reduce(
        tensor: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        value = mode.values.get(tensor) if tensor.device.type == "cuda" else None
        kept = value.clone() if value is not None else None
        work = plain_reduce(tensor, op, group, async_op)
        if kept is not None:
            if op == c10d.ReduceOp.SUM:
                kept = kept * c10d.get_world_size(group)
            mode.values.put(tensor, kept.to(tensor.dtype))
        return Work(work, [tensor]) if async_op and work is not None else work

    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        work = plain_gather(tensor_list, tensor, group, async_op)
        value = mode.values.get(tensor) if tensor.device.type == "cuda" else None
        if value is not None:
            for each in tensor_list:
                if each.shape == tensor.shape and each.dtype == tensor.dtype:
                    mode.values.put(each, value.clone())
        return Work(work, tensor_list) if async_op and work is not None else work

    replace({"all_reduce": all_reduce, "all_gather": all_gather})
