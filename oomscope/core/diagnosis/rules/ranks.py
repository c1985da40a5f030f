"""One card carries more than the others: contexts of other ranks, or the outputs of nn.DataParallel."""

from __future__ import annotations

from oomscope.core.diagnosis.evidence import Evidence, Fact, Missing
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.core.diagnosis.rules import tools as t
from oomscope.units import GIB

CONTEXT_LOW, CONTEXT_HIGH = 0.25 * GIB, 0.95 * GIB
"""What one CUDA context with its libraries takes, by driver and card."""
_PLACES = Missing("which process holds what on which GPU", "oomscope top, while the job runs")


def _context(e: Evidence) -> Answer:
    strangers = [p for p in e.processes if p.gpu == 0 and p.rank not in (None, 0)]
    lint = e.lint_of("no-set-device")
    evidence = t.facts(
        *(Fact(f"rank {p.rank} holds {t.size(p.bytes)} of GPU 0", "NVML", p.bytes) for p in strangers[:4]),
        Fact(f"{lint.where.place}: {lint.text}", "source code") if lint else None,
    )
    text = (
        "Other ranks have a context on GPU 0, because they touched CUDA before torch.cuda.set_device(local_rank), or "
        "used a bare "
        "'cuda'."
    )
    if strangers:
        small = all(CONTEXT_LOW <= p.bytes <= CONTEXT_HIGH for p in strangers)
        return Finding(0.93 if small else 0.6, text, evidence, where=lint.where if lint else None)
    several = len(e.ranks) > 1 or e.signal("uses:ranks", "uses:ddp") is not None
    if lint is not None and several and e.failed:
        return Finding(0.7, text, evidence, (_PLACES,), where=lint.where)
    said = e.signal("says:on_gpu0")
    if said is not None and several and e.phase != "resume" and e.signal("says:more_than_context") is None:
        if e.signal("uses:dataparallel") is not None:
            return Excluded((Fact("nn.DataParallel explains a fuller first GPU", "words"),))
        large = e.signal("says:large_context")
        return Finding(
            0.45 if large else 0.66,
            text,
            t.facts(t.heard(said), t.heard(large) if large else None),
            (_PLACES,),
        )
    if len(e.ranks) == 1:
        return Excluded((Fact("there is one rank", "ranks", 1),))
    return Undecided((_PLACES, t.SOURCE))


def _data_parallel(e: Evidence) -> Answer:
    lint, said = e.lint_of("data-parallel"), e.signal("uses:dataparallel")
    heavy = e.signal("says:gpu0_heavy")
    text = (
        "nn.DataParallel gathers outputs, losses and gradients on its first device, so that one fills first and "
        "adding cards hardly "
        "raises the batch. DistributedDataParallel does not."
    )
    if (lint is not None or (said is not None and said.source != "words")) and e.failed:
        first = e.oom is None or e.oom.device in (None, 0)
        return Finding(
            0.85 if first else 0.6,
            text,
            t.facts(
                Fact(f"{lint.where.place}: {lint.text}", "source code") if lint else None,
                t.heard(said) if said else None,
            ),
            where=lint.where if lint else None,
        )
    if said is not None and said.source == "words":
        return Finding(0.75, text, (t.heard(said),))
    if heavy is not None and e.signal("uses:ddp", "uses:fsdp") is None:
        return Finding(0.6, text, (t.heard(heavy),), (t.SOURCE,))
    if e.oom is not None and lint is None:
        return Excluded((Fact("the script does not use nn.DataParallel", "source code"),))
    return Undecided((t.SOURCE,))


RULES = (
    Rule(
        "oom.ctx_on_cuda0", "ctx_on_cuda0", "other ranks hold a context on GPU 0", "P.1",
        "processes per GPU, the source", _context, (),
    ),
    Rule(
        "oom.dataparallel_gather", "dataparallel_gather", "nn.DataParallel gathers on one card", "P.1",
        "the source", _data_parallel, (),
    ),
)  # fmt: skip
