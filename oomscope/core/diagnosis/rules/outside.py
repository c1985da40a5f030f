"""Memory outside torch's allocator: other processes, limits, drivers, libraries, and shortages in disguise."""

from __future__ import annotations

from oomscope.core.diagnosis.evidence import Evidence, Fact, Missing
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.core.diagnosis.rules import tools as t
from oomscope.units import GIB, MIB

_SMALL_PART = 0.05
"""A request below this part of the free memory is refused by no limit on the card: something beside the card
is exhausted.
"""
_CONSUMER = 13 * GIB
"""Cards up to 12 GB are consumer cards, which cannot be limited by slices, and many of them run under Windows.

A MIG slice of a large card looks as small; then the words say so.
"""
_DATA_CENTRE = 33 * GIB
"""No card with more memory than this is a consumer card: it serves under Linux, where nothing has to be committed."""
_TORCH_KEEPS = Missing("what torch had reserved and allocated at that moment", t.RUN)


def _other_process(e: Evidence) -> Answer:
    if t.is_host_only(e):
        return Excluded((Fact("host memory ran out, not the device", "message"),))
    strangers = [p for p in e.processes if p.rank is None]
    if (
        strangers
        and e.failed
        and (e.oom is None or e.oom.device is None or any(p.gpu == e.oom.device for p in strangers))
    ):
        held = sum(p.bytes for p in strangers)
        if e.capacity and held >= 0.1 * e.capacity:
            names = ", ".join(
                f"{p.name or 'process'} {p.pid or '?'} ({t.size(p.bytes)})" for p in strangers[:3]
            )
            return Finding(
                0.93,
                f"Other processes hold {t.size(held)} of this card. The job itself may be fine.",
                (Fact(names, "NVML", held), t.request_fact(e)),
            )
    a = e.arithmetic
    if a is not None and a.has("foreign_memory"):
        if t.refused(e):
            return Excluded((Fact("what others hold left more free than was asked for", "message", e.free),))
        return _by_arithmetic(e)
    said = e.signal("says:invisible_process")
    if said is not None:
        return Finding(
            0.8,
            "Memory is held that no visible process owns: a process in another container or namespace, or one that "
            "died and is not "
            "reaped yet.",
            (t.heard(said),),
            (t.PROCESSES,),
        )
    if e.oom is not None and e.capacity is not None and e.oom.usable_bytes is not None:
        outside = e.capacity - e.oom.usable_bytes
        return Excluded(
            (Fact(f"only {t.size(outside)} of the card are outside torch's reach", "allocator", outside),)
        )
    if a is not None and a.tags:
        return Excluded((Fact("the numbers of the message leave nothing unexplained", "message"),))
    return Undecided((t.NUMBERS, t.PROCESSES))


def _by_arithmetic(e: Evidence) -> Answer:
    a = e.arithmetic
    assert a is not None and a.other is not None  # noqa: PT018  # the tag says so
    if a.own_other is not None and a.foreign is not None and a.foreign < 0.5 * a.other:
        return Finding(
            0.45,
            "Much of the card is used by this very process, outside torch's allocator: libraries, NCCL, or "
            "another framework.",
            (Fact(f"{t.size(a.own_other)} of this process lie outside torch", "message", a.own_other),),
            (t.PROCESSES,),
        )
    known = a.foreign is not None
    held = a.foreign if a.foreign is not None else a.other
    listed = e.message.other_processes if e.message is not None else ()
    ranks = e.signal("uses:ranks") is not None and e.signal("says:on_gpu0") is not None
    confidence = (0.88 if known else 0.78) - (0.25 if ranks else 0.0)
    return Finding(
        confidence,
        f"{t.size(held)} of the card are used outside this process's allocator. Find out whose they are before "
        "changing the job: a "
        "neighbour, a zombie, another rank of this job, or a viewer.",
        t.facts(
            Fact(f"capacity − free − torch's own = {t.size(a.other)}", "message", a.other),
            *(Fact(f"process {pid} holds {t.size(count)}", "message", count) for pid, count in listed[:3]),
            t.request_fact(e),
        ),
        (t.PROCESSES,),
    )


