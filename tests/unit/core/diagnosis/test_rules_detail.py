# texts and tables
"""The finer answers of the rules: how sure, why not, and what is missing."""

import dataclasses

import pytest

from oomscope.core.diagnosis.engine import diagnose
from oomscope.core.diagnosis.evidence import (
    AllocatorFact,
    Evidence,
    FixOutcome,
    HostFact,
    LiveGroup,
    ProcessFact,
    RankFact,
    Signal,
    Where,
)
from oomscope.core.diagnosis.message import Frame
from oomscope.core.diagnosis.model import LIKELY, Excluded, Finding, Undecided
from oomscope.core.diagnosis.rules import by_id
from oomscope.core.series.trend import Trend
from oomscope.units import GIB

from .test_rules import (
    FRAGMENTED,
    FREE,
    FULL,
    VARIED,
    flat,
    given,
    group,
    growth,
    leak,
    lint,
    message,
    model,
    numbers,
    oom,
    rows,
    said,
    session,
)

KILLED = given(message("host_kill"))
SAW = Trend("sawtooth", 1, 0, 2, 0.1, 40, GIB, GIB, 8)
MAJOR = numbers(2, 24, 0.5, 16, 6)
MINOR = numbers(0.5, 24, 0.2, 21, 1)
WARNING = dataclasses.replace(FULL, is_warning=True)
LOADED = LiveGroup(4 * GIB, 8, "loaded", Where("t.py", 3, "main", "torch.load(p)"), None, GIB)

