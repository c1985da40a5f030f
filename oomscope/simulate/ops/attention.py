"""`scaled_dot_product_attention` on a CUDA device: which kernel is chosen, and what happens around it.

A CPU build has no chooser for CUDA and would silently take the mathematical form, which keeps the whole score
matrix. So the function is registered anew for the AutogradCUDA key, which lies below autocast.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from .registry import kernel

aten = torch.ops.aten
MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3
"""`sdp::SDPBackend` (ATen/SDPBackend.h)."""
_libraries: list[Any] = []


def choose(
    mode: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, grouped: bool
) -> int:
    """The kernel that torch picks for these inputs on the simulated card.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash before memory-efficient before math;
    cuDNN comes first only with a cuDNN newer than the one that the simulated device reports.
    """
    if query.dim() != 4:
        return MATH
    capability = mode.device.card.compute_capability
    depth = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    same_heads = query.shape[1] == key.shape[1]
    contiguous = query.stride(-1) == 1 and key.stride(-1) == 1 and value.stride(-1) == 1
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if query.shape[2] == 0 or key.shape[2] == 0:
        return MATH
    flash = (
        torch._C._get_flash_sdp_enabled()
        and half
        and capability >= (8, 0)
        and mask is None
        and depth <= 256
        and value.shape[-1] == depth
        and contiguous
        and (same_heads or grouped)
        and not (causal and query.shape[2] != key.shape[2])
        and not (needs_grad and capability in _SMALL_SHARED_MEMORY and not _trains(depth, dropout))
    )
    if flash:
        return FLASH
    alignment = _alignment(capability, half)
    efficient = (
        torch._C._get_mem_efficient_sdp_enabled()
        and contiguous
        and same_heads
        and capability >= (5, 0)
        and (half or query.dtype is torch.float32)
        and key.shape[-1] == depth
        and depth % alignment == 0
        and value.shape[-1] % alignment == 0
        and not (query.dtype is torch.bfloat16 and capability < (8, 0))
    )
    if efficient:
        return EFFICIENT
    cudnn = (
        torch._C._get_cudnn_sdp_enabled()
        and half
        and capability >= (9, 0)
        and depth % 8 == 0
        and depth <= 128
        and (same_heads or grouped)
    )
    return CUDNN if cudnn else MATH


_SMALL_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))


def _trains(depth: int, dropout: float) -> bool:
    """Whether flash attention has a backward kernel for this head size on cards with little shared memory."""
    return depth <= 192 or (depth > 224 and dropout == 0)


def _alignment(capability: tuple[int, int], half: bool) -> int:
    """Elements to which memory-efficient attention wants head sizes aligned (`minimum_gemm_alignment`)."""
    if capability >= (8, 0):
        return 8 if half else 4
    return 8 if half and capability >= (7, 0) else 1


@kernel("aten::_fused_sdp_choice")
def fused_choice(mode: Any, func: Any, args: Any, kwargs: Any) -> int:
    given = dict(zip((argument.name for argument in func._schema.arguments), args))
    given.update(kwargs)
    return choose(
        mode,
        given["query"],
        given["key"],
        given["value"],
        given.get("attn_mask"),
        given.get("dropout_p", 0.0),
        given.get("is_causal", False),
        given.get("enable_gqa", False),
    )


def install(mode: Any) -> None:
    """Register attention for CUDA tensors."""

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Any:
        chosen = choose(mode, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        mode.attention[chosen] = mode.attention.get(chosen, 0) + 1
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool and chosen != MATH:
            mask = _as_bias(mask, query.dtype)
        factor = scale if scale is not None else 1.0 / math.sqrt(query.shape[-1])
        needs_grad = torch.is_grad_enabled() and (
            query.requires_grad or key.requires_grad or value.requires_grad
        )
        if chosen == FLASH:
            depth = query.shape[-1]
            padded = [_pad_last(each, 8) for each in (query, key, value)]
            out = aten._scaled_dot_product_flash_attention(
                *padded, dropout_p, is_causal, False, scale=factor
            )[0]
            return out if out.shape[-1] == depth else out[..., :depth]
        if chosen == EFFICIENT:
            if mask is not None:
                mask = _aligned(mask, query, key)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs_grad, dropout_p, is_causal, scale=factor
            )[0]
        if chosen == CUDNN:
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, needs_grad, dropout_p, is_causal, False, scale=factor
            )[0]
        mode.adds_in_place = True  # the mask to the scores; out of place for tensor subclasses
        try:
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        finally:
            mode.adds_in_place = False

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    _libraries.append(library)


def _as_bias(mask: Any, dtype: Any) -> Any:
    """A boolean mask becomes 0 and -inf, as `convert_boolean_attn_mask` does."""
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    lowest = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, zero, lowest)


def _pad_last(tensor: Any, multiple: int) -> Any:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _aligned(mask: Any, query: Any, key: Any) -> Any:
    """The memory-efficient kernel wants rows aligned to 16 bytes: pad, slice, expand (`preprocess_mask`)."""
    last = mask.shape[-1]
    if last % 8 or mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        mask = torch.nn.functional.pad(mask, (0, 8 - last % 8))[..., :last]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
