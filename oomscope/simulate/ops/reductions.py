"""Memory that a sum over the rows of a matrix takes on the card: gradients of biases and norm weights.

Thread blocks that share an output leave their partial sums in global memory. Source: the launch heuristics of
aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `ReduceConfig::global_memory_size`); sizes agree with
traces recorded on an H100.
"""

from __future__ import annotations

import math
from typing import Any

from .registry import workspace

_MAX_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values per thread between which a reduction is spread over blocks."""
_THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
"""Where it is not 2048. Source: CUDA C++ Programming Guide, technical specifications."""


@workspace("aten::sum.dim_IntList")
def sum_over_rows(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int] | None:
    """Partial sums, where the leading dimensions of a contiguous tensor are summed."""
    source, dims = args[0], args[1]
    count = source.dim()
    if not count or not dims or len(dims) == count or not source.is_contiguous():
        return None
    if {dim % count for dim in dims} != set(range(len(dims))):
        return None
    shape = source.shape
    rows, columns = math.prod(shape[: len(dims)]), math.prod(shape[len(dims) :])
    size = partial_sums(rows, columns, mode.device.card)
    return [size] if size else None


def partial_sums(rows: int, columns: int, card: Any) -> int:
    """Bytes of the partial sums of a float32 accumulation; 0 where no blocks share an output."""
    if rows < _MOST_VALUES or columns < 1:
        return 0
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    most = _MAX_THREADS // vector
    wide, high = _power_of_two(columns // vector, most), _power_of_two(rows, most)
    width = min(wide, _WARP)
    height = min(high, most // width)
    width = min(wide, most // height)
    if rows < min(height * 16, _MOST_VALUES):
        return 0  # the rows of a block work on outputs of their own
    values = -(-rows // height)
    grid = -(-columns // vector // width)
    threads = _THREADS_PER_MULTIPROCESSOR.get(card.compute_capability, 2048)
    target = card.multiprocessors * (threads // (width * height))
    if values < _MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return 4 * columns * blocks * width * vector if blocks > 1 else 0


def _power_of_two(number: int, most: int) -> int:
    """The largest power of two that is not above `number`, at most `most`."""
    return most if number >= most else 1 << max(number, 1).bit_length() - 1
