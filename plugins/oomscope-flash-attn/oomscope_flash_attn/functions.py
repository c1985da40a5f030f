"""The functions of `flash_attn`, for simulated tensors: what they save and what they give back."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from .kernels import define

Window = tuple[int, int]
_EVERYWHERE: Window = (-1, -1)
_DEEPEST = 256


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Dense or packed attention; `boundaries` are the cumulated lengths of a packed batch, None for a dense one.

    The gradients of tensors that came packed together are views of one tensor, as in the package.
    """

    @staticmethod
    def forward(ctx: Any, packed: Any, q: Any, k: Any, v: Any, boundaries: Any, dropout_p: float) -> Any:
        operations = define()
        parts = _split(packed, q, k, v)
        depth = parts[0].shape[-1]
        if depth % 8:
            parts = tuple(pad(each, (0, -depth % 8)) for each in parts)
        if boundaries is None:
            out, lse, _, state = operations._flash_attn_forward(*parts, dropout_p)
        else:
            out, lse, _, state = operations._flash_attn_varlen_forward(*parts, boundaries, dropout_p)
        ctx.save_for_backward(*parts, out, lse, state)
        ctx.set_materialize_grads(False)  # nobody has a gradient for the log-sum-exp
        ctx.boundaries, ctx.depth = boundaries, depth
        ctx.layout = (None if packed is None else packed.shape, q is not None)
        return out[..., :depth], lse

    @staticmethod
    def backward(ctx: Any, dout: Any, _dlse: Any) -> Any:
        q, k, v, out, lse, _ = ctx.saved_tensors
        shape, has_q = ctx.layout
        packed = (
            None if shape is None else torch.empty((*shape[:-1], q.shape[-1]), dtype=q.dtype, device=q.device)
        )
        dq = torch.empty_like(q) if has_q else None
        dk, dv = (None, None) if packed is not None else (torch.empty_like(k), torch.empty_like(v))
        gradients = _split(packed, dq, dk, dv)
        if q.shape[-1] != ctx.depth:
            dout = pad(dout, (0, q.shape[-1] - ctx.depth))
        operations, arguments = define(), (dout.contiguous(), q, k, v, out, lse, *gradients)
        if ctx.boundaries is None:
            operations._flash_attn_backward(*arguments)
        else:
            operations._flash_attn_varlen_backward(*arguments, ctx.boundaries)
        cut = [None if each is None else each[..., : ctx.depth] for each in (packed, dq, dk, dv)]
        return (*cut, None, None)


def _split(packed: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """(q, k, v): packed tensors are [..., 3 or 2, H, D]."""
    if packed is None:
        return q, k, v
    parts = packed.detach().unbind(-3) if packed.requires_grad else packed.unbind(-3)
    return parts if q is None else (q, *parts)


def _run(packed: Any, q: Any, k: Any, v: Any, boundaries: Any, dropout_p: float, with_softmax: bool) -> Any:
    _check(packed if q is None else q)
    out, lse = _Attention.apply(packed, q, k, v, boundaries, dropout_p)
    return (out, lse, torch.empty(0, dtype=out.dtype, device=out.device)) if with_softmax else out


def _check(tensor: Any) -> None:
    """What the kernels refuse, in their words."""
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if tensor.device.type != "cuda":
        raise RuntimeError("Input tensor must be on CUDA device")
    if torch.cuda.get_device_capability(tensor.device)[0] < 8:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if tensor.shape[-1] > _DEEPEST:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")


# The signatures below are the package's own: scripts pass arguments by position and look parameters up by name.


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = _EVERYWHERE, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q [B, S, H, D] over k and v [B, S', H', D]."""
    return _run(None, q, k, v, None, dropout_p, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Any, kv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = _EVERYWHERE, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q [B, S, H, D] over kv [B, S', 2, H', D]."""
    return _run(kv, q, None, None, None, dropout_p, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = _EVERYWHERE, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention within qkv [B, S, 3, H, D]."""
    return _run(qkv, None, None, None, None, dropout_p, return_attn_probs)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = _EVERYWHERE, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Any = None,
) -> Any:  # fmt: skip
    """Attention of q [T, H, D] over k and v [T', H', D]; sequences begin and end at the cumulated lengths."""
    return _run(None, q, k, v, cu_seqlens_q, dropout_p, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = _EVERYWHERE, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q [T, H, D] over kv [T', 2, H', D]."""
    return _run(kv, q, None, None, cu_seqlens_q, dropout_p, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = _EVERYWHERE, softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention within qkv [T, 3, H, D]."""
    return _run(qkv, None, None, None, cu_seqlens, dropout_p, return_attn_probs)


class _Rotary(torch.autograd.Function):  # type: ignore[misc]
    """One kernel each way; the angles are kept for the way back."""

    @staticmethod
    def forward(ctx: Any, x: Any, cos: Any, sin: Any, inplace: bool) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.inplace = inplace
        if inplace:
            ctx.mark_dirty(x)
            return x
        return define()._apply_rotary(x)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        return dout if ctx.inplace else define()._apply_rotary(dout), None, None, None


def apply_rotary_emb(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, seqlen_offsets: Any = 0,
    cu_seqlens: Any = None, max_seqlen: int | None = None,
) -> Any:  # fmt: skip
    """`flash_attn.layers.rotary.apply_rotary_emb`."""
    return _Rotary.apply(x, cos, sin, inplace)
