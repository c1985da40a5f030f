"""Short peaks.

One giant tensor, optimizer temporaries, convolution workspaces, unsynchronised gradients, buckets, absurd sizes.
"""

from __future__ import annotations

from oomscope.core.diagnosis.evidence import Evidence, Fact
from oomscope.core.diagnosis.message import Frame
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.core.diagnosis.rules import tools as t

_GIANT = 0.25
_COPY = 0.1
"""A second copy of the gradients is worth naming first when it is this share of what was alive (assumed)."""


def _giant(e: Evidence) -> Answer:
    if t.is_host_only(e) or e.tag("absurd_size"):
        return Excluded((Fact("another kind of failure", "message"),))
    op = e.signal("op:loss", "op:attention", "op:cat")
    said = e.signal("says:logits", "says:giant")
    part = t.share(e.requested, e.capacity)
    if e.tag("impossible_request"):
        conv = e.signal("op:conv")
        return Finding(
            0.55 if conv else 0.75,
            f"One request asks for {t.size(e.requested)}, more than the whole device: one tensor of that shape can "
            "never fit. Look at "
            "the shapes, and compute it in pieces.",
            t.facts(t.request_fact(e), t.heard(op) if op else None),
            (t.SNAPSHOT,),
        )
    if t.refused(e):
        return Excluded((Fact("the device had enough free memory and refused", "message"),))
    big = max((group.largest for group in e.live if group.category not in ("parameter", "before")), default=0)
    most = max(part, t.share(big, e.capacity))
    if most >= _GIANT:
        return _giant_found(e, op is not None, most, big)
    if said is not None and e.phase not in ("save", "resume", "eval", "load"):
        return Finding(
            0.7,
            "One tensor, such as the logits of all positions over the whole vocabulary, outweighs everything else.",
            (t.heard(said),),
            (t.SNAPSHOT,),
        )
    if e.capacity and e.requested:
        return Excluded((Fact(f"the request is {part:.0%} of the device", "message", e.requested),))
    return Undecided((t.NUMBERS, t.SNAPSHOT))


def _giant_found(e: Evidence, named: bool, most: float, big: int) -> Answer:
    short = e.shortfall is None or e.shortfall > 0
    minor = e.tag("defragmentation_minor")
    if not short and not minor:
        # The bytes were there. A request this large needs them in one piece: packing decides, not the tensor.
        return Finding(
            0.4,
            "The request is large, but enough memory was free in pieces.",
            t.facts(t.request_fact(e), t.shortfall_fact(e)),
        )
    if e.phase in ("save", "resume", "load", "init", "optimizer"):
        return Excluded((Fact(f"it failed in phase {e.phase}", "phase"),))
    live = t.activations(e)
    if live is not None and e.allocated and big < _GIANT * e.allocated and live >= 0.5 * e.allocated:
        confidence = 0.58  # many other activations weigh more than the one request
    else:
        confidence = 0.86 if named else 0.66
    group = max(e.live, key=lambda g: g.largest, default=None) if big else None
    return Finding(
        confidence,
        f"One tensor takes {most:.0%} of the device. Everything else could be halved and it would still decide: "
        "compute it in pieces, "
        "or fuse the operation that makes it.",
        t.facts(t.request_fact(e), t.shortfall_fact(e), t.group_fact(group) if group else None),
        () if named or e.live else (t.SNAPSHOT,),
        where=group.where if group else None,
    )


