"""Shapes, dtypes and memory of the FlashAttention 2 kernels.

Source: csrc/flash_attn/flash_api.cpp of FlashAttention 2 (`mha_fwd`, `mha_bwd`, `mha_varlen_fwd`, `mha_varlen_bwd`).
Letters: B batch, S length, H heads, D depth of a head, T all tokens of a packed batch.
"""

from __future__ import annotations

from typing import Any

import torch

NAMESPACE = "flash_attn"
OPERATIONS = {
    "_flash_attn_forward": "(Tensor q, Tensor k, Tensor v, float dropout_p) -> (Tensor, Tensor, Tensor, Tensor)",
    "_flash_attn_backward": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> Tensor",
    "_flash_attn_varlen_forward": "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, float dropout_p) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "_flash_attn_varlen_backward": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor cu_seqlens_q) -> Tensor",
    "_apply_rotary": "(Tensor x) -> Tensor",
}
"""What the stand-in calls; the leading arguments are those of the package's own operations of these names."""
_ROWS = 128
"""Queries that one block handles; lengths are rounded up to it."""
_libraries: list[Any] = []


def describe(registry: Any) -> None:
    """Register the memory that the kernels take for themselves, in either namespace that the package has used."""
    for namespace in (NAMESPACE, "flashattn"):
        registry.workspace(f"{namespace}::_flash_attn_backward")(backward_workspace)
        registry.workspace(f"{namespace}::_flash_attn_varlen_backward")(varlen_backward_workspace)


def define() -> Any:
    """Define the operations of the stand-in, and return their namespace in `torch.ops`."""
    if not _libraries:
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        shapes = {
            "_flash_attn_forward": forward,
            "_flash_attn_backward": backward,
            "_flash_attn_varlen_forward": varlen_forward,
            "_flash_attn_varlen_backward": varlen_backward,
            "_apply_rotary": torch.empty_like,
        }
        for name, schema in OPERATIONS.items():
            library.define(name + schema)
            torch.library.register_fake(f"{NAMESPACE}::{name}", shapes[name], lib=library)
        _libraries.append(library)
    return getattr(torch.ops, NAMESPACE)


# --- shapes


def forward(q: Any, k: Any, v: Any, dropout_p: float) -> tuple[Any, Any, Any, Any]:
    """(out [B, S, H, D], log-sum-exp [B, H, S] in float32, nothing, state of the random generator)."""
    batch, length, heads, _ = q.shape
    return torch.empty_like(q), *_beside(q, batch, heads, length)


def varlen_forward(q: Any, k: Any, v: Any, cu_seqlens_q: Any, dropout_p: float) -> tuple[Any, Any, Any, Any]:
    """(out [T, H, D], log-sum-exp [H, T] in float32, nothing, state of the random generator)."""
    return torch.empty_like(q), *_beside(q, q.shape[1], q.shape[0])


def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any) -> Any:
    """Row sums [B, H, S rounded] in float32; the gradients are written into dq, dk and dv."""
    batch, length, heads, _ = q.shape
    return torch.empty(batch, heads, _up(length, _ROWS), dtype=torch.float32, device=q.device)


def varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    cu_seqlens_q: Any,
) -> Any:
    """Row sums [H, T + 128 B] in float32."""
    rows = q.shape[0] + _ROWS * (cu_seqlens_q.shape[0] - 1)
    return torch.empty(q.shape[1], rows, dtype=torch.float32, device=q.device)


def _beside(q: Any, *shape: int) -> tuple[Any, Any, Any]:
    return (
        torch.empty(shape, dtype=torch.float32, device=q.device),
        torch.empty(0, dtype=q.dtype, device=q.device),
        torch.empty(2, dtype=torch.int64, device=q.device),
    )


# --- memory inside the kernels


def backward_workspace(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    """A float32 accumulator for dq [B, S rounded, H, D rounded], and dk and dv for all heads of the queries."""
    q, k = args[1], args[2]
    batch, length, heads, depth = q.shape
    accumulator = batch * _up(length, _ROWS) * heads * _rounded(depth) * 4
    return [accumulator, *_expanded(q, k, batch * k.shape[1] * heads * depth)]


def varlen_backward_workspace(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    """As `backward_workspace`; each sequence has room for one block of queries more."""
    q, k = args[1], args[2]
    tokens, heads, depth = q.shape
    boundaries = next(
        each
        for each in args[6:]
        if isinstance(each, torch.Tensor) and each.dim() == 1 and each.dtype is torch.int32
    )
    rows = tokens + _ROWS * (boundaries.shape[0] - 1)
    return [rows * heads * _rounded(depth) * 4, *_expanded(q, k, k.shape[0] * heads * depth)]


def _expanded(q: Any, k: Any, elements: int) -> list[int]:
    return [] if q.shape[-2] == k.shape[-2] else [elements * k.element_size()] * 2


def _rounded(depth: int) -> int:
    return _up(depth, 32) if depth <= 192 else 256


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
