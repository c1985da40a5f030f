"""Host memory: copies per rank, loader workers, offloaded state, /dev/shm, and limits of cgroups and schedulers."""

from __future__ import annotations

from oomscope.core.diagnosis.evidence import KILLED_CODES, Evidence, Fact, Missing
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.core.diagnosis.rules import tools as t

_KILLED = ("host_kill", "elastic_sigkill", "kernel_oom", "host_maybe_kill")
_LIMITED = ("cgroup_oom", "slurm_oom")
_RANKS_RSS = Missing("host memory of each rank while it loads", t.RUN)


def _not_host(e: Evidence) -> Excluded | None:
    """Excludes host causes where a device's allocator reported the failure."""
    if e.oom is not None:
        return Excluded((Fact("the device's allocator reported it", "allocator"),))
    if e.message is not None and e.message.backend is not None:
        return Excluded((Fact("the device's allocator reported it", "message"),))
    return None


def _kind(e: Evidence) -> str | None:
    return e.message.kind if e.message is not None else None


def _is_host(e: Evidence) -> bool:
    return t.is_host_only(e) or e.signal("says:host") is not None or _killed_codes(e)


def _killed_codes(e: Evidence) -> bool:
    return e.host is not None and any(code in KILLED_CODES for _, code in e.host.exit_codes)


def _per_rank(e: Evidence) -> Answer:
    excluded = _not_host(e)
    if excluded is not None:
        return excluded
    rss = [r.peak_rss_bytes for r in e.ranks if r.peak_rss_bytes]
    total = e.host.memory_total if e.host is not None else None
    before_steps = all(not r.steps for r in e.ranks)
    if len(rss) >= 2 and total and sum(rss) >= 0.8 * total and before_steps:
        return Finding(
            0.9,
            f"{len(rss)} ranks together used {t.size(sum(rss))} of {t.size(total)} before the first step: each loads "
            "its own copy of the "
            "weights. Load on the meta device, memory-map the file, or load on rank 0 and broadcast.",
            (Fact(f"peaks of the ranks: {t.size(min(rss))} to {t.size(max(rss))}", "ranks", sum(rss)),),
        )
    several = e.signal("uses:ranks")
    loads = e.phase in ("load", "init") or e.signal("phase:load") is not None
    offload = e.signal("uses:offload")
    if _is_host(e) and several is not None and loads and offload is None:
        return Finding(
            0.75,
            "Every rank loads its own copy of the weights into host memory.",
            t.facts(t.heard(several), Fact(f"phase {e.phase}", "phase")),
            (_RANKS_RSS, t.HOST),
        )
    each = e.signal("says:host_each")
    if each is not None and offload is None and e.signal("uses:workers") is None and not e.failed:
        return Finding(
            0.55,
            "Memory that each process has for itself adds up: every rank loads its own copy of the weights into host "
            "memory.",
            (t.heard(each),),
            (_RANKS_RSS, t.HOST),
        )
    return Undecided((_RANKS_RSS, t.HOST))


def _workers(e: Evidence) -> Answer:
    excluded = _not_host(e)
    if excluded is not None:
        return excluded
    trend = e.host.worker_bytes if e.host is not None else None
    if trend is not None and trend.is_leak:
        flat = e.rss_trend is None or not e.rss_trend.is_leak
        return Finding(
            0.88 if flat else 0.6,
            "The loader workers' own memory grows while the trainer's does not: reading Python objects changes their "
            "reference counts, "
            "and each worker ends up with its own copy of the data set. Keep it in numpy arrays or one bytes object.",
            (Fact(f"workers grow by {t.size(trend.slope)} per reading", "host", round(trend.slope)),),
        )
    objects, workers = e.signal("says:python_objects"), e.signal("uses:workers")
    per_epoch = e.signal("says:per_epoch")
    if objects is not None and workers is None and per_epoch is None and not _other_story(e):
        return Finding(
            0.55,
            "A data set of Python objects is copied page by page in the workers that read it.",
            (t.heard(objects),),
            (Missing("memory of the workers over time", t.RUN), t.HOST),
        )
    if objects is not None and (workers is not None or per_epoch is not None):
        return Finding(
            0.75,
            "Reading a Python list or dictionary in forked workers copies it page by page.",
            t.facts(t.heard(objects), t.heard(workers) if workers else None),
            (Missing("memory of the workers over time", t.RUN),),
        )
    return Undecided((Missing("memory of the workers over time", t.RUN),))


def _other_story(e: Evidence) -> bool:
    """Something else is said that explains growth by itself: a phase, kept tensors, cycles, a framework."""
    told = (
        "says:keeps_graph",
        "says:keeps_outputs",
        "says:cycle",
        "says:objects",
        "uses:compile",
        "uses:hooks",
    )
    return e.phase is not None or e.failed or e.signal(*told) is not None


