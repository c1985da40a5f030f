"""Fixes that change nothing, and why: the part of the finding that no other tool makes."""

from __future__ import annotations

from oomscope.core.diagnosis.bugs import known_bug
from oomscope.core.diagnosis.evidence import Evidence, Fact, Missing
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.core.diagnosis.rules import tools as t

_WHY = {
    "ckpt": "Checkpointing saves only what lies inside the wrapped region and outside its inputs; a region that is "
    "the whole model, or a single layer, saves nothing.",
    "amp-bf16": "Under autocast parameters, gradients and optimizer state stay fp32 and half-precision copies are "
    "added: where parameters dominate, the peak does not fall.",
    "expandable": "expandable_segments mends only memory that lies in pieces; what is live stays live.",
}
_SHARDING = ("uses:fsdp", "uses:zero", "uses:deepspeed")


def _fix(e: Evidence) -> Answer:
    bug = known_bug(e, "fix_ineffective")
    if bug is not None:
        return Finding(
            bug.confidence,
            f"{bug.title}. {bug.advice}",
            (Fact(f"{bug.package} {bug.affected}: {bug.link}", "known bugs"),),
        )
    bad = [
        o for o in e.outcomes if o.predicted_saving and (o.measured_saving or 0) < 0.5 * o.predicted_saving
    ]
    if bad:
        worst = bad[0]
        if e.trend is not None and e.trend.is_leak:
            return Finding(
                0.6,
                f"{worst.fix} saved {t.size(worst.measured_saving or 0)} where {t.size(worst.predicted_saving)} were "
                "predicted: memory grows from step to step, which a prediction of a few steps cannot contain.",
                t.facts(t.trend_fact(e)),
            )
        return Finding(
            0.9,
            f"{worst.fix} saved {t.size(worst.measured_saving or 0)} where {t.size(worst.predicted_saving)} were "
            "predicted. "
            + (worst.reason or " ".join(_WHY[fix] for fix in worst.fix.split("+") if fix in _WHY)),
            (Fact(f"{worst.fix} reached less than half of its prediction", "rerun", worst.measured_saving),),
        )
    if e.outcomes:
        return Excluded((Fact("the applied fixes did what was predicted", "rerun"),))
    said = e.signal("says:no_effect")
    if said is None:
        return Undecided((Missing("the peak before and after a fix", t.RUN),))
    measured = e.arithmetic is not None and bool(e.arithmetic.tags)
    named = e.signal("uses:checkpointing", "uses:autocast", "uses:expandable")
    if named is None and e.signal(*_SHARDING) is not None:
        return Undecided((t.MODEL,))
    if named is None:
        return Undecided((t.MODEL,))
    key = {"uses:checkpointing": "ckpt", "uses:autocast": "amp-bf16"}.get(named.name, "expandable")
    # With the numbers of a failure at hand, those decide what failed; that a hint did not help is a remark.
    # An allocator setting that does not help leaves the cause open.
    alone = 0.45 if key == "expandable" and "help" in said.text else 0.76
    return Finding(0.4 if measured else alone, _WHY[key], (t.heard(said), t.heard(named)), (t.MODEL,))


def _shard(e: Evidence) -> Answer:
    said, sharded = e.signal("says:no_effect"), e.signal(*_SHARDING)
    unit = e.signal("says:one_unit")
    if unit is not None and (sharded is not None or e.signal("uses:checkpointing") is None):
        if e.phase is not None and e.phase not in t.IN_STEP:
            return Undecided((t.MODEL,))
        return Finding(
            0.72,
            "Sharding saves what is not gathered at the moment. With one unit around the whole model, or with units "
            "that stay gathered, all of it is there at once: wrap each block, and free it after its forward.",
            t.facts(t.heard(unit), t.request_fact(e) if e.requested else None),
            (t.MODEL, t.SNAPSHOT),
        )
    if said is not None and sharded is not None and e.signal("uses:checkpointing", "says:no_sync") is None:
        return Finding(
            0.76,
            "Sharding divides static state only, and only between its units. With one unit around the whole model "
            "all of it is "
            "gathered at once; and activations are not divided at all.",
            (t.heard(said), t.heard(sharded)),
            (t.MODEL, t.SNAPSHOT),
        )
    live = t.activations(e)
    if sharded is not None and e.failed and live is not None and e.phase in t.IN_STEP:
        part = t.share(live, e.allocated)
        if part >= 0.7:
            return Finding(
                0.55,
                f"The job is sharded, but {part:.0%} of what was alive are activations, which sharding does not "
                "divide.",
                t.facts(t.heard(sharded), Fact(f"{t.size(live)} are activations", "model", live)),
            )
        return Excluded((Fact(f"activations are {part:.0%} of what was alive", "model", live),))
    if sharded is None and (e.lint or e.oom is not None):
        return Excluded((Fact("the job is not sharded", "source code"),))
    return Undecided((t.MODEL,))


RULES = (
    Rule(
        "oom.fix_ineffective", "fix_ineffective", "a fix did less than expected", "V",
        "peak before and after", _fix, (),
    ),
    Rule(
        "oom.shard_ineffective", "shard_ineffective", "sharding does not divide what fills the card", "Q1.9",
        "sharding and composition", _shard, ("ckpt",),
    ),
)  # fmt: skip