def _lib_starved(e: Evidence) -> Answer:
    kind = e.message.kind if e.message is not None else None
    nccl = e.signal("says:nccl_oom")
    idle = e.signal("says:low_share_allocated")
    text = (
        "A library that allocates beside torch found nothing left: torch's cache keeps what it has reserved. Leave "
        "room "
        "(set_per_process_memory_fraction, garbage_collection_threshold), or warm the library up before the peak."
    )
    if kind == "nccl_oom" or nccl is not None:
        evidence = t.facts(
            Fact(
                f"NCCL asked for {e.message.nccl_bytes} bytes: the size says nothing about the shortage",
                "message",
            )
            if e.message is not None and e.message.nccl_bytes is not None
            else None,
            Fact(e.message.text, "message") if kind == "nccl_oom" and e.message is not None else None,
            t.heard(nccl) if nccl else None,
            t.heard(idle) if idle else None,
        )
        return Finding(0.88, text, evidence, () if idle else (_TORCH_KEEPS,))
    if kind in ("cublas_alloc", "cudnn_alloc", "cusolver_alloc", "cufft_alloc"):
        assert e.message is not None  # kind comes from it
        return Finding(0.78, text, (Fact(e.message.text, "message"),), (_TORCH_KEEPS, t.PROCESSES))
    said = e.signal("says:library_init")
    helped = e.signal("says:more_gpus_help", "says:cache_helps", "says:library_alloc")
    if kind in ("cublas_maybe_oom", "cudnn_maybe_oom") or said is not None:
        if e.arithmetic is not None and e.arithmetic.tags:
            return Undecided((_TORCH_KEEPS,))
        evidence = t.facts(
            Fact(e.message.text, "message") if e.message is not None else None,
            t.heard(said) if said else None,
            t.heard(helped) if helped else None,
        )
        return Finding(
            0.7 if helped else 0.45,
            text + " The same text also comes from a broken driver or a wrong index earlier in the program.",
            evidence,
            (_TORCH_KEEPS,),
        )
    if e.oom is not None or (e.message is not None and e.message.backend is not None):
        return Excluded((Fact("torch's own allocator reported it", "message"),))
    return Undecided((_TORCH_KEEPS,))


def _masked(e: Evidence) -> Answer:
    said = e.signal("says:masked")
    if (e.message is not None and e.message.kind == "nvml_assert") or said is not None:
        text = e.message.text if e.message is not None else ""
        return Finding(
            0.87,
            "An assertion failed while torch was putting the out-of-memory message together: underneath it is an "
            "ordinary "
            "out-of-memory error, often on a MIG slice.",
            t.facts(Fact(text, "message") if text else None, t.heard(said) if said else None),
            (_TORCH_KEEPS,),
        )
    if e.message is not None and e.message.kind in (
        "cuda_error_oom",
        "cuda_driver_oom",
        "cuda_oom_short",
        "hip_error_oom",
    ):
        if e.oom is not None:
            return Excluded((Fact("torch's allocator reported it as well", "allocator"),))
        return Finding(
            0.4,
            "The driver reports it, not torch's allocator: pinned memory, a CUDA graph, expandable segments, a "
            "context that finds the "
            "card full, or a limit on the address space (ulimit -v).",
            (Fact(e.message.text, "message"),),
            (_TORCH_KEEPS, t.PROCESSES, Missing("the limit on the address space", "ulimit -v")),
        )
    if e.oom is not None or (e.arithmetic is not None and e.arithmetic.tags):
        return Excluded((Fact("the message is torch's ordinary one", "message"),))
    return Undecided((t.NUMBERS,))


def _user_limit(e: Evidence) -> Answer:
    allowed = e.message.allowed_bytes if e.message is not None else None
    lint = e.lint_of("memory-fraction")
    said = e.signal("says:allowed", "uses:memory_fraction")
    if allowed is not None and e.capacity is not None and allowed < 0.98 * e.capacity:
        return Finding(
            0.93,
            f"torch may use {t.size(allowed)} of {t.size(e.capacity)}: set_per_process_memory_fraction() is in force.",
            t.facts(Fact(f"{t.size(allowed)} allowed", "message", allowed), _lint(e), t.request_fact(e)),
            where=lint.where if lint else None,
        )
    if lint is not None and (e.failed and (t.refused(e) or _gap(e))):
        return Finding(
            0.85,
            "The script limits itself to a part of the card.",
            t.facts(_lint(e), t.request_fact(e)),
            where=lint.where,
        )
    if said is not None and said.source == "words":
        return Finding(0.85, "A limit on this process's share of the card is in force.", (t.heard(said),))
    if e.requested is not None and lint is None:
        return Excluded((Fact("no limit stands in the message or the source", "message"),))
    return Undecided((t.NUMBERS, t.SOURCE))


def _lint(e: Evidence) -> Fact | None:
    lint = e.lint_of("memory-fraction")
    return Fact(f"{lint.where.place}: {lint.text}", "source code") if lint else None


