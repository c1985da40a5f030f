"""Memory that outlives its use for other reasons than a list of losses.

Evaluation, casts, cycles, exceptions, hooks, frameworks.
"""

from __future__ import annotations

from oomscope.core.diagnosis.bugs import known_bug
from oomscope.core.diagnosis.evidence import Evidence, Fact, Missing
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.core.diagnosis.rules import tools as t

_EVAL = Missing("whether gradients are recorded in evaluation, and what its loop keeps", t.DETAIL)


def _elsewhere(e: Evidence) -> Excluded | None:
    """Excludes evaluation causes where the failure measurably lies in another phase."""
    measured = e.oom is not None and e.oom.phase not in (None, "other", "eval")
    if measured and e.oom is not None:
        return Excluded((Fact(f"it failed in phase {e.oom.phase}, not in evaluation", "phase"),))
    return None


def _eval_accumulation(e: Evidence) -> Answer:
    excluded = _elsewhere(e)
    if excluded is not None:
        return excluded
    if e.phase != "eval":
        return Undecided((t.PHASE,))
    lint = next((f for f in e.lint if f.rule == "container-append" and _evaluates(f.where.function)), None)
    if lint is not None:
        return Finding(
            0.88 if e.oom is not None else 0.6,
            "Evaluation collects its outputs on the device; they are freed only when it ends.",
            t.facts(
                Fact(f"{lint.where.place}: {lint.text}", "source code"),
                t.request_fact(e) if e.failed else None,
            ),
            where=lint.where,
        )
    kept, growing, rate = e.signal("says:keeps_outputs"), e.signal("says:growing"), e.signal("says:rate")
    if e.signal("uses:autocast", "says:cast_cache", "uses:hooks", "says:host") is not None:
        return Undecided((_EVAL,))
    if kept is not None or (growing is not None and rate is not None):
        return Finding(
            0.68 if kept else 0.55,
            "Memory grows within evaluation: its outputs stay on the device until it ends.",
            t.facts(t.heard(kept) if kept else None, t.heard(rate) if rate else None),
            (_EVAL,),
        )
    return Undecided((_EVAL,))


def _evaluates(function: str) -> bool:
    return any(word in function.lower() for word in ("eval", "valid", "test", "predict", "infer"))


def _eval_no_nograd(e: Evidence) -> Answer:
    excluded = _elsewhere(e)
    if excluded is not None:
        return excluded
    lint = e.lint_of("eval-no-grad")
    said = e.signal("says:no_nograd")
    if e.phase == "eval" and lint is not None:
        return Finding(
            0.93 if e.oom is not None else 0.8,
            "Evaluation runs with gradient recording on, so every activation is kept for a backward that never comes.",
            t.facts(
                Fact(f"{lint.where.place}: {lint.text}", "source code"),
                t.request_fact(e) if e.failed else None,
            ),
            where=lint.where,
        )
    if said is not None:
        return Finding(0.75, "Evaluation records gradients, so activations are kept.", (t.heard(said),))
    seen = t.recorded_evaluation(e)
    if seen is not None:
        proved = seen.source == "autograd"
        return Finding(
            0.88 if proved else 0.7,
            "Activations fill the card in evaluation: under no_grad() they would have been freed at once.",
            t.facts(seen, t.request_fact(e)),
            () if proved else (_EVAL,),
        )
    if e.phase == "eval":
        return Undecided((_EVAL,))
    return Undecided((t.PHASE, _EVAL))


def _autocast_cache(e: Evidence) -> Answer:
    excluded = _elsewhere(e)
    if excluded is not None:
        return excluded
    cast, cache = e.signal("uses:autocast"), e.signal("says:cast_cache")
    if e.model is not None and e.model.autocast is False and cast is None:
        return Excluded((Fact("autocast is not on", "model"),))
    if cache is not None:
        return Finding(0.8, _CAST, (t.heard(cache),))
    one = e.signal("says:one_autocast")
    if one is not None and e.oom is None:
        return Finding(0.62, _CAST, (t.heard(one),), (_EVAL,))
    if e.phase == "eval" and cast is not None and e.signal("says:host") is None:
        beside = _beside_parameters(e)
        if beside is not None:
            return Finding(0.82, _CAST, (t.heard(cast), beside))
        return Finding(0.74 if e.oom is None else 0.55, _CAST, (t.heard(cast),), (_EVAL,))
    return Undecided((_EVAL,))


