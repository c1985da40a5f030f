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
from . import reductions  # noqa: F401  # it registers too
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


_OPERANDS = {"aten::addmm": 1, "aten::baddbmm": 1, "aten::addbmm": 1}
"""Position of the first of the two operands of a product, where it is not 0."""


@workspace("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addbmm")
def matrix_product(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int] | None:
    """The workspace of cuBLAS, and copies of operands whose strides it cannot read.

    Such an operand is the expanded gradient of a sum. Source: aten/src/ATen/native/cuda/Blas.cpp,
    `prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas`; seen in recorded traces.
    """
    blas_handle(mode, func, args, kwargs, outs)
    name = func._schema.name
    first = _OPERANDS.get(name, 0)
    if name == "aten::addmm" and args[0].dim() == 1:
        _blas_lt(mode, outs[0].fake_device.index or 0)
    copies = [
        each.numel() * each.element_size() for each in args[first : first + 2] if not _is_readable(each)
    ]
    return copies or None


def _is_readable(operand: Any) -> bool:
    """Whether cuBLAS takes a matrix, or each matrix of a batch, as it lies."""
    rows, columns = operand.stride()[-2:]
    height, width = operand.shape[-2:]
    if columns == 1 and rows >= max(width, 1):
        return True
    if rows == 1 and columns >= max(height, 1):
        return True
    return bool(rows and columns and operand.is_contiguous())


@workspace(
    "aten::mv",
    "aten::addmv",
    "aten::dot",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
)
def blas_handle(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> None:
    """A workspace at the first product of each (thread, stream), kept: each thread has its own handle."""
    index = outs[0].fake_device.index or 0
    key = (threading.get_ident(), index, mode.tracker.stream)
    if key not in mode.workspaces:
        size = cublas_workspace_bytes(mode.device.card.compute_capability)
        mode.workspaces[key] = mode.tracker.malloc(size, index, "workspaces")


def _blas_lt(mode: Any, index: int) -> None:
    """A product with a bias goes through cuBLASLt, which keeps a workspace of its own.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.8 to 2.11 (1 MiB, CUBLASLT_WORKSPACE_SIZE in
    KiB). Torch 2.6 and 2.7 give it back after each product; from 2.12 it is cuBLAS's own.
    """
    key = (threading.get_ident(), index, mode.tracker.stream, "lt")
    if key not in mode.workspaces:
        configured = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
        size = int(configured) * KIB if configured.isdigit() else MIB
        mode.workspaces[key] = mode.tracker.malloc(size, index, "workspaces")


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


@workspace("aten::_safe_softmax")
def safe_softmax(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    """The softmax itself and a mask of its infinite inputs; the output is chosen from them.

    Source: aten/src/ATen/native/transformers/attention.cpp, `_safe_softmax`.
    """
    out = outs[0]
    return [out.numel() * out.element_size(), out.numel()]


@workspace("aten::_scaled_dot_product_efficient_attention")
def efficient_forward(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int] | None:
    """A float32 accumulator where a row of half-precision output does not fit into registers.

    Source: mem_eff_attention/kernel_forward.h, `kNeedsOutputAccumulatorBuffer`.
    """
    value = args[2]
    if value.dtype is torch.float32 or value.shape[-1] <= 128:
        return None
    return [outs[0].numel() * 4]


@workspace("aten::_scaled_dot_product_efficient_attention_backward")
def efficient_backward(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    """Memory-efficient attention: row sums, and a tiled accumulator for the gradient of the queries.

    For float32 the row sums come from a product of gradient and output of full size, which is gone when the
    accumulator is made. Source: mem_eff_attention/kernel_backward.h, `workspace_size` (a tile has a header
    of 16 bytes) and `kKernelComputesDelta`.
    """
    query = args[1]
    batch, heads, length, depth = query.shape
    rows, columns = _tile(query, depth)
    tiles = -(-length // rows) * -(-depth // columns)
    accumulator = batch * heads * tiles * (rows * columns * 4 + 16)
    sums = batch * heads * length * 4
    if query.dtype is torch.float32:
        product = outs[0].numel() * 4 if outs else 0
        return [sums, max(accumulator, product)]
    return [sums, accumulator]


def _tile(query: Any, depth: int) -> tuple[int, int]:
    """Rows and columns of a tile of the backward kernel (mem_eff_attention/kernels/cutlassB.h)."""
    if query.dtype is torch.float32 or depth <= 64:
        return 64, 64
    return (128, 64) if depth <= 96 else (128, 128) if depth <= 128 else (64, 64)


# --- embeddings


@workspace("aten::embedding_dense_backward")
def embedding_backward(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    """Above 3072 indices they are sorted, and partial sums of up to 10 rows are kept in float32.

    Source: EmbeddingBackwardKernel.cu: sorted and original positions, segment starts (N each), three tables
    of partial segments, and partial sums of (N // 10 + min(N, V)) × D × 4 bytes for N indices, V rows of D
    columns.
    """
    count = args[1].numel()
    if count <= 3072:
        return []
    rows, columns = outs[0].shape[0], outs[0].shape[-1]
    segments = min(count, rows)
    partial = count // 10 + segments
    return [*[count * 8] * 3, *[segments * 8] * 2, partial * 8, partial * columns * 4]


@workspace("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
def index_accumulation(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int] | None:
    """Adding at positions sorts them; values that do not lie in order are copied.

    Source: aten/src/ATen/native/cuda/Indexing.cu, `index_put_with_sort_kernel`; seen in recorded traces.
    """
    if not (args[3] if len(args) > 3 else kwargs.get("accumulate")):
        return None
    counts = [each.numel() for each in args[1] if each is not None]
    values = args[2]
    sizes = [max(counts, default=0) * 8] * 3
    if not values.is_contiguous():
        sizes.append(values.numel() * values.element_size())
    return sizes


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
