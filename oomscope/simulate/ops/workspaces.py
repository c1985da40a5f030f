"""Memory that kernels take for themselves: matrix products, attention, embeddings, convolutions.

Formulas are from the launch code of each kernel as published with its project; what is only assumed says so.
"""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import torch

from ...units import KIB, MIB
from .registry import workspace

# --- matrix products


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace: CUBLAS_WORKSPACE_CONFIG, 32 MiB on Hopper, 8.125 MiB elsewhere.

    Source: PyTorch, CUDABlas workspace defaults. On compute capability 10.0 and 12.0 a peak measured with
    torch 2.11 leaves room for 8.125 MiB only.
    """
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if config:
        parts = config.strip(":").split(":")
        try:
            total = sum(int(size) * int(count) * KIB for size, count in zip(parts[::2], parts[1::2]))
        except ValueError:
            total = 0
        if total:
            return total
    if capability == (9, 0):
        return 4096 * 8 * KIB
    return (4096 * 2 + 16 * 8) * KIB


@workspace(
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::addbmm",
    "aten::mv",
    "aten::addmv",
    "aten::dot",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
)
def matrix_product(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int] | None:
    """A workspace at the first product of each (thread, stream), kept: each thread has its own handle.

    Blackwell cards keep one MiB more after the first product with a bias (seen on a B200; probably
    cublasLt's).
    """
    index = outs[0].fake_device.index or 0
    key = (threading.get_ident(), index, mode.tracker.stream)
    if key not in mode.workspaces:
        size = cublas_workspace_bytes(mode.device.card.compute_capability)
        mode.workspaces[key] = mode.tracker.malloc(size, index, "workspaces")
    if func is torch.ops.aten.addmm.default and mode.device.card.compute_capability >= (10, 0):
        key = (0, index, -1)
        if key not in mode.workspaces:
            mode.workspaces[key] = mode.tracker.malloc(MIB, index, "workspaces")
    return None


# --- attention


@workspace("aten::_scaled_dot_product_flash_attention_backward")
def flash_backward(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    """FlashAttention 2: float32 accumulator for the query gradient, row sums, expanded key gradients.

    Source: flash_api.cpp `mha_bwd`: dq_accum [b, seqlen_q_rounded, h, d_rounded], softmax_d [b, h,
    seqlen_q_rounded]; with fewer key heads than query heads, dk and dv are expanded to all heads first.
    """
    query, key = args[1], args[2]
    batch, heads, length, depth = query.shape
    rounded = -(-depth // 32) * 32 if depth <= 192 else -(-depth // 64) * 64
    rows = -(-length // 128) * 128
    sizes = [batch * heads * rows * 4, batch * rows * heads * rounded * 4]
    if heads != key.shape[1]:
        sizes += [batch * key.shape[2] * heads * depth * key.element_size()] * 2
    return sizes


@workspace("aten::_flash_attention_backward")
def packed_flash_backward(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    query = args[1]
    return [query.numel() // query.shape[-1] * 4, query.numel() * 4]


@workspace("aten::_scaled_dot_product_efficient_attention_backward")
def efficient_backward(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    """Memory-efficient attention.

    Delta [b, h, q] in float32; a float32 gradient of the queries for half types.
    """
    query = args[1]
    rows = query.numel() // query.shape[-1]
    sizes = [rows * 4]
    if query.dtype is not torch.float32:
        sizes.append(query.numel() * 4)
    return sizes


# --- embeddings


@workspace("aten::embedding_dense_backward")
def embedding_backward(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    """Above 3072 indices they are sorted, and partial sums of up to 10 rows are kept in float32.

    Source: EmbeddingBackwardKernel.cu; partial sums take (N // 10 + min(N, V)) × D × 4 bytes for N indices,
    V rows of D columns.
    """
    count = args[1].numel()
    if count <= 3072:
        return []
    rows, columns = outs[0].shape[0], outs[0].shape[-1]
    return [count * 8, count * 8, count * 8, count * 16, (count // 10 + min(count, rows)) * columns * 4]


# --- convolutions


@workspace("aten::convolution", "aten::convolution_backward", "aten::_convolution")
def convolution(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    """The workspace that cuDNN picks is not known without the card.

    Counted as zero in the peak; its upper bound widens the interval (see `convolution_bound`).
    """
    bound = convolution_bound(func, args, outs)
    if bound > mode.convolution_bound:
        mode.convolution_bound = bound
    factor = mode.convolution_factor
    return [int(bound * factor)] if factor else []


def convolution_bound(func: Any, args: Any, outs: list[Any]) -> int:
    """Bytes of the unfolded input of a convolution, at most 1 GiB; assumed to bound what cuDNN takes.

    1×1 convolutions need none.
    """
    backward = "backward" in func._schema.name
    source, weight = (args[1], args[2]) if backward else (args[0], args[1])
    kernel_size = math.prod(weight.shape[2:])
    if kernel_size <= 1:
        return 0
    target = args[0] if backward else outs[0]
    columns = weight.shape[1] * kernel_size * math.prod(target.shape[2:])
    return int(min(columns * source.element_size() * source.shape[0], 1 << 30))