def _offload(e: Evidence) -> Answer:
    excluded = _not_host(e)
    if excluded is not None:
        return excluded
    offload = e.signal("uses:offload")
    more, pinned = e.signal("says:host_needs_more"), e.signal("says:pinned")
    if offload is None and more is not None:
        return Finding(
            0.58,
            "More host memory is needed than the machine has; estimates of that size are those of offloaded state, "
            "12 to 16 bytes per parameter.",
            (t.heard(more),),
            (t.SOURCE, t.HOST),
        )
    if pinned is not None and e.signal("uses:workers") is None:
        return Finding(
            0.6,
            "It works without pinned memory: offloaded state is pinned, and pinned memory has limits of its own.",
            (t.heard(pinned),),
            (t.SOURCE, t.HOST),
        )
    if (offload is not None and _is_host(e)) or (offload is not None and e.signal("uses:wsl") is not None):
        return Finding(
            0.78,
            "State that is offloaded needs 12 to 16 bytes of host memory per parameter, much of it pinned, and "
            "pinned memory has limits "
            "of its own.",
            (t.heard(offload),),
            (t.HOST,),
        )
    return (
        Undecided((t.SOURCE, t.HOST))
        if _is_host(e)
        else Excluded((Fact("nothing is offloaded", "source code"),))
        if e.lint
        else Undecided((t.SOURCE,))
    )


def _shm(e: Evidence) -> Answer:
    if _kind(e) == "shm":
        assert e.message is not None  # _kind says so
        size = e.host.shm_total if e.host is not None else None
        return Finding(
            0.93,
            "/dev/shm is full: loader workers hand their batches over through it. Raise it (docker --shm-size), use "
            "fewer workers, or "
            "smaller batches in flight." + (f" It is {t.size(size)} here." if size else ""),
            (Fact(e.message.text, "message"),),
        )
    if e.host is not None and e.host.shm_total and e.host.shm_free is not None:
        if e.host.shm_free < 0.02 * e.host.shm_total and e.failed:
            return Finding(
                0.7,
                "/dev/shm is full.",
                (Fact(f"{t.size(e.host.shm_free)} of /dev/shm free", "host", e.host.shm_free),),
            )
        return Excluded((Fact(f"{t.size(e.host.shm_free)} of /dev/shm were free", "host", e.host.shm_free),))
    said = e.signal("says:shm")
    if said is not None and _not_host(e) is None:
        return Finding(
            0.7, "Loader workers hand their batches over through /dev/shm.", (t.heard(said),), (t.HOST,)
        )
    return _not_host(e) or Undecided((Missing("free space of /dev/shm", "df /dev/shm"),))


def _cgroup(e: Evidence) -> Answer:
    if _kind(e) in _LIMITED:
        assert e.message is not None  # _kind says so
        return Finding(
            0.93,
            "The limit of the container or the scheduler was hit, while the machine itself may have had memory left. "
            "Ask for more, or "
            "use less per process.",
            (Fact(e.message.text, "message"),),
            (t.HOST,),
        )
    h = e.host
    if e.host_kill is not None and h is not None and h.kill_scope == "cgroup":
        limit = f"the limit is {t.size(h.cgroup_limit)}" if h.cgroup_limit else ""
        return Finding(
            0.93,
            "The kernel killed a process of this job because the limit of its cgroup was reached.",
            t.facts(e.host_kill, Fact(limit, "cgroup", h.cgroup_limit) if limit else None),
        )
    if h is not None and h.cgroup_oom_kills:
        return Finding(
            0.92,
            "The kernel killed a process of this cgroup because its limit was reached.",
            (Fact(f"{h.cgroup_oom_kills} kills, limit {t.size(h.cgroup_limit)}", "cgroup", h.cgroup_limit),),
        )
    excluded = _not_host(e)
    if excluded is not None:
        return excluded
    scheduler = e.signal("uses:scheduler")
    killed = _kind(e) in _KILLED or _is_host(e)
    if scheduler is not None and killed:
        return Finding(
            0.72, "A limit of the scheduler or the container was hit.", (t.heard(scheduler),), (t.HOST,)
        )
    return Undecided((t.HOST,))


RULES = (
    Rule(
        "host.host_per_rank_load", "host_per_rank_load", "every rank loads its own copy", "H.1",
        "host memory of each rank", _per_rank, (),
    ),
    Rule(
        "host.host_dataloader_cow", "host_dataloader_cow", "loader workers copy the data set", "H.2",
        "memory of the workers over time", _workers, (),
    ),
    Rule(
        "host.host_shm", "host_shm", "/dev/shm is full", "H.3",
        "the message, size of /dev/shm", _shm, (),
    ),
    Rule(
        "host.host_cgroup", "host_cgroup", "a memory limit of the container or scheduler", "H.4",
        "the message, the cgroup", _cgroup, (),
    ),
    Rule(
        "host.host_offload", "host_offload", "offloaded state fills host memory", "H.5",
        "the source, host memory", _offload, (),
    ),
)  # fmt: skip
