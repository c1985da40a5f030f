"""Memory of loading, resuming, initialising and saving: copies that exist for a moment and count all the same."""

from __future__ import annotations

from oomscope.core.diagnosis.evidence import Evidence, Fact, Missing
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.core.diagnosis.rules import tools as t

_SHARDED = ("uses:fsdp", "uses:zero", "uses:deepspeed")
_PLACES = Missing("which process holds what on which GPU", "oomscope top, while the job loads")


def _other_phase(e: Evidence, *phases: str) -> Excluded | Undecided | None:
    """Excludes where the phase is known to be another, asks for it where it is not known."""
    if t.is_host_only(e):
        return Excluded((Fact("host memory ran out, not the device", "message"),))
    if e.phase is None:
        return Undecided((t.PHASE,))
    if e.phase not in phases:
        return Excluded((Fact(f"it happens in phase {e.phase}", "phase"),))
    return None


def _phase_fact(e: Evidence) -> Fact:
    signal = e.signal(f"phase:{e.phase}")
    return t.heard(signal) if signal is not None else Fact(f"it failed in phase {e.phase}", "phase")


def _full_gather(e: Evidence) -> Answer:
    swallowed = (
        e.message is not None and e.message.is_warning and e.signal("op:clone", "phase:save") is not None
    )
    other = _other_phase(e, "save")
    if other is not None and not swallowed:
        return other
    if e.signal("says:host") is not None and e.message is None and e.signal(*_SHARDED) is None:
        return Undecided((t.PHASE,))
    sharded, lint = e.signal(*_SHARDED), e.lint_of("full-state-dict")
    several = e.signal("uses:ranks") or (e.ranks if len(e.ranks) > 1 else None)
    evidence = t.facts(
        _phase_fact(e) if e.phase else None,
        t.heard(sharded) if sharded else None,
        Fact(f"{lint.where.place}: {lint.text}", "source code") if lint else None,
        t.request_fact(e) if e.requested else None,
    )
    text = (
        "Saving gathers the whole, unsharded model on each card, which training never needed. Save sharded, or "
        "gather on the CPU of "
        "rank 0 only."
    )
    if lint is not None:
        return Finding(0.94, text, evidence, where=lint.where)
    if swallowed or sharded is not None:
        return Finding(0.88, text, evidence)
    if several:
        return Finding(0.7, text, evidence, (t.SOURCE,))
    return Finding(0.55, text, evidence, (t.SOURCE, t.SNAPSHOT))


def _load_duplicate(e: Evidence) -> Answer:
    loaded = sum(group.bytes for group in e.live if group.category == "loaded")
    parameters = t.parameter_bytes(e)
    if e.failed and parameters and loaded >= 0.5 * parameters:
        return _still_loaded(e, loaded)
    other = _other_phase(e, "resume", "load")
    if other is not None:
        return other
    if _others_on_first_gpu(e) is not None:
        return Excluded(t.facts(_others_on_first_gpu(e)))
    copies = e.signal("op:deepcopy", "says:duplicate")
    if e.phase == "resume":
        lint = e.lint_of("load-device")
        return Finding(
            0.85 if copies or lint else 0.7,
            "While a checkpoint is restored its tensors live on the card beside those they are copied into. Load it "
            "with "
            "map_location='cpu', and drop the dictionary afterwards.",
            t.facts(
                _phase_fact(e),
                t.heard(copies) if copies else None,
                Fact(f"{lint.where.place}: {lint.text}", "source code") if lint else None,
            ),
            () if copies or lint else (t.SNAPSHOT,),
            where=lint.where if lint else None,
        )
    if copies is not None and e.signal(*_SHARDED) is None:
        return Finding(0.6, "State exists twice while it is loaded.", (t.heard(copies),), (t.SNAPSHOT,))
    return Undecided((t.SNAPSHOT, t.SOURCE))


def _still_loaded(e: Evidence, loaded: int) -> Answer:
    """Tensors that torch.load made are alive beside the model."""
    part = t.share(loaded, e.allocated)
    lint = e.lint_of("load-device")
    group = next(group for group in e.live if group.category == "loaded")
    return Finding(
        0.93 if part >= 0.15 else 0.5,
        "The tensors of a checkpoint are still on the card beside the model they were copied into: load it with "
        "map_location='cpu', and drop the dictionary after load_state_dict().",
        t.facts(
            Fact(
                f"{t.size(loaded)} ({part:.0%} of what was alive) were made by torch.load", "snapshot", loaded
            ),
            Fact(f"{lint.where.place}: {lint.text}", "source code") if lint else None,
            t.request_fact(e),
        ),
        where=lint.where if lint else group.where,
    )


