"""Which fixes to offer: never one that is already on, and never one that cannot help here.

The rules of advice, learnt from reports in which the usual hint was wrong:

1. Never print a setting that is already active.
2. Never recommend allocator settings when even perfect packing falls short.
3. Never recommend sharding when static state is at most half of the peak, when sharding is on, or on one
card. 4. Predicted savings stand beside each fix (that is the prediction's part). 5. Fixes that keep results
bit-identical come first. 6. Say when the evidence is not enough.
"""

from __future__ import annotations

from oomscope.core.diagnosis.evidence import KILLED_CODES, Evidence
from oomscope.core.diagnosis.model import Finding, Rule, Verdict
from oomscope.core.diagnosis.rules.tools import activations

ALLOCATOR_FIXES = frozenset({"expandable", "max-split", "gc-threshold"})
SHARDING_FIXES = frozenset({"fsdp2", "zero1"})
AUTOCAST_FIXES = frozenset({"amp-bf16", "amp-fp16"})
#: What the source shows to be on, and the fix that would only repeat it.
_ON = {
    "ckpt": ("on:checkpointing", "activation checkpointing is on"),
    "ckpt-selective": ("on:checkpointing", "activation checkpointing is on"),
    "optim-fused": ("on:fused_optimizer", "the optimizer is fused"),
    "optim-8bit": ("on:8bit_optimizer", "the optimizer's state is in 8 bits"),
    "optim-in-bwd": ("on:optimizer_in_backward", "the optimizer runs in backward"),
    "bucket-view": ("on:bucket_view", "gradients are views of DDP's buckets"),
    "fused-ce": ("on:fused_loss", "the loss is fused"),
    "sdpa": ("on:sdpa", "attention is fused"),
    "offload-activations": ("on:offload_activations", "activations are kept on the host"),
}


def choose_fixes(e: Evidence, rule: Rule, finding: Finding) -> tuple[str, ...]:
    """The fixes of `rule` (or of the finding) that can help in this case, best first."""
    offered = finding.fixes if finding.fixes is not None else rule.fixes
    return tuple(fix for fix in offered if reason_against(e, fix) is None)


def reason_against(e: Evidence, fix: str) -> str | None:
    """Why `fix` is not offered here, or None."""
    active = _already_active(e, fix)
    if active is not None:
        return active
    if fix in ALLOCATOR_FIXES:
        short = e.shortfall
        if short is not None and short > 0:
            return "even perfect packing would not have been enough"
        if fix == "max-split" and e.settings is not None and e.settings.expandable:
            return "max_split_size_mb makes no sense beside expandable_segments"
    if fix in SHARDING_FIXES:
        return _against_sharding(e)
    return None


def _already_active(e: Evidence, fix: str) -> str | None:
    s = e.settings
    if s is not None:
        if fix == "expandable" and s.expandable:
            return "expandable_segments is already on"
        if fix == "max-split" and s.max_split:
            return "max_split_size_mb is already set"
        if fix == "gc-threshold" and s.gc_threshold:
            return "garbage_collection_threshold is already set"
    if fix == "expandable" and e.signal("on:expandable") is not None:
        return "expandable_segments is already on"
    if fix in AUTOCAST_FIXES and ((e.model is not None and e.model.autocast) or e.signal("uses:autocast")):
        return "autocast is already on"
    if fix == "optim-8bit" and e.model is not None and "8bit" in (e.model.optimizer or "").lower():
        return "the optimizer's state is in 8 bits already"
    signal, text = _ON.get(fix, ("", ""))
    if signal and e.signal(signal) is not None:
        return f"{text} already"
    if any(fix in outcome.fix.split("+") for outcome in e.outcomes) or e.signal(f"fix:{fix}") is not None:
        return "this attempt already ran with it"
    return None


def _against_sharding(e: Evidence) -> str | None:
    if e.signal("uses:fsdp", "uses:zero", "uses:deepspeed") is not None:
        return "the job is sharded already"
    if e.ranks and len({r.rank for r in e.ranks}) < 2:
        return "there is only one rank to shard over"
    static = e.model.static_bytes if e.model is not None else None
    live = activations(e)
    if static is None and live is not None and e.allocated is not None:
        static = e.allocated - live
    if static is not None and e.allocated and static <= 0.5 * e.allocated:
        return "parameters, gradients and optimizer state are at most half of what was alive"
    return None


def sentences(e: Evidence, best: Verdict | None) -> tuple[str, ...]:
    """Advice that holds whatever the cause: above all where torch's own hint misleads."""
    said: list[str] = []
    hint = (e.message is not None and e.message.conf_var is not None) or (
        e.exception is not None and e.exception.is_oom
    )
    if hint and e.shortfall is not None and e.shortfall > 0:
        said.append(
            "torch's hint about fragmentation does not apply: free memory and idle cache together are smaller than "
            "the request."
        )
    elif hint and reason_against(e, "expandable") == "expandable_segments is already on":
        said.append(
            "torch's hint names expandable_segments, which is already on: the text is the same for every failure."
        )
    if best is not None and best.rule.cause == "capacity_activations" and e.trend is None and e.oom is None:
        said.append("If the job ran for long before it failed, look for growth first.")
    killed = e.host is not None and any(code in KILLED_CODES for _, code in e.host.exit_codes)
    if killed and not e.failed:
        said.append(
            "a process was killed with SIGKILL, and nothing recorded shows why: the host's out-of-memory killer (dmesg "
            "names its victims), a scheduler, or a person."
        )
    return tuple(said)