def _gap(e: Evidence) -> bool:
    """Free memory on the device, and torch far below the capacity."""
    return e.free is not None and e.requested is not None and e.free >= e.requested


def _host_commit(e: Evidence) -> Answer:
    if e.message is not None and e.message.kind == "host_commit":
        return Finding(
            0.93,
            "Windows could not promise the memory: the paging file is too small. Every process commits its copy of "
            "CUDA's libraries.",
            (Fact(e.message.text, "message"),),
        )
    said = e.signal("says:pagefile")
    if said is not None and e.message is None and e.signal("says:no_effect") is None:
        return Finding(
            0.7,
            "On Windows every device allocation needs as much commit of host memory, which the paging file backs.",
            (t.heard(said),),
            (t.HOST,),
        )
    if not t.refused(e):
        return (
            Excluded((Fact("the device did not refuse free memory", "message"),))
            if e.requested
            else Undecided((t.NUMBERS,))
        )
    windows = e.signal("uses:windows", "uses:wsl") or (
        e.host is not None and (e.host.is_windows or e.host.is_wsl)
    )
    small = t.share(e.requested, e.free) < _SMALL_PART
    if windows:
        return Finding(
            0.78,
            "On Windows and WSL every device allocation needs as much commit of host memory; that ran out, not the "
            "card.",
            (t.request_fact(e),),
            (t.HOST,),
        )
    if small and e.message is not None and e.message.backend == "cuda":
        return Finding(
            0.5 if e.capacity and e.capacity < _CONSUMER and not e.signal("uses:mig") else 0.4,
            "A small request was refused beside much free memory: host memory that could not be promised (Windows), "
            "or a driver fault.",
            (t.request_fact(e),),
            (t.HOST,),
        )
    return Undecided((t.HOST,))


def _limit(e: Evidence) -> Answer:
    if not t.refused(e):
        mig = e.signal("uses:mig")
        if e.requested is None:
            return (
                Undecided((t.NUMBERS, Missing("the size of the slice", "nvidia-smi -L")))
                if mig
                else Undecided((t.NUMBERS,))
            )
        return Excluded((Fact("the device did not have enough free memory", "message", e.free),))
    allowed = e.message.allowed_bytes if e.message is not None else None
    if (allowed is not None and e.capacity and allowed < 0.98 * e.capacity) or e.lint_of("memory-fraction"):
        return Excluded((Fact("a limit of the program itself explains it", "message", allowed),))
    part = t.share(e.requested, e.free)
    # Host memory that could not be promised is a matter of Windows and its cards; a data-centre card has other limits.
    confidence = 0.62 if part >= _SMALL_PART else 0.52 if (e.capacity or 0) >= _DATA_CENTRE else 0.42
    if e.message is not None and e.message.backend == "hip" and (e.requested or 0) <= 64 * MIB:
        confidence = 0.55
    if e.tag("foreign_memory"):
        confidence = min(confidence, 0.5)  # what others held may have come and gone
    if e.signal("uses:windows", "uses:wsl"):
        confidence = 0.4
    return Finding(
        confidence,
        f"{t.size(e.free)} were free and {t.size(e.requested)} were refused: a limit (MIG slice, MPS, cgroup, "
        "driver) or a driver "
        "fault. Neither a smaller batch nor allocator settings are the cure.",
        (t.request_fact(e),),
        (t.HOST, Missing("limits of the device: MIG, MPS, driver log", "nvidia-smi -q; dmesg")),
    )


RULES = (
    Rule(
        "oom.other_process", "other_process", "another process holds the card", "G0.5",
        "processes of the GPU, or the complete message", _other_process, (),
    ),
    Rule(
        "oom.lib_starved", "lib_starved", "torch's cache starves a library", "G0.2",
        "which allocator failed, what torch had reserved", _lib_starved, ("gc-threshold", "empty-cache"),
    ),
    Rule(
        "oom.masked_oom", "masked_oom", "out of memory behind another error", "G0.2",
        "the text of the error", _masked, (),
    ),
    Rule(
        "oom.user_limit", "user_limit", "the program limits itself", "G0.4",
        "the message, the source", _user_limit, (),
    ),
    Rule(
        "oom.host_commit", "host_commit", "host memory cannot be promised", "G0.4",
        "the message, the operating system", _host_commit, (),
    ),
    Rule(
        "oom.limit_or_driver", "limit_or_driver", "free memory was refused: limit or driver", "G0.4",
        "the complete message", _limit, (),
    ),
)  # fmt: skip