def _optimizer_transient(e: Evidence) -> Answer:
    foreach = e.signal("op:foreach", "says:foreach")
    if e.phase is not None and e.phase != "optimizer" and foreach is None:
        return Excluded((Fact(f"it failed in phase {e.phase}", "phase"),))
    if e.signal("op:init_state") is not None and e.signal("op:foreach") is None:
        return Excluded((Fact("it failed while the optimizer made its state", "traceback"),))
    late = e.step is not None and e.step >= 1
    passed = e.signal("says:not_first")
    kernel = e.signal("says:optimizer_kernel", "phase:optimizer")
    if foreach is not None and foreach.source != "words":
        return Finding(
            0.88,
            "The multi-tensor optimizer keeps temporaries as large as all parameters during the step. fused=True "
            "needs none, "
            "foreach=False one tensor's.",
            t.facts(t.heard(foreach), t.request_fact(e) if e.requested else None),
        )
    if e.phase == "optimizer" and late:
        return Finding(
            0.78,
            "Optimizer state exists since step 0, so this is a temporary of the step itself.",
            t.facts(Fact(f"it failed in the optimizer of step {e.step}", "steps", e.step), t.request_fact(e)),
        )
    if foreach is not None:
        return Finding(
            0.75,
            "The multi-tensor path keeps temporaries of the size of all parameters.",
            (t.heard(foreach),),
        )
    if kernel is not None and passed is not None:
        return Finding(
            0.66,
            "Earlier steps passed, so optimizer state exists; the step's own temporaries overflow a nearly full card.",
            (t.heard(kernel), t.heard(passed)),
            (t.SERIES,),
        )
    return Undecided((t.PHASE, t.SERIES))


def _cudnn(e: Evidence) -> Answer:
    lint = e.lint_of("cudnn-benchmark")
    said = e.signal("uses:cudnn_benchmark")
    conv = e.signal("op:conv")
    frames = e.oom.frames if e.oom is not None else ()
    if conv is None and any(_is_conv(frame) for frame in frames[:6]):
        conv = e.signal("phase:forward")
    workspace = dict(e.composition).get("workspaces", 0)
    if conv is not None and (lint is not None or said is not None or t.share(workspace, e.allocated) >= 0.2):
        return Finding(
            0.85,
            "cuDNN asks for a workspace beside the live tensors. With cudnn.benchmark it tries the large ones first.",
            t.facts(
                t.heard(conv),
                Fact(f"{lint.where.place}: {lint.text}", "source code") if lint else None,
                t.request_fact(e),
            ),
            where=lint.where if lint else None,
        )
    peak = e.signal("says:start_peak")
    if said is not None and (said.source == "words" or (e.failed and conv is not None)):
        return Finding(
            0.72,
            "cudnn.benchmark tries algorithms with large workspaces in the first iterations.",
            (t.heard(said),),
        )
    if peak is not None and e.signal("says:growing") is None and not e.failed:
        return Finding(
            0.55,
            "It needs far more in the first iterations than later: that is what cuDNN's search for an algorithm "
            "looks like.",
            (t.heard(peak),),
            (t.SOURCE,),
        )
    if frames and conv is None:
        return Excluded((Fact("no convolution is on the stack", "traceback"),))
    return Undecided((t.SOURCE, t.SNAPSHOT))


def _is_conv(frame: Frame) -> bool:
    return "conv" in frame.function.lower()


def _no_sync(e: Evidence) -> Answer:
    lint, said = e.lint_of("no-sync"), e.signal("says:no_sync")
    sharded = e.signal("uses:fsdp", "uses:zero", "uses:deepspeed")
    text = "Without synchronisation a sharded job keeps unsharded gradients on each card until the last micro-batch."
    if lint is not None and (e.failed or said):
        return Finding(
            0.85,
            text,
            t.facts(
                Fact(f"{lint.where.place}: {lint.text}", "source code"),
                t.request_fact(e) if e.requested else None,
            ),
            where=lint.where,
        )
    if said is not None and "unsharded" in said.text and e.signal("uses:zero", "uses:deepspeed") is not None:
        return Undecided((t.SOURCE,))  # stages 1 and 2 of ZeRO keep whole gradients by design
    if said is not None and (sharded is not None or "sync" in said.text):
        return Finding(0.8, text, t.facts(t.heard(said), t.heard(sharded) if sharded else None))
    return Undecided((t.SOURCE,))