def _beside_parameters(e: Evidence) -> Fact | None:
    """What is alive beside the parameters is about as large as half-precision copies of them."""
    parameters = t.parameter_bytes(e)
    if not parameters or e.allocated is None or e.oom is None:
        return None
    beside = e.allocated - parameters
    if 0.15 * parameters <= beside <= 0.6 * parameters and t.share(parameters, e.allocated) >= 0.5:
        text = f"{t.size(beside)} are alive beside {t.size(parameters)} of parameters; casts take up to half of them"
        return Fact(text, "model", beside)
    return None


_CAST = (
    "Inside one autocast region each weight's low-precision copy is cached until the region ends; without gradients "
    "the copies pile "
    "up or are made again and again. cache_enabled=False, or shorter regions, keep them from staying."
)


def _ref_cycle(e: Evidence) -> Answer:
    trend = e.trend
    if trend is not None and trend.kind == "sawtooth":
        return Finding(
            0.85,
            "Memory rises and falls with Python's garbage collector: the tensors sit in reference cycles, and only "
            "the collector "
            "frees them.",
            t.facts(t.trend_fact(e)),
        )
    if trend is not None and trend.kind in ("flat", "leak", "plateau"):
        return Excluded(t.facts(t.trend_fact(e)))
    lint = e.lint_of("self-cycle")
    if lint is not None and e.failed:
        held = sum(g.bytes for g in e.live if g.where is not None and g.where.file == lint.where.file)
        return Finding(
            0.85 if t.share(held, e.allocated) >= 0.5 else 0.55,
            "An object refers to itself, so only Python's collector frees it and its tensors; it counts objects, not "
            "bytes of device memory.",
            t.facts(
                Fact(f"{lint.where.place}: {lint.text}", "source code"),
                t.group_fact(e.live[0]) if e.live else None,
            ),
            where=lint.where,
        )
    said = e.signal("says:cycle")
    if said is not None:
        return Finding(
            0.75,
            "Objects that refer to each other are freed by the collector, not at once.",
            (t.heard(said),),
            (t.SERIES,),
        )
    return Undecided((t.SERIES,))


def _exception_holds(e: Evidence) -> Answer:
    lint = e.lint_of("exception-kept", "caught-oom")
    repeated = e.oom is not None and e.oom.count > 1
    if repeated and e.recovered is not None and (e.recovered.kept_bytes or 0) < 0.05 * (e.allocated or 0):
        text = f"the job recovered {e.recovered.events} times, and nothing of a failed step stayed allocated"
        return Excluded((Fact(text, "steps", e.recovered.kept_bytes),))
    said = e.signal("says:retry")
    if repeated and e.oom is not None:
        return Finding(
            0.9 if lint else 0.6,
            "An out-of-memory error was caught before this one. While its exception is alive, its traceback keeps "
            "the frames of the "
            "failed step and all their tensors: leave the except block before trying again.",
            t.facts(
                Fact(f"{e.oom.count} out-of-memory events in this process", "allocator", e.oom.count),
                Fact(f"{lint.where.place}: {lint.text}", "source code") if lint else None,
            ),
            where=lint.where if lint else None,
        )
    if said is not None and e.signal("uses:workers", "says:spurious") is None:
        return Finding(
            0.72,
            "The exception of the first failure keeps the frames of the failed step, and so their tensors, alive.",
            t.facts(t.heard(said), t.request_fact(e) if e.requested else None),
        )
    if e.oom is not None:
        return Excluded((Fact("it is the first such error of this process", "allocator", 1),))
    return Undecided((Missing("whether an error was caught before", t.RUN),))


def _hook(e: Evidence) -> Answer:
    growth = e.growth
    if growth is not None and growth.where is None and e.trend is not None and e.trend.is_leak:
        return Finding(
            0.6,
            "What outlives its step was allocated by installed code, not by the script: a hook, callback or logger "
            "keeps it.",
            t.facts(t.trend_fact(e), t.growth_fact(growth)),
        )
    hooks = e.signal("uses:hooks")
    kept = e.signal("says:growing", "says:keeps_outputs")
    if hooks is not None and (kept is not None or e.phase == "eval"):
        return Finding(
            0.7, "A hook or callback of a library keeps tensors.", (t.heard(hooks),), (t.SNAPSHOT,)
        )
    return Undecided((t.SNAPSHOT,))


