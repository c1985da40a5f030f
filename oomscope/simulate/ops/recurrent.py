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


@kernel("aten::_pack_padded_sequence")
def pack_padded_sequence(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """(packed rows, rows at each time).

    The second is on the host, and follows from the lengths, which are there too.
    """
    source, lengths = args[:2]
    batch_sizes = torch.tensor([int((lengths > time).sum()) for time in range(int(lengths.max()))])
    packed = _empty(mode, source, int(lengths.sum()), *source.shape[2:])
    return packed, batch_sizes


@kernel("aten::_use_cudnn_ctc_loss", "aten::_use_miopen_ctc_loss")
def use_cudnn_ctc_loss(mode: Any, func: Any, args: Any, kwargs: Any) -> bool:
    return False


@kernel("aten::_ctc_loss")
def ctc_loss(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """(loss of each row, log-probabilities of every prefix). Source: native/cuda/LossCTC.cu."""
    log_probs, _, _, target_lengths = args[:4]
    steps, rows = log_probs.shape[:2]
    longest = max(int(each) for each in target_lengths) if len(target_lengths) else 0
    return _empty(mode, log_probs, rows), _empty(mode, log_probs, rows, steps, 2 * longest + 1)


@kernel("aten::_ctc_loss_backward")
def ctc_loss_backward(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    log_probs = args[1]
    return _empty(mode, log_probs, *log_probs.shape)
