"""Fixes that keep fewer activations: checkpointing in its forms, and keeping them in host memory."""

from __future__ import annotations

from collections.abc import Callable

from oomscope.core.fixes.model import (
    Applicable,
    Band,
    Fix,
    How,
    JobFacts,
    Plan,
    Risk,
    no,
    no_activations,
    yes,
)

#: The release with `create_selective_checkpoint_contexts`.
_FIRST_SELECTIVE = (2, 5)
_FAMILY = frozenset({"ckpt", "ckpt-selective", "ckpt-half", "offload-activations", "knob-ckpt"})


def _blocks(facts: JobFacts) -> Applicable:
    if facts.checkpointing:
        return no(f"already active: {facts.checkpointing}")
    if not facts.block_groups:
        if facts.observed:
            return no(f"no block group found in {facts.root_class or 'the model'}")
        return yes("whether the model has repeated blocks is not known yet")
    group = facts.block_groups[0]
    return yes(f"{group.count} × {group.class_name} in {group.path or 'the model'}")


def _selective(facts: JobFacts) -> Applicable:
    if facts.older_than(_FIRST_SELECTIVE):
        return no("torch.utils.checkpoint is selective from torch 2.5 on")
    if facts.compiled:
        return no("torch.compile chooses what to keep by itself; set activation_memory_budget instead")
    return _blocks(facts)


def _checkpoint_band(facts: JobFacts) -> Band | None:
    """Blocks keep only their input; one at a time is whole again during backward."""
    nothing = no_activations(facts)
    if nothing or not facts.block_groups or not any(group.saved_bytes_each for group in facts.block_groups):
        return nothing
    total = sum(g.count * (g.saved_bytes_each - g.input_bytes_each) for g in facts.block_groups)
    largest = max(group.saved_bytes_each for group in facts.block_groups)
    return Band(total - largest, total, "what the blocks keep for backward, less their inputs and one block")


def _half_band(facts: JobFacts) -> Band | None:
    whole = _checkpoint_band(facts)
    if whole is None or not whole.high:
        return whole
    return Band(whole.low // 2, whole.high // 2, "half of the blocks")


def _where(facts: JobFacts) -> str:
    groups = ", ".join(f"{group.count} × {group.class_name}" for group in facts.block_groups[:3])
    return groups or "the repeated blocks"


def _plan(fix: str, text: str, **options: object) -> Callable[[JobFacts], Plan]:
    def make(facts: JobFacts) -> Plan:
        return Plan(
            runtime={fix: options},
            patch=fix,
            steps=(f"{text} {_where(facts)}",),
        )

    return make


CKPT = Fix(
    id="ckpt",
    title="Activation checkpointing of the repeated blocks",
    effort_s=900,
    risk=Risk.EXACT,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=1.37,
    conflicts=_FAMILY - {"ckpt"},
    test=_blocks,
    band=_checkpoint_band,
    make=_plan("ckpt", "recompute in backward:"),
    verify="losses and buffers are equal",
)

CKPT_SELECTIVE = Fix(
    id="ckpt-selective",
    title="Selective checkpointing (keep products and attention)",
    effort_s=900,
    risk=Risk.EXACT,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=1.11,
    conflicts=_FAMILY - {"ckpt-selective"},
    test=_selective,
    band=no_activations,
    make=_plan("ckpt-selective", "recompute all but products and attention in"),
    verify="losses and buffers are equal",
)

CKPT_HALF = Fix(
    id="ckpt-half",
    title="Checkpoint every second block",
    effort_s=900,
    risk=Risk.EXACT,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=1.18,
    conflicts=_FAMILY - {"ckpt-half"},
    test=_blocks,
    band=_half_band,
    make=_plan("ckpt-half", "recompute every second one of", every=2),
    verify="losses and buffers are equal",
)

OFFLOAD = Fix(
    id="offload-activations",
    title="Keep what the blocks save for backward in host memory",
    effort_s=900,
    risk=Risk.EXACT,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=2.0,
    conflicts=_FAMILY - {"offload-activations"},
    test=_blocks,
    band=_checkpoint_band,
    make=_plan("offload-activations", "keep in pinned host memory what is saved by"),
    verify="losses are equal; host memory grows by what the device saves",
)

FIXES = (CKPT, CKPT_SELECTIVE, CKPT_HALF, OFFLOAD)