CASES: list[tuple[str, Evidence, str]] = [
    # nothing failed
    *(
        (cause, Evidence(), "no")
        for cause in ("capacity_activations", "optimizer_state_lazy", "capacity_static", "longest_batch")
    ),
    ("fragmentation", Evidence(), "unknown"),
    ("fragmentation", Evidence(oom=None, rank=RankFact(0), allocator=dataclasses.replace(FRAGMENTED)), "no"),
    ("fragmentation", session(oom=oom(requested_bytes=None)), "unknown"),
    # host failures are not the device's
    *(
        (cause, KILLED, "no")
        for cause in (
            "capacity_activations",
            "optimizer_state_lazy",
            "capacity_static",
            "longest_batch",
            "other_process",
            "giant_transient",
            "load_duplicate",
        )
    ),
    ("host_cgroup", session(), "no"),
    ("host_shm", given(FULL), "no"),
    (
        "host_shm",
        Evidence(
            host=HostFact(shm_total=GIB, shm_free=GIB // 100),
            message=message("host_kill"),
            messages=(message("host_kill"),),
        ),
        "yes",
    ),
    ("host_per_rank_load", given(message("host_kill"), signals=said("uses:ranks", "phase:load")), "yes"),
    ("host_per_rank_load", session(), "no"),
    ("host_dataloader_cow", Evidence(signals=said("says:python_objects", "uses:workers")), "yes"),
    ("host_dataloader_cow", session(), "no"),
    ("host_offload", Evidence(lint=lint("zero-grad")), "no"),
    ("host_offload", Evidence(), "unknown"),
    ("host_offload", Evidence(signals=said("uses:offload", "uses:wsl")), "yes"),
    ("host_offload", session(), "no"),
    ("host_cgroup", Evidence(signals=said("uses:scheduler", "says:host")), "yes"),
    ("host_cgroup", given(message("host_kill")), "unknown"),
    # capacity
    ("capacity_activations", session(trend=SAW), "no"),
    ("capacity_activations", session(allocator=FRAGMENTED, model=model()), "no"),
    ("capacity_activations", given(numbers(0.02, 47, 0.01, 2, 0)), "no"),
    ("capacity_activations", session("save", model=model()), "no"),
    ("capacity_activations", session(model=model(), oom=oom(requested_bytes=8 * GIB)), "yes"),
    (
        "capacity_activations",
        session(
            growth=dataclasses.replace(growth(6, "forward"), unit="iteration", bytes=12 * GIB), model=model()
        ),
        "no",
    ),
    ("capacity_activations", given(FULL, signals=said("says:late")), "yes"),
    ("capacity_activations", given(FULL, signals=said("says:growing")), "unknown"),
    ("capacity_activations", given(numbers(0.5, 24, 0.1, 18, 4)), "no"),
    ("capacity_activations", given(message("cuda_error_oom")), "unknown"),
    ("capacity_activations", given(FULL, signals=said("phase:forward")), "yes"),
    ("capacity_activations", given(FREE), "no"),
    ("optimizer_state_lazy", given(FULL), "unknown"),
    (
        "optimizer_state_lazy",
        session(
            "forward", 1, model=model(4, 4, 8), oom=oom("forward", 1), rank=RankFact(0, steps=VARIED[:1])
        ),
        "yes",
    ),
    (
        "optimizer_state_lazy",
        session("forward", 1, model=model(1, 1, 2), rank=RankFact(0, steps=VARIED[:1])),
        "no",
    ),
    ("optimizer_state_lazy", session("optimizer", 3), "no"),
    (
        "optimizer_state_lazy",
        session(
            "optimizer",
            0,
            signals=said("op:foreach"),
            oom=oom("optimizer", 0, frames=(Frame("a.py", 1, "_multi_tensor_adam"),)),
        ),
        "no",
    ),
    (
        "optimizer_state_lazy",
        session("optimizer", 0, oom=oom("optimizer", 0, frames=(Frame("a.py", 1, "_init_group"),))),
        "yes",
    ),
    ("optimizer_state_lazy", given(FULL, signals=said("phase:optimizer", "says:first")), "yes"),
    ("optimizer_state_lazy", given(numbers(0.5, 24, 0.1, 14, 8), signals=said("phase:optimizer")), "no"),
    ("capacity_static", session("init", 0), "yes"),
    ("capacity_static", given(FULL, signals=said("phase:init")), "weak"),
    ("capacity_static", given(numbers(0.02, 47, 0.01, 2, 0), signals=said("phase:init")), "no"),
    ("capacity_static", session("init", 0, signals=said("uses:fsdp")), "unknown"),
    ("capacity_static", session("optimizer", 2, model=model()), "no"),
    ("capacity_static", session("forward", allocator=FRAGMENTED), "no"),
    ("longest_batch", given(FULL, signals=said("says:varied_inputs")), "yes"),
    ("longest_batch", given(FULL, signals=said("says:late")), "yes"),
    ("longest_batch", given(FULL), "unknown"),
    (
        "longest_batch",
        given(
            message(tried_bytes=GIB, capacity_bytes=24 * GIB, this_process_bytes=23.9 * GIB),
            signals=said("says:late"),
        ),
        "yes",
    ),
    (
        "longest_batch",
        Evidence(
            oom=oom(), rank=RankFact(0, steps=tuple(dataclasses.replace(r, input_numel=100) for r in VARIED))
        ),
        "no",
    ),
    ("longest_batch", session(allocator=FRAGMENTED), "no"),
    ("optimizer_state_lazy", Evidence(signals=said("says:second")), "yes"),
    ("optimizer_state_lazy", given(FULL, signals=said("says:second")), "yes"),
    ("optimizer_state_lazy", given(FULL, signals=said("says:second", "says:growing")), "unknown"),
    ("allocator_spurious", Evidence(signals=said("says:spurious")), "yes"),
    ("host_shm", Evidence(signals=said("says:shm")), "yes"),
    ("ref_cycle", session(trend=flat()), "no"),
    ("capacity_activations", given(numbers(1, 24, 3, 10.8, 0.2, this_process_bytes=12 * GIB)), "no"),
    (
        "capacity_activations",
        session(oom=oom(reserved_bytes=int(23.5 * GIB), allocated_bytes=int(22.5 * GIB)), model=model()),
        "yes",
    ),
    ("capacity_activations", given(numbers(2, 24, 0.2, 19.5, 1.5)), "unknown"),
    ("capacity_activations", given(numbers(7, 24, 0.1, 22.5, 0.2)), "weak"),
    # packing
    (
        "fragmentation",
        session(
            allocator=dataclasses.replace(
                FRAGMENTED, what_ifs=(dataclasses.replace(FRAGMENTED.what_ifs[0], fits=False),)
            )
        ),
        "no",
    ),
    (
        "fragmentation",
        session(
            allocator=dataclasses.replace(
                FRAGMENTED, largest_usable=None, exact=False, pins=(group(2, "pin"),)
            )
        ),
        "yes",
    ),
    ("fragmentation", session(allocator=dataclasses.replace(FRAGMENTED, reserved=18 * GIB + 1)), "weak"),
    ("fragmentation", session(allocator=FRAGMENTED, trend=leak()), "weak"),
    ("fragmentation", session("eval", allocator=FRAGMENTED, model=model()), "weak"),
    ("fragmentation", session("eval", allocator=FRAGMENTED, lint=lint("eval-no-grad", "evaluate")), "weak"),
    ("fragmentation", session("eval", oom=oom("eval", reserved_bytes=24 * GIB), model=model()), "weak"),
    ("fragmentation", session("eval", allocator=FRAGMENTED, model=model(8, 8, 5)), "yes"),
    ("fragmentation", session(oom=oom(reserved_bytes=24 * GIB, device_free_bytes=0)), "weak"),
    ("fragmentation", session(oom=oom(allocated_bytes=14 * GIB, reserved_bytes=22 * GIB)), "yes"),
    ("fragmentation", given(MAJOR), "yes"),
    ("fragmentation", given(MINOR), "weak"),
    ("fragmentation", given(MAJOR, signals=said("phase:save")), "weak"),
    ("fragmentation", given(FREE), "no"),
    ("fragmentation", given(numbers(1, 24, 1, 16, 6)), "no"),
    ("fragmentation", Evidence(signals=said("says:low_share_allocated", "uses:dynamic_shapes")), "yes"),
    ("fragmentation", Evidence(signals=said("says:low_share_allocated")), "unknown"),
    ("stream_held", Evidence(signals=said("says:record_stream")), "yes"),
    ("stream_held", Evidence(signals=said("says:reserved_stays", "uses:fsdp")), "yes"),
    ("stream_held", Evidence(signals=said("says:reserved_stays")), "unknown"),
    ("allocator_spurious", Evidence(signals=said("uses:mem_pool", "says:fails")), "yes"),
    ("allocator_spurious", Evidence(signals=said("uses:mem_pool")), "unknown"),
    # growth
    ("graph_accumulation", session(trend=leak(), growth=growth(1, "other")), "no"),
    ("graph_accumulation", session(trend=leak()), "weak"),
    ("graph_accumulation", session(trend=leak(), lint=lint("graph-append")), "yes"),
    (
        "graph_accumulation",
        session(trend=leak(), growth=growth(1, "forward"), lint=lint("hidden-state")),
        "yes",
    ),
    ("graph_accumulation", Evidence(trend=flat(), rss_trend=leak(), lint=lint("graph-append")), "yes"),
    ("graph_accumulation", Evidence(signals=said("says:keeps_graph")), "yes"),
    ("graph_accumulation", session(lint=lint("graph-append")), "yes"),
    ("graph_accumulation", session(trend=SAW), "no"),
    (
        "graph_accumulation",
        session(growth=dataclasses.replace(growth(6, "forward"), unit="iteration", bytes=12 * GIB)),
        "yes",
    ),
    ("container_accumulation", session(trend=flat()), "no"),
    ("container_accumulation", session(trend=leak()), "weak"),
    ("container_accumulation", Evidence(signals=said("says:keeps_outputs")), "yes"),
    ("benign_plateau", session(trend=flat()), "no"),
    ("benign_plateau", Evidence(trend=flat()), "no"),
    ("benign_plateau", Evidence(), "unknown"),
    # what lasts
    ("eval_accumulation", Evidence(signals=said("phase:eval", "uses:autocast")), "unknown"),
    ("eval_accumulation", Evidence(signals=said("phase:eval", "says:growing", "says:rate")), "yes"),
    ("eval_accumulation", Evidence(signals=said("phase:eval", "says:growing")), "unknown"),
    ("eval_accumulation", Evidence(), "unknown"),
    ("eval_no_nograd", Evidence(signals=said("says:no_nograd")), "yes"),
    ("eval_no_nograd", session("eval", model=model()), "yes"),
    ("eval_no_nograd", session("eval", oom=oom("eval", records_gradients=True), model=model(4, 4, 6)), "yes"),
    (
        "eval_no_nograd",
        session("eval", oom=oom("eval", records_gradients=True), model=model(6, 6, 8)),
        "unknown",
    ),
    ("eval_no_nograd", session("eval"), "unknown"),
    ("eval_no_nograd", Evidence(), "unknown"),
    ("autocast_cache", session("forward"), "no"),
    ("autocast_cache", Evidence(signals=said("says:cast_cache")), "yes"),
    ("autocast_cache", session("eval", signals=said("uses:autocast"), model=model(16, 0, 0)), "yes"),
    ("autocast_cache", session("eval", signals=said("uses:autocast"), live=(group(16, "parameter"),)), "yes"),
    ("autocast_cache", session("eval", signals=said("uses:autocast"), model=model(4, 0, 0)), "yes"),
    ("autocast_cache", Evidence(), "unknown"),
    ("ref_cycle", session(lint=lint("self-cycle"), live=(group(20, "other"),)), "yes"),
    ("ref_cycle", session(lint=lint("self-cycle")), "yes"),
    ("ref_cycle", Evidence(signals=said("says:cycle")), "yes"),
    ("ref_cycle", Evidence(), "unknown"),
    ("exception_holds", Evidence(signals=said("says:retry")), "yes"),
    ("exception_holds", Evidence(), "unknown"),
    ("exception_holds", session(oom=oom(count=3)), "yes"),
    ("third_party_hook", Evidence(signals=said("uses:hooks", "says:growing")), "yes"),
    ("framework_leak", Evidence(signals=said("says:growing", "says:objects")), "yes"),
    ("framework_leak", Evidence(signals=said("says:growing", "says:keeps_graph")), "unknown"),
    ("framework_leak", Evidence(signals=said("says:growing")), "unknown"),
    ("compile_graphs", Evidence(signals=said("uses:cuda_graph", "says:fails")), "yes"),
    ("compile_graphs", session(allocator=AllocatorFact(private_pools=10 * GIB)), "yes"),
    ("compile_graphs", session(allocator=AllocatorFact(private_pools=0)), "no"),
    ("compile_graphs", Evidence(), "unknown"),
    # outside
    ("other_process", session(processes=(ProcessFact(0, 9, 8 * GIB, "python"),)), "yes"),
    ("other_process", session(processes=(ProcessFact(0, 9, GIB // 8),)), "no"),
    ("other_process", session(processes=(ProcessFact(3, 9, 8 * GIB),)), "no"),
    ("other_process", session(oom=oom(device_free_bytes=None)), "unknown"),
    ("other_process", given(numbers(0.02, 47, 0.015, 2.5, 0.0, this_process_bytes=46 * GIB)), "weak"),
    (
        "other_process",
        given(numbers(0.02, 47, 0.015, 2.5, 0.0), signals=said("uses:ranks", "says:on_gpu0")),
        "yes",
    ),
    ("other_process", Evidence(signals=said("says:invisible_process")), "yes"),
    ("other_process", given(FULL), "no"),
    ("other_process", given(message("cuda_error_oom")), "unknown"),
    ("lib_starved", Evidence(signals=said("says:nccl_oom", "says:low_share_allocated")), "yes"),
    ("lib_starved", given(message("cublas_alloc")), "yes"),
    ("lib_starved", given(message("cublas_maybe_oom")), "weak"),
    ("lib_starved", given(message("cublas_maybe_oom"), signals=said("says:more_gpus_help")), "yes"),
    ("lib_starved", given(FULL, signals=said("says:library_init")), "unknown"),
    ("lib_starved", given(FULL), "no"),
    ("lib_starved", Evidence(), "unknown"),
    ("masked_oom", Evidence(signals=said("says:masked")), "yes"),
    ("masked_oom", given(message("cuda_driver_oom")), "weak"),
    ("masked_oom", session(message=message("cuda_error_oom"), messages=(message("cuda_error_oom"),)), "no"),
    ("masked_oom", given(FULL), "no"),
    ("masked_oom", Evidence(), "unknown"),
    ("user_limit", given(FREE, lint=lint("memory-fraction")), "yes"),
    ("user_limit", Evidence(signals=said("says:allowed")), "yes"),
    ("user_limit", given(FULL, lint=lint("memory-fraction")), "unknown"),
    ("user_limit", given(FULL), "no"),
    ("host_commit", given(FREE, signals=said("uses:windows")), "yes"),
    ("host_commit", given(numbers(0.02, 24, 12, 10.8, 0.1)), "weak"),
    ("host_commit", given(FULL), "no"),
    ("host_commit", given(FREE), "unknown"),
    ("host_commit", Evidence(), "unknown"),
    ("limit_or_driver", Evidence(signals=said("uses:mig")), "unknown"),
    ("limit_or_driver", Evidence(), "unknown"),
    ("limit_or_driver", given(FREE, lint=lint("memory-fraction")), "no"),
    ("limit_or_driver", given(numbers(1, 47, 12, 6, 0.1)), "yes"),
    ("other_process", given(numbers(1, 47, 12, 6, 0.1)), "no"),
    ("limit_or_driver", given(numbers(0.02, 24, 12, 10.8, 0.1)), "weak"),
    ("limit_or_driver", given(dataclasses.replace(numbers(0.002, 24, 12, 10.8, 0.1), backend="hip")), "yes"),
    ("limit_or_driver", given(FREE, signals=said("uses:wsl")), "weak"),
    # short peaks
    ("giant_transient", given(message("cuda_oom_1eb")), "no"),
    ("giant_transient", given(numbers(30, 24, 12, 10, 0.1)), "yes"),
    ("giant_transient", given(numbers(30, 24, 12, 10, 0.1), signals=said("op:conv")), "yes"),
    ("giant_transient", given(FREE), "no"),
    ("giant_transient", given(numbers(9, 24, 4, 8, 11)), "weak"),
    ("giant_transient", given(numbers(9, 24, 1, 13, 0.5), signals=said("phase:save")), "no"),
    ("giant_transient", session(oom=oom(requested_bytes=8 * GIB), model=model()), "yes"),
    ("giant_transient", session(oom=oom(requested_bytes=GIB), live=(group(9, "other", 9),)), "yes"),
    ("giant_transient", Evidence(signals=said("says:logits")), "yes"),
    ("giant_transient", Evidence(), "unknown"),
    ("optimizer_transient", session("optimizer", 3), "yes"),
    ("optimizer_transient", session("forward", 3), "no"),
    ("optimizer_transient", Evidence(signals=said("says:foreach")), "yes"),
    ("optimizer_transient", Evidence(signals=said("phase:optimizer", "says:not_first")), "yes"),
    ("optimizer_transient", Evidence(signals=said("phase:optimizer")), "unknown"),
    (
        "optimizer_transient",
        given(FULL, signals=said("phase:optimizer", "op:init_state", source="traceback")),
        "no",
    ),
    ("cudnn_workspace", Evidence(signals=said("uses:cudnn_benchmark")), "yes"),
    ("cudnn_workspace", Evidence(signals=said("says:start_peak")), "yes"),
    (
        "cudnn_workspace",
        session(oom=None, signals=said("uses:cudnn_benchmark", source="source code")),
        "unknown",
    ),
    ("cudnn_workspace", Evidence(), "unknown"),
    (
        "cudnn_workspace",
        session(
            oom=oom(frames=(Frame("conv.py", 1, "_conv_forward"),)),
            signals=said("phase:forward"),
            composition=(("workspaces", 8 * GIB),),
        ),
        "yes",
    ),
    ("nosync_grads", Evidence(signals=said("says:no_sync", "uses:fsdp")), "yes"),
    ("nosync_grads", Evidence(signals=(Signal("says:no_sync", "accumulating", "words"),)), "unknown"),
    ("ddp_buckets", Evidence(signals=said("says:buckets")), "yes"),
    ("ddp_buckets", session(), "no"),
    ("ddp_buckets", Evidence(), "unknown"),
    ("absurd_size", Evidence(), "unknown"),
    ("absurd_size", given(numbers(3000, 24, 1, 1, 1)), "yes"),
    # phases
    ("ckpt_full_gather", given(FULL), "unknown"),
    ("ckpt_full_gather", given(WARNING, signals=said("op:clone")), "yes"),
    ("ckpt_full_gather", Evidence(signals=said("phase:save", "says:host")), "unknown"),
    ("ckpt_full_gather", given(FULL, signals=said("phase:save"), lint=lint("full-state-dict")), "yes"),
    ("ckpt_full_gather", given(FULL, signals=said("phase:save", "uses:ranks")), "yes"),
    ("ckpt_full_gather", given(FULL, signals=said("phase:save")), "yes"),
    ("load_duplicate", session("forward", 0, model=model(), live=(LOADED,)), "yes"),
    (
        "load_duplicate",
        session(
            "forward",
            0,
            model=model(),
            live=(dataclasses.replace(LOADED, bytes=GIB),),
            lint=lint("load-device"),
        ),
        "yes",
    ),
    ("load_duplicate", given(FULL, signals=said("phase:resume", "uses:ranks", "says:only_multi")), "no"),
    ("load_duplicate", given(FULL, signals=said("phase:load", "says:duplicate")), "yes"),
    ("load_duplicate", given(FULL, signals=said("phase:load")), "unknown"),
    ("load_duplicate", given(FULL, signals=said("phase:resume")), "yes"),
    ("load_on_cuda0", given(FULL, signals=said("uses:ranks", "phase:load"), lint=lint("load-device")), "yes"),
    ("load_on_cuda0", given(FULL, ranks=(RankFact(0),)), "no"),
    ("load_on_cuda0", Evidence(), "unknown"),
    ("load_on_cuda0", Evidence(signals=said("uses:ranks", "says:on_gpu0", "phase:load")), "yes"),
    ("load_on_cuda0", Evidence(signals=said("uses:ranks", "says:on_gpu0")), "unknown"),
    (
        "init_before_shard",
        given(numbers(0.02, 47, 0.01, 2, 0), signals=said("phase:init", "uses:fsdp")),
        "no",
    ),
    ("init_before_shard", given(FULL, signals=said("phase:init")), "unknown"),
    ("init_before_shard", Evidence(signals=said("phase:load", "uses:zero", "says:host")), "no"),
    # ranks
    ("ctx_on_cuda0", given(FULL, signals=said("uses:ranks"), lint=lint("no-set-device")), "yes"),
    ("ctx_on_cuda0", Evidence(signals=said("uses:ranks", "says:on_gpu0")), "yes"),
    ("ctx_on_cuda0", Evidence(signals=said("uses:ranks", "says:on_gpu0", "uses:dataparallel")), "no"),
    ("ctx_on_cuda0", given(FULL, ranks=(RankFact(0),)), "no"),
    ("ctx_on_cuda0", given(FULL, processes=(ProcessFact(0, 7, 4 * GIB, rank=1),)), "yes"),
    ("ctx_on_cuda0", Evidence(), "unknown"),
    ("dataparallel_gather", Evidence(signals=said("uses:dataparallel")), "yes"),
    ("dataparallel_gather", Evidence(signals=said("says:gpu0_heavy")), "yes"),
    ("dataparallel_gather", given(FULL, signals=said("uses:dataparallel", source="traceback")), "yes"),
    ("dataparallel_gather", Evidence(), "unknown"),
    # fixes
    (
        "fix_ineffective",
        Evidence(torch_version="2.9.1", signals=said("env:PYTORCH_ALLOC_CONF", "off:expandable")),
        "yes",
    ),
    ("fix_ineffective", Evidence(outcomes=(FixOutcome("ckpt", 4 * GIB, 0),)), "yes"),
    ("fix_ineffective", Evidence(signals=said("says:no_effect", "uses:checkpointing")), "yes"),
    ("fix_ineffective", Evidence(signals=said("says:no_effect", "uses:fsdp")), "unknown"),
    ("fix_ineffective", Evidence(signals=said("says:no_effect")), "unknown"),
    ("fix_ineffective", given(FULL, signals=said("says:no_effect", "uses:autocast")), "weak"),
    ("fix_ineffective", Evidence(), "unknown"),
    ("shard_ineffective", session(signals=said("uses:fsdp"), model=model()), "no"),
    ("shard_ineffective", session(signals=said("uses:fsdp"), model=model(1, 1, 2)), "yes"),
    ("shard_ineffective", session(), "no"),
    ("shard_ineffective", Evidence(), "unknown"),
]


@pytest.mark.parametrize(
    ("cause", "evidence", "expected"), CASES, ids=[f"{n}-{c[0]}-{c[2]}" for n, c in enumerate(CASES)]
)
def test_the_answer(cause, evidence, expected):
    rule = by_id(cause)
    assert rule is not None
    answer = rule.test(evidence)
    if isinstance(answer, Finding):
        got = "yes" if answer.confidence >= LIKELY else "weak"
        assert answer.explanation
    else:
        got = "no" if isinstance(answer, Excluded) else "unknown"
        assert isinstance(answer, (Excluded, Undecided))
    assert got == expected, answer


def test_activations_with_less_than_half_are_likely():
    answer = by_id("capacity_activations").test(session(model=model(6, 6, 1)))
    assert answer.confidence == 0.75


def test_the_line_of_the_holder_is_named():
    answer = by_id("graph_accumulation").test(
        session(trend=leak(), growth=growth(12, "activation"), lint=lint("graph-append"))
    )
    assert answer.where.line == 61
    answer = by_id("container_accumulation").test(session(trend=leak(), growth=growth(1, "other")))
    assert answer.where.line == 61


def test_a_group_without_a_line():
    nowhere = LiveGroup(20 * GIB, 3, "activation", None, None, GIB)
    answer = by_id("capacity_activations").test(session(model=model(), live=(nowhere,)))
    assert answer.where is None
    assert any("20.00 GiB alive in 3" in f.text for f in answer.evidence)


def test_a_request_that_packing_would_serve_is_no_fragmentation_when_the_job_needs_more_anyway():
    fragmented = session(allocator=FRAGMENTED, model=model(), live=(group(12), group(2, "parameter")))
    assert diagnose(fragmented).verdict.rule.cause == "fragmentation"
    beyond = dataclasses.replace(fragmented, packed_need_bytes=30 * GIB)
    best = diagnose(beyond).verdict
    assert best.rule.cause == "capacity_activations"
    assert any("30.00 GiB even with expandable segments" in fact.text for fact in best.finding.evidence)
    enough = dataclasses.replace(fragmented, packed_need_bytes=23 * GIB)
    assert diagnose(enough).verdict.rule.cause == "fragmentation"


def test_in_the_first_step_fragmentation_is_less_sure_until_the_rest_of_it_was_simulated():
    rule = by_id("fragmentation")
    first = session(step=0, allocator=FRAGMENTED)
    unsure = rule.test(first)
    assert unsure.confidence == 0.7
    assert [gap.what for gap in unsure.missing] == ["what the rest of the first step needs"]
    assert rule.test(dataclasses.replace(first, packed_need_bytes=20 * GIB)).confidence > 0.9


def test_the_first_step_without_optimizer_state_does_not_hide_that_peaks_follow_the_batch():
    # The first batch is the largest of those that passed, yet its step needs least: Adam's state is not there.
    steps = rows((500, 3), (340, 11), (200, 8), (300, 10), (320, 10.5), (310, 10.2))
    rank = RankFact(rank=0, steps=steps)
    answer = by_id("longest_batch").test(session(step=6, rank=rank, ranks=(rank,), oom=oom(step=6)))
    assert isinstance(answer, Finding)
    assert answer.confidence > 0.9


def test_buckets_come_first_when_one_copy_of_the_gradients_decides_whether_the_whole_job_fits():
    held = {"signals": said("uses:ddp"), "lint": lint("ddp-buckets"), "model": model(4, 4, 8, ddp=True)}
    ddp = session("backward", **held)
    rule = by_id("ddp_buckets")
    assert rule.test(dataclasses.replace(ddp, packed_need_bytes=26 * GIB)).confidence > 0.9
    too_much = rule.test(dataclasses.replace(ddp, packed_need_bytes=29 * GIB))
    assert not isinstance(too_much, Finding) or too_much.confidence < 0.6
    small = session("backward", **{**held, "model": model(1, 1, 2, ddp=True)})
    answer = rule.test(dataclasses.replace(small, packed_need_bytes=int(24.5 * GIB)))
    assert not isinstance(answer, Finding) or answer.confidence < 0.6


@pytest.mark.parametrize(
    ("figures", "packing"),
    [
        (numbers(0.5, 15.78, 0.0014, 15.0, 0.01), "no packing would have"),
        (numbers(0.002, 15.78, 0.0014, 14.56, 0.18), "next to nothing"),
    ],
)
def test_the_explanation_of_a_full_card_agrees_with_its_arithmetic(figures, packing):
    assert packing in by_id("capacity_activations").test(given(figures)).explanation
