"""Source patches: text in, text out, by libcst, so that formatting and comments stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oomscope.core.fixes.patches import (
    attention,
    gradients,
    leaks,
    loading,
    parts,
    precision,
    recompute,
    sharding,
)
from oomscope.core.fixes.patches.text import Patched
from oomscope.errors import PatchDoesNotApply

Transform = Callable[[str, Mapping[str, Any]], Patched]

#: Fix id -> the patch that adopts it.
PATCHES: dict[str, Transform] = {
    "leak-detach": leaks.detach,
    "load-cpu": loading.to_host,
    "zero-none": gradients.zero_none,
    "eval-no-grad": gradients.no_grad,
    "bucket-view": gradients.bucket_view,
    "optim-fused": gradients.fused,
    "amp-bf16": precision.autocast,
    "sdpa": attention.fuse,
    "ckpt": recompute.checkpoint,
    "ckpt-selective": recompute.selective,
    "ckpt-half": recompute.every_second,
    "offload-activations": recompute.offload,
    "microbatch-exact": parts.in_parts,
    "fused-ce": parts.fused_head,
    "zero1": sharding.zero1,
    "fsdp2": sharding.fsdp2,
}

__all__ = ["PATCHES", "Patched", "patch"]


def patch(fix_id: str, source: str, options: Mapping[str, Any] | None = None) -> Patched:
    """`source` with the fix applied.

    Args:
        fix_id: a key of `PATCHES`.
        source: a whole Python module.
        options: what the patch needs to know, see each patch.

    Raises:
        PatchDoesNotApply: there is no patch for the fix, or the source is in no form that the patch understands.
    """
    transform = PATCHES.get(fix_id)
    if transform is None:
        raise PatchDoesNotApply(f"{fix_id} has no source patch", hint=f"fixes with one: {', '.join(PATCHES)}")
    return transform(source, options or {})