def _framework(e: Evidence) -> Answer:
    bug = known_bug(e)
    if bug is not None:
        return Finding(
            bug.confidence,
            f"{bug.title}. {bug.advice}",
            (Fact(f"{bug.package} {bug.affected}: {bug.link}", "known bugs"),),
        )
    growing = e.signal("says:growing")
    if growing is None and not e.failed:
        lone = e.signal("says:contrast")
        if lone is not None and e.phase is None and e.signal("says:foreach", "uses:autocast") is None:
            return Finding(
                0.52,
                "The same program does not grow on another version: the cause lies below the program, in "
                "the framework or what it stands on.",
                (t.heard(lone),),
                (t.SNAPSHOT, Missing("the same script on another version", "run it with another torch")),
            )
    if growing is None or e.signal(
        "says:keeps_graph", "says:keeps_outputs", "uses:hooks", "says:python_objects"
    ):
        return Undecided((t.SNAPSHOT, Missing("versions of torch and of the libraries", t.RUN)))
    odd = e.signal("says:objects", "says:only_system", "says:versions")
    if odd is not None and e.signal("uses:cuda_graph") is None and not e.failed:
        return Finding(
            0.58,
            "Growth that depends on a version or a system, or of the framework's own objects, points to the framework.",
            (t.heard(growing), t.heard(odd)),
            (t.SNAPSHOT, Missing("the same script on another version", "run it with another torch")),
        )
    return Undecided((t.SNAPSHOT,))


def _compile(e: Evidence) -> Answer:
    private = e.message.private_pools_bytes if e.message is not None else None
    if e.allocator is not None and e.allocator.private_pools is not None:
        private = e.allocator.private_pools
    part = t.share(private, e.allocated)
    if part >= 0.25:
        return Finding(
            0.82,
            "CUDA graphs hold their memory in private pools that other allocations cannot use. Each new shape or "
            "graph adds one.",
            (Fact(f"{t.size(private)} ({part:.0%}) lie in private pools", "message", private),),
        )
    graphs = e.signal("uses:cuda_graph")
    if (
        graphs is not None
        and graphs.source == "words"
        and (e.signal("says:fails", "says:growing", "says:private_pool") is not None)
    ):
        return Finding(
            0.7,
            "CUDA graphs keep private pools; each recorded shape adds one.",
            (t.heard(graphs),),
            (t.SNAPSHOT,),
        )
    looked = e.signal("says:recompiles")
    if looked is not None and not e.failed and e.signal("says:objects", "says:no_effect") is None:
        return Finding(
            0.52,
            "A compiled program that is not the same each time is compiled, and with CUDA graphs recorded, anew; each "
            "recording keeps a pool of its own.",
            (t.heard(looked),),
            (t.SNAPSHOT,),
        )
    if private is not None:
        return Excluded((Fact(f"only {t.size(private)} lie in private pools", "message", private),))
    return Undecided((t.SNAPSHOT,))


RULES = (
    Rule(
        "oom.eval_accumulation", "eval_accumulation", "evaluation keeps its outputs on the device", "Q3.1",
        "phase, the evaluation loop's source", _eval_accumulation, ("kept-tensors",),
    ),
    Rule(
        "oom.eval_no_nograd", "eval_no_nograd", "evaluation records gradients", "Q3.1",
        "phase, the evaluation loop's source", _eval_no_nograd, ("eval-no-grad",),
    ),
    Rule(
        "oom.autocast_cache", "autocast_cache", "autocast keeps casts of the weights", "Q3.1",
        "phase and autocast state", _autocast_cache, (),
    ),
    Rule(
        "oom.ref_cycle", "ref_cycle", "reference cycles wait for the collector", "Q2.3",
        "memory per step", _ref_cycle, (),
    ),
    Rule(
        "oom.exception_holds", "exception_holds", "a caught exception keeps the failed step alive", "G0.7",
        "number of out-of-memory events, the except block", _exception_holds, (),
    ),
    Rule(
        "oom.third_party_hook", "third_party_hook", "a hook or logger keeps tensors", "Q3.2",
        "survivors in the snapshot", _hook, (),
    ),
    Rule(
        "oom.framework_leak", "framework_leak", "the framework itself leaks", "Q3.3",
        "versions, survivors in the snapshot", _framework, (),
    ),
    Rule(
        "oom.compile_graphs", "compile_graphs", "CUDA graphs hold private pools", "Q3.3",
        "private pools of the allocator", _compile, (),
    ),
)  # fmt: skip
