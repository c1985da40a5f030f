"""Which torch wrote a snapshot: frames of `torch/nn/modules/module.py` give it away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oomscope.core.snapshot.columns import Frame

_WRAPPED_CALL_LINES = {
    1518: "2.1", 1511: "2.2", 1532: "2.3", 1553: "2.4", 1736: "2.5", 1739: "2.6", 1751: "2.7",
    1773: "2.8", 1775: "2.9", 1776: "2.10", 1779: "2.11", 1778: "2.13",
}  # fmt: skip
"""Line of the call in `Module._wrapped_call_impl` -> release, read in each release's
torch/nn/modules/module.py."""


def torch_version(frames: Iterable[Frame], raw: dict[str, Any]) -> str | None:
    """The release that wrote the snapshot, such as "2.6"; None when nothing in it tells.

    Block histories ("history" in place of "frames") existed in torch 2.0 only.
    """
    segments = raw.get("segments")
    if isinstance(segments, (list, tuple)) and segments and type(segments[0]) is dict:
        blocks = segments[0].get("blocks")
        if (
            isinstance(blocks, (list, tuple))
            and blocks
            and type(blocks[0]) is dict
            and "history" in blocks[0]
        ):
            return "2.0"
    for frame in frames:
        if frame.function == "_wrapped_call_impl" and frame.line in _WRAPPED_CALL_LINES:
            return _WRAPPED_CALL_LINES[frame.line]
    return None
