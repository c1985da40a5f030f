"""`flash_attn.bert_padding`: tokens without padding, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad


def index_first_axis(tensor: Any, indices: Any) -> Any:
    """The rows of `tensor` at `indices`."""
    return tensor[indices]


def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """A tensor of zeros with `first_axis_dim` rows, and `values` at `indices`."""
    out = torch.zeros((first_axis_dim, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return out.index_put((indices,), values)


def unpad_input(
    hidden_states: Any, attention_mask: Any, unused_mask: Any = None
) -> tuple[Any, Any, Any, int, Any]:
    """(tokens [T, …], their indices, cumulated lengths [B + 1] in int32, longest length, used lengths).

    Args:
        hidden_states: [B, S, …].
        attention_mask: [B, S], not zero for tokens.
        unused_mask: [B, S], not zero for tokens that are kept but not used.
    """
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = every.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(every.flatten(), as_tuple=False).flatten()
    boundaries = pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    flat = hidden_states.flatten(0, 1)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return index_first_axis(flat, indices), indices, boundaries, int(lengths.max().item()), used


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """[B, S, …] with the tokens at their places and zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