def _others_on_first_gpu(e: Evidence) -> Fact | None:
    """Ranks other than 0 hold memory of GPU 0."""
    strangers = [p for p in e.processes if p.gpu == 0 and p.rank not in (None, 0)]
    if strangers:
        total = sum(p.bytes for p in strangers)
        return Fact(f"{len(strangers)} other ranks hold {t.size(total)} of GPU 0", "NVML", total)
    if e.signal("uses:ranks") is not None:
        said = e.signal("says:on_gpu0", "says:only_multi", "says:map_location")
        return t.heard(said) if said is not None else None
    return None


def _load_on_cuda0(e: Evidence) -> Answer:
    strangers = _others_on_first_gpu(e)
    large = e.signal("says:more_than_context")
    lint = e.lint_of("load-device")
    several = len(e.ranks) > 1 or e.signal("uses:ranks", "uses:ddp") is not None
    if strangers is not None and (e.phase in ("resume", "load") or large is not None):
        clear = e.phase == "resume" or large is not None
        return Finding(
            0.85 if clear else 0.55,
            "Every rank restores the checkpoint onto the card it was saved from, cuda:0: torch.load keeps the device "
            "unless "
            "map_location says otherwise.",
            t.facts(strangers, Fact(f"{lint.where.place}: {lint.text}", "source code") if lint else None),
            (_PLACES,) if not e.processes else (),
            where=lint.where if lint else None,
        )
    if lint is not None and several and e.failed and e.phase in ("resume", "load", "init"):
        return Finding(
            0.7,
            "torch.load without map_location brings every rank's tensors onto cuda:0.",
            (Fact(f"{lint.where.place}: {lint.text}", "source code"),),
            (_PLACES,),
            where=lint.where,
        )
    if not several:
        return (
            Excluded((Fact("there is one process", "ranks", len(e.ranks)),))
            if e.ranks
            else Undecided((_PLACES,))
        )
    return Undecided((_PLACES,))


def _init_before_shard(e: Evidence) -> Answer:
    other = _other_phase(e, "init", "load")
    if other is not None:
        return other
    if e.tag("foreign_memory"):
        return Excluded((Fact("much of the device is used outside this process", "message"),))
    sharded, op = e.signal(*_SHARDED), e.signal("op:shard")
    whole = e.signal("says:whole_model")
    if sharded is None and op is None:
        if whole is None or e.signal("says:host") is not None:
            return Undecided((t.SOURCE,))
        return Finding(
            0.6,
            "The whole model is moved to each card before anything divides it. Shard it first, from the meta device "
            "or the CPU; where nothing shards it, it does not fit.",
            t.facts(_phase_fact(e), t.heard(whole)),
            (t.SOURCE, t.NUMBERS),
        )
    if e.signal("says:host") is not None:
        return Excluded((Fact("host memory is meant", "words"),))
    return Finding(
        0.87,
        "The whole model is put on each card before it is sharded, so setting up needs more than training. Build it "
        "on the meta "
        "device or the CPU and shard from there.",
        t.facts(_phase_fact(e), t.heard(sharded) if sharded else None, t.heard(op) if op else None),
    )


RULES = (
    Rule(
        "oom.ckpt_full_gather", "ckpt_full_gather", "saving gathers the whole model", "Q3.1b",
        "phase, sharding, source of the save", _full_gather, (),
    ),
    Rule(
        "oom.load_duplicate", "load_duplicate", "a checkpoint is on the card twice", "Q1.1",
        "phase, source of the load", _load_duplicate, ("load-cpu",),
    ),
    Rule(
        "oom.load_on_cuda0", "load_on_cuda0", "every rank loads onto cuda:0", "Q1.1",
        "processes per GPU, source of the load", _load_on_cuda0, ("load-cpu",),
    ),
    Rule(
        "oom.init_before_shard", "init_before_shard", "the whole model is on the card before sharding", "Q1.2",
        "phase and sharding", _init_before_shard, (),
    ),
)  # fmt: skip
