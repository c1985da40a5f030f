"""Recurrent networks as a card runs them: whole, through cuDNN, with a reserve space for the backward pass.

A CPU build would take `lstm`, `gru`, `rnn_tanh` and `rnn_relu` apart into one cell per layer and time step. So they are
registered anew for the AutogradCUDA key, as attention is. cuDNN tells the size of its buffers only on a card. Two
reserve spaces were printed by cuDNN 7 on a P100 for four layers of 320 units, batch × time 25,000, in float32
(pytorch/pytorch#2895): 736,000,000 bytes for an LSTM and 864,000,000 for a GRU. That is 5 and 6 values for each unit of
each layer, and the outputs between the layers; the workspaces beside them were 1.46 and 1.45 times the parameters.
Other versions and algorithms are not known: each such block carries the range in which it may lie.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .registry import kernel, workspace

aten = torch.ops.aten
_KINDS = {"rnn_relu": (0, 1), "rnn_tanh": (1, 1), "lstm": (2, 5), "gru": (3, 6)}
"""Name -> cudnnRNNMode_t, and values that the reserve space keeps for a unit; those of plain networks are assumed."""
_KEPT = dict(_KINDS.values())
_WORKSPACE = 1.46
_BELOW, _ABOVE = 0.25, 0.5
"""Share of a reserve space by which it may be smaller or larger (assumed)."""
_DTYPES = (torch.float16, torch.float32, torch.float64)
"""Source: `cudnn_is_acceptable` in aten/src/ATen/native/CuDNN.cpp."""
_DROPOUT_STATE = 48 * 2048
"""Bytes for each multiprocessor, assumed: one XORWOW state of cuRAND for each of its threads."""
_libraries: list[Any] = []


def install(mode: Any) -> None:
    """Register the networks."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _KINDS:
            library.impl(f"{name}.input", _dense(mode, name), "AutogradCUDA")
            library.impl(f"{name}.data", _packed(mode, name), "AutogradCUDA")
    _libraries.append(library)


def _dense(mode: Any, name: str) -> Any:
    whole = getattr(aten, name).input

    def run(source: Any, hx: Any, params: Any, has_biases: bool, layers: int, dropout: float, train: bool,
            bidirectional: bool, batch_first: bool) -> Any:  # fmt: skip
        if not (mode.cudnn_enabled and source.dtype in _DTYPES):
            return whole.decompose(
                source, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first
            )
        return _network(
            name, source, [], hx, params, has_biases, layers, dropout, train, bidirectional, batch_first
        )

    return run


def _packed(mode: Any, name: str) -> Any:
    whole = getattr(aten, name).data

    def run(source: Any, batch_sizes: Any, hx: Any, params: Any, has_biases: bool, layers: int, dropout: float,
            train: bool, bidirectional: bool) -> Any:  # fmt: skip
        if not (mode.cudnn_enabled and source.dtype in _DTYPES):
            return whole.decompose(
                source, batch_sizes, hx, params, has_biases, layers, dropout, train, bidirectional
            )
        rows = batch_sizes.tolist()
        return _network(
            name, source, rows, hx, params, has_biases, layers, dropout, train, bidirectional, False
        )

    return run


def _network(name: str, source: Any, batch_sizes: list[int], hx: Any, params: Any, has_biases: bool, layers: int,
             dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> Any:  # fmt: skip
    """Call `_cudnn_rnn`, with half types under autocast. Source: aten/src/ATen/native/cudnn/RNN.cpp."""
    state, cell = (hx[0], hx[1]) if name == "lstm" else (hx, None)
    hidden = (state if cell is None else cell).shape[2]
    projected = state.shape[2] if state.shape[2] != hidden else 0
    stride = (4 if has_biases else 2) + bool(projected)
    if torch.is_autocast_enabled("cuda"):
        # `_cudnn_rnn_cast_reflatten` knows one type only, whatever autocast's is.
        source, state = source.to(torch.float16), state.to(torch.float16)
        cell = None if cell is None else cell.to(torch.float16)
        params = [each.to(torch.float16) for each in params]
    with torch.autocast("cuda", enabled=False):
        output, last, last_cell, _, _ = aten._cudnn_rnn.default(
            source, params, stride, None, state, cell, _KINDS[name][0], hidden, projected, layers, batch_first,
            dropout, train, bidirectional, batch_sizes, None,
        )  # fmt: skip
    return (output, last) if cell is None else (output, last, last_cell)


@kernel("aten::_cudnn_rnn")
def forward(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """(output, last state, last cell, reserve space, flat weights); the weights are taken where they are."""
    source, hx, cx = args[0], args[4], args[5]
    kind, hidden, projected, layers, batch_first, dropout, train, bidirectional, batch_sizes = args[6:15]
    directions = 2 if bidirectional else 1
    width = (projected or hidden) * directions

    def empty(*size: int, dtype: Any = source.dtype) -> Any:
        with mode.fake:
            return torch.empty(size, dtype=dtype, device=source.fake_device)

    if batch_sizes:
        output, rows = empty(source.shape[0], width), source.shape[0]
    else:
        first, second = source.shape[:2]
        output, rows = (
            empty(second, first, width) if batch_first else empty(first, second, width),
            first * second,
        )
        if batch_first:
            with mode.fake:
                output = torch.empty_strided(
                    (first, second, width),
                    (width, first * width, 1),
                    dtype=source.dtype,
                    device=source.fake_device,
                )
    values = rows * hidden * directions * (_KEPT[kind] * layers + layers - 1)
    reserve = empty(values * source.element_size() if train else 0, dtype=torch.uint8)
    cell = empty(0) if cx is None else empty(*cx.shape)
    if dropout > 0 and train:
        _dropout_state(mode, source.fake_device.index or 0)
    return output, empty(*hx.shape), cell, reserve, empty(0)


def _dropout_state(mode: Any, index: int) -> None:
    """Kept for as long as the process lives, one for each card."""
    key = ("dropout", index)
    if key not in mode.workspaces:
        size = _DROPOUT_STATE * mode.device.card.multiprocessors
        mode.workspaces[key] = mode.tracker.malloc(size, index, "workspaces")


@workspace("aten::_cudnn_rnn")
def forward_workspace(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    reserve = mode.tracker.allocation_of(outs[3])
    if reserve is not None:
        reserve.unknown = (int(reserve.size * _BELOW), int(reserve.size * _ABOVE))
    copies = [] if args[14] or not args[10] else [args[0].numel() * args[0].element_size()]
    return [*copies, _workspace_bytes(args[1])]


@kernel("aten::_cudnn_rnn_backward")
def backward(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients of input, states and weights, those of the weights in one buffer."""
    source, weights, hx, cx, wanted = args[0], args[1], args[4], args[5], args[-1]
    with mode.fake:
        gradients = [torch.empty_like(each) for each in weights] if wanted[3] else []
        return (
            torch.empty_like(source),
            torch.empty_like(hx),
            torch.empty_like(cx) if cx is not None else torch.empty(0, device=source.fake_device),
            gradients,
        )


@workspace("aten::_cudnn_rnn_backward")
def backward_workspace(mode: Any, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> list[int]:
    return [_workspace_bytes(args[1])]


def _workspace_bytes(weights: Any) -> int:
    return int(_WORKSPACE * sum(each.numel() * each.element_size() for each in weights))
