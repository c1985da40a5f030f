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


_KEYS = (
    ("pool_id", "2.12"), ("forward_frames", "2.12"), ("user_metadata", "2.10"),
    ("graph_capture_record_stream_reuse", "2.9"), ("compile_context", "2.8"), ("external_annotations", "2.5"),
    ("allocator_settings", "2.3"), ("time_us", "2.2"), ("segment_pool_id", "2.1"), ("requested_size", "2.0"),
)  # fmt: skip
"""Key -> the first release that writes it, newest first; seen in files of these releases."""


def oldest_version(raw: dict[str, Any], event_keys: Iterable[str]) -> str | None:
    """The oldest release that can have written the snapshot, by its keys; None when it has none of them.

    `event_keys`: keys of its rows.
    """
    segments, settings = raw.get("segments"), raw.get("allocator_settings")
    first = segments[0] if isinstance(segments, (list, tuple)) and segments else None
    keys = {key for each in (raw, settings, first) if type(each) is dict for key in each} | set(event_keys)
    return next((release for key, release in _KEYS if key in keys), None)


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