def _buckets(e: Evidence) -> Answer:
    lint, said = e.lint_of("ddp-buckets"), e.signal("says:buckets")
    ddp = e.signal("uses:ddp") is not None or (e.model is not None and bool(e.model.ddp))
    if said is not None:
        return Finding(0.75, "DDP's buckets hold a second copy of all gradients.", (t.heard(said),))
    if lint is not None and e.failed and ddp and e.model is not None and e.shortfall is not None:
        gradients = e.model.gradients_bytes or e.model.parameters_bytes or 0
        if _one_copy_decides(e, gradients):
            return Finding(
                0.93,
                "DDP holds every gradient twice, and one copy of them is more than the whole job is short of.",
                t.facts(
                    Fact(f"{lint.where.place}: {lint.text}", "source code"),
                    Fact(f"gradients take {t.size(gradients)}", "model", gradients),
                    t.need_fact(e),
                ),
                where=lint.where,
            )
        if 0 < e.shortfall <= gradients:
            return Finding(
                0.55,
                "DDP holds every gradient twice, and what is missing is less than one copy of them.",
                t.facts(
                    Fact(f"{lint.where.place}: {lint.text}", "source code"),
                    Fact(f"gradients take {t.size(gradients)}", "model", gradients),
                    t.shortfall_fact(e),
                ),
                where=lint.where,
            )
        return Excluded(
            t.facts(t.shortfall_fact(e), Fact(f"gradients take {t.size(gradients)}", "model", gradients))
        )
    return (
        Undecided((t.SOURCE, t.MODEL))
        if ddp or not e.ranks
        else Excluded((Fact("the job does not use DDP", "model"),))
    )


def _one_copy_decides(e: Evidence, gradients: int) -> bool:
    """The predicted need of the whole job, less one copy of the gradients, is what torch could use."""
    need = e.packed_need_bytes
    limit = e.rank.capacity_bytes if e.rank is not None and e.rank.capacity_bytes else e.capacity
    if need is None or not limit or t.share(gradients, e.allocated) < _COPY:
        return False
    return 0 < need - limit <= gradients


def _absurd(e: Evidence) -> Answer:
    if e.tag("absurd_size"):
        return Finding(
            0.95,
            f"No real tensor is that large ({t.size(e.requested) if e.requested else 'more than 1 EB'}): a size "
            "overflowed, a shape is "
            "wrong, or memory was damaged. It is not a shortage, and no setting helps.",
            (t.request_fact(e),) if e.requested else (Fact("torch says “more than 1EB”", "message"),),
            (t.SNAPSHOT,),
        )
    if e.requested is None:
        return Undecided((t.NUMBERS,))
    return Excluded((Fact(f"the request is {t.size(e.requested)}", "message", e.requested),))


RULES = (
    Rule(
        "oom.giant_transient", "giant_transient", "one giant tensor", "Q1.3",
        "the request, the largest live block", _giant, ("fused-ce", "sdpa", "microbatch-exact"),
    ),
    Rule(
        "oom.optimizer_transient", "optimizer_transient", "temporaries of the optimizer step", "Q1.6",
        "phase and step of the failure", _optimizer_transient, ("optim-fused",),
    ),
    Rule(
        "oom.cudnn_workspace", "cudnn_workspace", "a convolution's workspace", "Q1.3",
        "the operation on the stack", _cudnn, (),
    ),
    Rule(
        "oom.nosync_grads", "nosync_grads", "unsharded gradients under no_sync", "Q1.9",
        "source of the accumulation", _no_sync, (),
    ),
    Rule(
        "oom.ddp_buckets", "ddp_buckets", "DDP holds gradients twice", "Q1.9",
        "source of the DDP call", _buckets, ("bucket-view",),
    ),
    Rule(
        "oom.absurd_size", "absurd_size", "an impossible size: a bug, not a shortage", "G0.3",
        "the request", _absurd, (),
    ),
)  # fmt: skip
