"""Expandable segments, annotated ranges, profiles, damaged rows, and streams that cannot be scanned."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
from made_snapshots import MIB, Allocator, frame, like_torch_2_13, training, wrap

from oomscope.core.snapshot.analysis import DeviceAnalysis, analyse
from oomscope.core.snapshot.categories import Category
from oomscope.core.snapshot.columns import NO_STACK, Frame
from oomscope.core.snapshot.flame import Node, fold, folded_lines
from oomscope.core.snapshot.groups import frame_label
from oomscope.core.snapshot.intern import MAX_LOOKALIKES, Interner, brief, parse_formatted
from oomscope.core.snapshot.moments import moment
from oomscope.core.snapshot.parse import parse_snapshot
from oomscope.core.snapshot.ranges import paired_ranges, uses_compile
from oomscope.core.snapshot.scan import Unscannable, scan
from oomscope.core.snapshot.scanned_rows import ScannedRows
from oomscope.core.snapshot.stack_rules import Origin, stack_facts
from oomscope.errors import SnapshotError, UsageError

GRANULE = 2 * MIB
BASE = 0x7F0000000000


def first(raw: dict[str, Any]) -> DeviceAnalysis:
    return analyse(parse_snapshot(raw))[0]


def test_segments_at_any_row_of_random_maps_and_unmaps() -> None:
    rng = random.Random(3)
    for _ in range(40):
        mapped: set[int] = set()
        rows, states = [], []
        for _ in range(30):
            grow = not mapped or rng.random() < 0.6
            free = [n for n in range(12) if n not in mapped]
            pool = free if grow else sorted(mapped)
            if not pool:
                continue
            start = rng.choice(pool)
            length = 1
            while start + length in pool and rng.random() < 0.5:
                length += 1
            part = set(range(start, start + length))
            mapped = mapped | part if grow else mapped - part
            action = "segment_map" if grow else "segment_unmap"
            rows.append(
                {"action": action, "addr": BASE + start * GRANULE, "size": length * GRANULE, "stream": 0}
            )
            states.append(sorted(mapped))
        segments = [
            {"device": 0, "address": BASE + a * GRANULE, "total_size": (b - a) * GRANULE, "stream": 0,
             "segment_type": "large", "is_expandable": True,
             "blocks": [{"size": (b - a) * GRANULE, "state": "inactive"}]}
            for a, b in runs(states[-1])
        ]  # fmt: skip
        analysis = first({"segments": segments, "device_traces": [rows]})
        for row, state in enumerate(states):
            at = analysis.segments_at(row)
            found = [
                ((a - BASE) // GRANULE, (a + n - BASE) // GRANULE)
                for a, n in zip(at.address, at.size, strict=True)
            ]
            assert found == runs(state)
            assert analysis.reserved.at(row) == len(state) * GRANULE
        assert analysis.segments_at(-1).address.tolist() == []


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Half-open runs of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


def test_ranges_are_paired_and_compile_internals_hidden() -> None:
    def mark(stage: str, name: str, time: int) -> dict[str, Any]:
        return {"stage": stage, "name": name, "device": 0, "time_us": time}

    raw = training(steps=1)
    raw["external_annotations"] = [
        mark("END", "began before", 5), mark("START", "outer", 10), mark("START", "outer", 20),
        mark("END", "outer", 30), mark("END", "outer", 40),
        mark("START", "never ends", 50), mark("START", "pad (dynamo_timed)", 60),
        {"stage": "ODD"}, 7,
    ]  # fmt: skip
    snapshot = parse_snapshot(raw)
    found = [(each.name, each.start_us, each.end_us) for each in paired_ranges(snapshot)]
    assert found == [
        ("began before", None, 5),
        ("outer", 10, 40),
        ("outer", 20, 30),
        ("never ends", 50, None),
    ]
    assert len(paired_ranges(snapshot, with_compile=True)) == 5
    assert uses_compile(snapshot)
    assert not uses_compile(parse_snapshot(training()))
    assert [each.code for each in snapshot.warnings] == ["bad-annotations"]


def test_categories_of_torchs_own_profiler_are_taken_over() -> None:
    raw = training(steps=2)
    for row in raw["device_traces"][0]:
        row["category"] = "gradient" if row["size"] == 8 * MIB else "input"
    analysis = first(raw)
    eight = analysis.lives.size == 8 * MIB
    assert set(analysis.category[eight].tolist()) == {int(Category.GRADIENTS)}
    assert set(analysis.category[~eight].tolist()) == {int(Category.UNKNOWN)}


@pytest.mark.parametrize(
    ("frames", "origin"),
    [
        ([frame("??", 0, "at::cuda::getNewWorkspace()")], Origin.WORKSPACE),
        (
            [frame("??", 0, "c10d::ProcessGroupNCCL::allreduce"), frame("/w/a.py", 1, "forward")],
            Origin.COLLECTIVE,
        ),
        (
            [frame("/e/torch/utils/checkpoint.py", 9, "recompute_fn"), frame("/w/a.py", 1, "forward")],
            Origin.RECOMPUTE,
        ),
        ([frame("/w/optimizer.py", 3, "step")], Origin.OPTIMIZER),
        ([frame("C:\\e\\torch\\autograd\\__init__.py", 3, "_make_grads")], Origin.BACKWARD),
        ([frame("??", 0, "start_thread")], Origin.BACKWARD),
        ([frame("/w/model.py", 3, "__init__")], Origin.MODEL),
        ([frame("/w/data.py", 3, "load")], Origin.OTHER),
        ([], Origin.EMPTY),
    ],
)
def test_origin_of_stacks(frames: list[dict[str, Any]], origin: Origin) -> None:
    interner = Interner()
    interner.stack(frames)
    assert stack_facts(interner.table()).origin.tolist() == [Origin.NONE, origin]


def test_without_a_backward_kept_forwards_are_unknown() -> None:
    memory = Allocator()
    memory.malloc(MIB, "forward")
    memory.free(memory.malloc(4 * MIB, "forward"))
    analysis = first(wrap(memory))
    kinds = {
        size: Category(kind)
        for size, kind in zip(analysis.lives.size.tolist(), analysis.category, strict=True)
    }
    assert kinds == {MIB: Category.UNKNOWN, 4 * MIB: Category.TEMPORARIES}


@pytest.mark.parametrize(("decorated", "expected"), [(False, Category.ACTIVATIONS), (True, Category.UNKNOWN)])
def test_first_forward_that_runs_out_of_memory(decorated: bool, expected: Category) -> None:
    memory = Allocator()
    if decorated:
        memory.stacks["forward"].append(frame("/e/torch/utils/_contextlib.py", 124, "decorate_context"))
    memory.malloc(MIB, "parameters")
    for _ in range(3):
        memory.malloc(8 * MIB, "forward")
    memory.oom(64 * MIB, MIB)
    analysis = first(wrap(memory))
    shares = {share.category: share.bytes for share in analysis.composition(analysis.focus.row)}
    assert shares == {Category.PARAMETERS: MIB, expected: 24 * MIB}


def test_labels() -> None:
    assert frame_label(Frame("/a/b/c.py", 3, "f")) == "b/c.py:3 f"
    assert frame_label(Frame("/e/site-packages/torch/x.py", 3, "f")) == "torch/x.py:3 f"
    cpp = "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)"
    assert frame_label(Frame("??", 0, cpp)) == "backward of Mul (autograd)"
    assert frame_label(Frame("??", 0, "at::_ops::mm::call(at::Tensor const&)")) == "at::_ops::mm::call"
    assert str(Frame("??", 0, "f(int)")) == "??:0 f"


def test_folding_below_three_copies_keeps_them() -> None:
    root = Node("all", bytes=3)
    for number in range(2):
        root.children[f"op{number}"] = Node(f"op{number}", bytes=1, parent=root)
    assert set(fold(root).children) == {"op0", "op1"}
    assert folded_lines(root) == ["all 1", "all;op0 1", "all;op1 1"]


def test_interner_on_odd_input() -> None:
    interner = Interner()
    assert interner.stack(None) == interner.stack("text") == NO_STACK
    assert interner.bad_frames == 1
    assert interner.stack([3, frame("a.py", -1, "f")]) == 0
    assert interner.frames == [Frame("a.py", 0, "f")]
    assert interner.pool(None) == interner.text(None) == -1
    assert interner.formatted_stack(5) == NO_STACK
    shared = [frame("a.py", n, "f") for n in range(MAX_LOOKALIKES + 40)]
    alike = [[*shared[:4], shared[4 + n], *shared[5:]] for n in range(MAX_LOOKALIKES + 5)]
    numbers = [interner.stack(each) for each in alike]
    assert numbers == [interner.stack(list(each)) for each in alike]
    for bad in ("x", 1 << 70):
        with pytest.raises(ValueError, match="stream"):
            interner.stream(bad)
    assert brief(1 << 100) == "an integer of 101 bits"
    assert parse_formatted("nonsense") == ("nonsense", 0, "")
    assert parse_formatted('  File "/a b.py", line 12, in f\n    code') == ("/a b.py", 12, "f")


@pytest.mark.parametrize("settings", [5, {"a": float("inf"), "b": {"c": {"d": 1}}, "e": "x", 3: None}])
def test_settings_are_reduced_to_json(settings: Any) -> None:
    found = parse_snapshot({**training(), "allocator_settings": settings}).settings
    assert found == ({} if settings == 5 else {"a": None, "b": {"c": "<dict>"}, "e": "x", "3": None})


def test_rows_of_differing_keys_and_odd_numbers() -> None:
    raw = like_torch_2_13(training())
    rows = raw["device_traces"][0]
    del rows[1]["frames"], rows[2]["user_metadata"], rows[3]["pool_id"], rows[4]["time_us"]
    rows[5]["size"] = float(rows[5]["size"])
    rows[6]["size"] = None
    raw["external_annotations"] = "none"
    events = parse_snapshot(raw).devices[0].events
    assert events.stack[1] == NO_STACK
    assert events.user_metadata is not None
    assert events.pool is not None
    assert (events.user_metadata[2], events.pool[3], events.time_us[4], events.size[6]) == (-1, -1, 0, 0)
    rows[7]["stream"] = [1]
    with pytest.raises(SnapshotError, match=r"\[7\]: stream"):
        parse_snapshot(raw)
    with pytest.raises(SnapshotError, match="addr is"):
        parse_snapshot({"device_traces": [[{"action": "alloc", "addr": 1.5}]]})


def test_block_addresses_and_states_are_guessed_when_missing() -> None:
    raw = {
        "segments": [
            {"address": 512, "blocks": [{"size": 512, "state": "odd"}, {"size": 1024}], "total_size": 1536}
        ]
    }
    snapshot = parse_snapshot(raw)
    assert snapshot.devices[0].blocks.address.tolist() == [512, 1024]
    assert [each.code for each in snapshot.warnings] == ["unknown-state", "segment-sum"] or len(
        snapshot.warnings
    ) == 1


def test_moments_without_history_or_errors() -> None:
    analysis = first({**training(), "device_traces": [[]]})
    assert moment(analysis, "end").reason == "end"
    for text in ("peak", "oom", "step:0", "event:0"):
        with pytest.raises(UsageError):
            moment(analysis, text)
    memory = Allocator()
    for _ in range(3):
        memory.malloc(MIB, "leak")
    with pytest.raises(UsageError, match="no step boundaries"):
        moment(first(wrap(memory)), "step:0")


# -- streams that cannot be scanned, or only in part -------------------------------------------------


def reference_of(head: bytes) -> int:
    unpickler = pickle._Unpickler(__import__("io").BytesIO(head))  # type: ignore[attr-defined]
    unpickler.load()
    return len(unpickler.memo) - 1


def scanned(raw: Any, protocol: int = 4) -> Any:
    data = pickle.dumps(raw, protocol=protocol)
    found = scan(memoryview(data), reference_of, lambda end: None)
    rest, objects = pickle.loads(found.rest)
    return parse_snapshot(rest, runs=ScannedRows(found, objects))


def many(rows: int = 300) -> dict[str, Any]:
    memory = Allocator()
    for number in range(rows):
        memory.free(memory.malloc(1000 + number * 300, "forward"))
    return wrap(memory)


@pytest.mark.parametrize("value", ["text", 3.5, True, [1], {"a": 1}])
def test_rows_with_unusual_values_come_through_unscanned(value: Any) -> None:
    raw = many()
    for number in (50, 51, 200):
        raw["device_traces"][0][number]["note"] = value
    one, other = scanned(raw), parse_snapshot(raw)
    assert np.array_equal(one.devices[0].events.size, other.devices[0].events.size)


@pytest.mark.parametrize("key", ["size", "addr", "stream"])
def test_rows_with_a_reference_in_place_of_a_number_are_refused(key: str) -> None:
    raw = many()
    for row in raw["device_traces"][0][100:]:
        row[key] = row["action"]
    with pytest.raises(Unscannable, match=key):
        scanned(raw)


def test_rows_with_unknown_actions_are_left_to_the_unpickler() -> None:
    raw = many()
    for row in raw["device_traces"][0][100:]:
        row["action"] = "alloc" if row["action"] == "alloc" else "vanish"
    with pytest.raises(Unscannable, match="unknown action"):
        scanned(raw)


def test_negative_and_wide_numbers_are_decoded() -> None:
    raw = many()
    values = [
        0,
        1,
        255,
        256,
        65535,
        65536,
        (1 << 31) - 1,
        1 << 31,
        1 << 47,
        (1 << 63) - 1,
        -1,
        -128,
        -(1 << 40),
    ]
    for number, row in enumerate(raw["device_traces"][0]):
        row["size"] = values[number % len(values)]
        row["pool_id"] = (number % 300, 0)
    one, other = scanned(raw), parse_snapshot(raw)
    assert one.devices[0].events.size.tolist() == other.devices[0].events.size.tolist()
    pools = [[each.pools[n] for n in each.devices[0].events.pool] for each in (one, other)]
    assert pools[0] == pools[1]


def test_shared_pools_and_missing_contexts_are_decoded() -> None:
    raw = many()
    pool = (0, 5)
    for row in raw["device_traces"][0]:
        row["pool_id"] = pool
        row["compile_context"] = None
        row["frames"] = None
    events = scanned(raw).devices[0].events
    assert set(events.stack.tolist()) == {NO_STACK}
    assert set(events.compile_context.tolist()) == {-1}
    assert len(set(events.pool.tolist())) == 1


def test_an_integer_among_the_rows_is_noticed() -> None:
    raw = many()
    raw["device_traces"][0].insert(3, 99)
    with pytest.raises(Unscannable, match="integer among"):
        scanned(raw)
