"""Fused cells of recurrent networks, for which torch has no fake kernels.

A real card usually runs whole networks through cuDNN, whose reserve space is not known here.
"""

from __future__ import annotations

from typing import Any

import torch

from .registry import kernel


def _empty(mode: Any, like: Any, *size: int) -> Any:
    with mode.fake:
        return torch.empty(size, dtype=like.dtype, device=like.fake_device)


@kernel("aten::_thnn_fused_gru_cell")
def gru_cell(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """(new state, workspace): the workspace keeps five values a unit. Source: native/cuda/RNN.cu."""
    state = args[2]
    rows, width = state.shape
    return _empty(mode, state, rows, width), _empty(mode, state, rows, width * 5)


@kernel("aten::_thnn_fused_gru_cell_backward")
def gru_cell_backward(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    gradient, workspace, has_bias = args
    rows, width = workspace.shape[0], workspace.shape[1] // 5
    gates = [_empty(mode, workspace, rows, width * 3) for _ in range(2)]
    biases = [_empty(mode, workspace, width * 3) if has_bias else None for _ in range(2)]
    return (*gates, _empty(mode, gradient, rows, width), *biases)


@kernel("aten::_thnn_fused_lstm_cell")
def lstm_cell(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """(new state, new cell, workspace): the workspace keeps the four gates."""
    gates, cell = args[0], args[2]
    return tuple(_empty(mode, cell, *shape) for shape in (cell.shape, cell.shape, gates.shape))
