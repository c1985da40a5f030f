"""Memory that grows from step to step: graphs, containers, cycles, exceptions, hooks, frameworks.

And growth that is none.
"""

from __future__ import annotations

from oomscope.core.diagnosis.evidence import Evidence, Fact, LintFact, Where
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.core.diagnosis.rules import tools as t

GRAPH_LINT = ("graph-append", "graph-sum", "retain-graph", "hidden-state")
CONTAINER_LINT = ("container-append",)
_PACE_STEPS = 32
"""So many last steps tell the pace of a job."""


def _no_growth(e: Evidence) -> Excluded | None:
    trend = e.trend
    if trend is not None and trend.kind in ("flat", "plateau"):
        return Excluded(t.facts(t.trend_fact(e)))
    if trend is not None and trend.kind == "sawtooth":
        return Excluded(t.facts(t.trend_fact(e)))
    return None


def _is_growing(e: Evidence) -> bool:
    """Measured growth: from step to step, or from iteration to iteration of a loop without steps."""
    return (e.trend is not None and e.trend.is_leak) or t.piles_up(e)


def _looks_like_graph(e: Evidence) -> bool:
    """Many stacks of forward survive per step: the saved tensors of a graph, not one list of results."""
    g = e.growth
    if g is None:
        return False
    if g.stacks < 3:  # a whole forward may stand on one line; then the source decides
        return {"activation", "forward"} & set(g.categories) != set() and e.lint_of(*GRAPH_LINT) is not None
    # Without a backward in the history nobody can tell saved tensors from other results; then the source
    # decides.
    return bool({"activation", "forward"} & set(g.categories)) or e.lint_of(*GRAPH_LINT) is not None


def _graph(e: Evidence) -> Answer:
    excluded = _no_growth(e)
    if excluded is not None and not (e.rss_trend and e.rss_trend.is_leak):
        return excluded
    lint = e.lint_of(*GRAPH_LINT)
    if _is_growing(e):
        return _graph_measured(e, lint)
    on_host = _graph_on_host(e, lint)
    if on_host is not None:
        return on_host
    said = e.signal("says:keeps_graph")
    growing = e.signal("says:growing")
    if said is not None:
        return Finding(
            0.72 if growing or said.strength >= 0.8 else 0.55,
            "A tensor that still has its graph is kept beyond its step; everything that the graph saved stays with it.",
            t.facts(t.heard(said), t.heard(growing) if growing else None, _lint_fact(lint)),
            (t.SERIES,),
            where=lint.where if lint else None,
        )
    if lint is not None and e.failed:
        return Finding(
            0.5 if e.trend is None else 0.35,
            "The script keeps tensors together with their graph.",
            t.facts(_lint_fact(lint)),
            (t.SERIES, t.SNAPSHOT),
            where=lint.where,
        )
    return Undecided((t.SERIES, t.SNAPSHOT))


def _graph_on_host(e: Evidence, lint: LintFact | None) -> Finding | None:
    """The process's own memory grows, and something keeps graphs; their nodes lie in host memory."""
    host, kept = t.host_growth(e), t.holder(e, graph=True)
    if host is not None and kept is not None:
        return Finding(
            0.92 if lint else 0.88,
            f"The process's own memory grows from step to step: `{kept.path}` keeps tensors together with their graph.",
            t.facts(host, t.holder_fact(kept), _lint_fact(lint), _host_eta(e)),
            where=lint.where if lint else kept.where,
        )
    if e.rss_trend is not None and e.rss_trend.is_leak and lint is not None:
        return Finding(
            0.8,
            "The process's own memory grows from step to step, and the script keeps tensors together with their graph.",
            t.facts(host, _lint_fact(lint)),
            where=lint.where,
        )
    return None


def _host_eta(e: Evidence) -> Fact | None:
    """When the machine's memory is used up at this rate."""
    left = e.host.memory_available if e.host is not None else None
    if e.rss_trend is None or left is None or e.rss_trend.slope <= 0 or e.failed:
        return None
    steps = left / e.rss_trend.slope
    return Fact(
        f"at this rate the machine's free memory lasts about {steps:,.0f} steps", "steps", round(steps)
    )


def _graph_measured(e: Evidence, lint: LintFact | None) -> Answer:
    growth, kept = e.growth, t.holder(e, graph=True)
    graph = _looks_like_graph(e) or kept is not None
    evidence = t.facts(
        t.trend_fact(e),
        t.holder_fact(kept) if kept else None,
        t.growth_fact(growth) if growth else None,
        Fact(
            f"{growth.stacks} different lines of forward left survivors: saved tensors of graphs",
            "snapshot",
            growth.stacks,
        )
        if growth and _looks_like_graph(e)
        else None,
        *(_lint_fact(each) for each in e.lint if each.rule in GRAPH_LINT[:3]),
        *_eta(e),
    )
    if growth is not None and not graph and lint is None:
        return Excluded((*evidence, Fact("the survivors come from one line: no graph", "snapshot")))
    if kept is None and lint is None and not graph and t.holder(e, graph=False) is not None:
        return Excluded((*evidence, Fact("what grows keeps no graph", "holder")))
    where = (
        lint.where if lint else kept.where if kept else (growth.caller or growth.where if growth else None)
    )
    confidence = 0.96 if graph and lint else 0.9 if kept else 0.88 if graph else 0.8 if lint else 0.45
    keeper = ""
    if lint is not None or kept is not None:
        keeper = (
            f" The script keeps them at {lint.where.place}."
            if lint
            else f" `{kept.path if kept else ''}` keeps them."
        )
    return Finding(
        confidence,
        "Each step leaves tensors behind that still hold their autograd graph, and with it the activations saved for "
        "backward." + keeper,
        evidence,
        () if growth or kept else (t.SNAPSHOT,),
        where=where,
    )


def _eta(e: Evidence) -> tuple[Fact, ...]:
    """When the card is full at this rate: steps with their interval, and the time that they take."""
    if e.trend is None or e.capacity is None or e.failed:
        return ()
    level = e.rank.peak_allocated_bytes if e.rank else None
    left, between = e.trend.steps_until(e.capacity, level), e.trend.steps_range(e.capacity, level)
    if left is None or between is None:
        return ()
    text = (
        f"at this rate the card is full in about {left:,.0f} steps ({between[0]:,.0f} to {between[1]:,.0f})"
    )
    return (Fact(text + _duration(e, left), "steps", round(left)),)


def _duration(e: Evidence, steps: float) -> str:
    """What so many steps take, at the pace of the last ones; "" where nobody knows."""
    ends = [row.end_ns for row in (e.rank.steps if e.rank else ())[-_PACE_STEPS:] if row.end_ns is not None]
    if len(ends) < 2 or ends[-1] <= ends[0] or (e.rank is not None and e.rank.simulated):
        return ""
    seconds = steps * (ends[-1] - ends[0]) / (len(ends) - 1) / 1e9
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f", {seconds / length:.0f} {unit}"
    return f", {seconds:.0f} seconds"


def _lint_fact(lint: LintFact | None) -> Fact | None:
    return Fact(f"{lint.where.place}: {lint.text}", "source code") if lint else None


def _container(e: Evidence) -> Answer:
    host, kept = t.host_growth(e), t.holder(e, graph=False)
    lint = e.lint_of(*CONTAINER_LINT)
    if host is not None and kept is not None and not _is_growing(e):
        return Finding(
            0.86,
            f"The process's own memory grows from step to step: `{kept.path}` keeps something of every step.",
            t.facts(host, t.holder_fact(kept), _host_eta(e)),
            where=kept.where,
        )
    excluded = _no_growth(e)
    if excluded is not None:
        return Undecided((t.HOLDER,)) if host is not None else excluded
    growth = e.growth
    if _is_growing(e):
        evidence = t.facts(
            t.trend_fact(e),
            t.holder_fact(kept) if kept else None,
            t.growth_fact(growth) if growth else None,
            _lint_fact(lint),
            *_eta(e),
        )
        if _looks_like_graph(e) or (kept is None and t.holder(e, graph=True) is not None):
            return Excluded(evidence)
        if kept is not None:
            return Finding(
                0.92 if lint or growth else 0.88,
                f"Each step leaves results behind: `{kept.path}` holds them on the device. No graph hangs on them.",
                evidence,
                where=kept.where or (lint.where if lint else None),
            )
        if growth is None and lint is None:
            return Finding(0.4, "Something keeps results of every step.", evidence, (t.SNAPSHOT,))
        if growth is not None and lint is None and growth.where is None and growth.caller is None:
            return Finding(0.4, "Installed code keeps results of every step.", evidence, (t.SOURCE,))
        where: Where | None = lint.where if lint else (growth.where or growth.caller) if growth else None
        return Finding(
            0.9 if growth and lint else 0.82 if growth else 0.78,
            "Each step leaves results behind: a list, a metric or a buffer holds them on the device. No graph hangs "
            "on them.",
            evidence,
            () if growth else (t.SNAPSHOT,),
            where=where,
        )
    said = e.signal("says:keeps_outputs")
    if said is not None and e.phase != "eval":
        return Finding(
            0.65,
            "Results of every step are kept on the device.",
            t.facts(t.heard(said), _lint_fact(lint)),
            (t.SERIES,),
        )
    return Undecided((t.HOLDER,) if host is not None else (t.SERIES, t.SNAPSHOT))


def _plateau(e: Evidence) -> Answer:
    said = e.signal("says:plateau")
    if said is not None and not e.failed:
        return Finding(
            0.85,
            "Memory rose and then stayed: the cache, workspaces and the largest batch so far. This is not a leak; "
            "nothing needs to "
            "be mended.",
            (t.heard(said),),
            fixes=(),
        )
    trends = [trend for trend in (e.trend, e.reserved_trend) if trend is not None]
    if not trends:
        return Undecided((t.SERIES,))
    if any(trend.is_leak for trend in trends) or e.failed:
        return Excluded(t.facts(t.trend_fact(e)))
    if any(trend.kind == "plateau" for trend in trends):
        return Finding(
            0.8,
            "Memory rose and then stayed: the cache, workspaces and the largest batch so far. This is not a leak.",
            t.facts(t.trend_fact(e)),
            fixes=(),
        )
    return Excluded(t.facts(t.trend_fact(e)))


RULES = (
    Rule(
        "oom.graph_accumulation", "graph_accumulation", "autograd graphs pile up", "Q3.2",
        "allocated memory per step, survivors in the snapshot, the source", _graph, ("leak-detach",),
    ),
    Rule(
        "oom.container_accumulation", "container_accumulation", "results pile up", "Q3.2",
        "allocated memory per step, survivors in the snapshot", _container, ("kept-tensors",),
    ),
    Rule(
        "oom.benign_plateau", "benign_plateau", "memory rose and stayed: not a leak", "Q3.4",
        "memory per step", _plateau, (), is_problem=False,
    ),
)  # fmt: skip
