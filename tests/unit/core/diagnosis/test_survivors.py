"""What was alive and what outlived its step, on synthetic snapshots."""

from collections.abc import Callable, Sequence

import pytest

from oomscope.core.allocator.model import AllocatorOutOfMemory
from oomscope.core.allocator.synth import SyntheticProcess, frame, to_bytes
from oomscope.core.diagnosis.survivors import StepEnds, growth, live_groups, loop_iterations
from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.store.snapshots import load_snapshot
from oomscope.units import GIB, MIB

Stack = Sequence[dict]
MODULE = frame("/x/site-packages/torch/nn/modules/module.py", 1, "_call_impl")
NO_STEPS = StepEnds((), ())


def user(line: int, function: str = "main", file: str = "/u/train.py") -> dict:
    return frame(file, line, function)


def forward(line: int, *outer: dict) -> list[dict]:
    return [user(line, "forward", "/u/model.py"), MODULE, *outer]


@pytest.fixture
def analysed(tmp_path) -> Callable[[SyntheticProcess], DeviceAnalysis]:
    def run(process: SyntheticProcess) -> DeviceAnalysis:
        path = tmp_path / "s.pickle"
        path.write_bytes(to_bytes(process.snapshot()))
        snapshot = load_snapshot(path)
        return DeviceAnalysis(snapshot, snapshot.devices[0])

    return run


def no_source(file: str, line: int) -> str:
    return ""


def fill(process: SyntheticProcess, body: Callable[[int], None]) -> None:
    """Call `body` for rising numbers until memory runs out."""
    for number in range(10000):
        try:
            body(number)
        except AllocatorOutOfMemory:
            return


def test_a_loop_shows_by_its_lines_going_back(analysed):
    process = SyntheticProcess(capacity=GIB)
    gpu = process.device

    def body(number: int) -> None:
        batch = gpu.malloc(2 * MIB, [user(10)])
        for line in (31, 32):
            gpu.malloc(4 * MIB, forward(line, user(11)))
        gpu.free(batch)

    fill(process, body)
    analysis = analysed(process)
    iterations = loop_iterations(analysis)
    assert iterations is not None
    assert iterations.max() > 50
    found = growth(analysis, NO_STEPS, no_source)
    assert found is not None
    assert (found.unit, found.stacks, found.births[0]) == ("iteration", 2, 2)
    assert {"forward", "activation"} & set(found.categories)
    assert found.caller is not None
    assert found.caller.line == 11


def test_one_deep_forward_is_no_loop(analysed):
    process = SyntheticProcess(capacity=GIB)
    gpu = process.device
    gpu.malloc(2 * MIB, [user(10)])

    def body(number: int) -> None:
        for line in (31, 32, 33):
            gpu.malloc(4 * MIB, forward(line, user(11)))

    fill(process, body)
    analysis = analysed(process)
    assert loop_iterations(analysis) is None
    assert growth(analysis, NO_STEPS, no_source) is None


def test_what_came_before_the_last_backward_does_not_count(analysed):
    process = SyntheticProcess(capacity=GIB)
    gpu = process.device
    for _ in range(20):
        gpu.malloc(MIB, [user(10)])
        gpu.malloc(MIB, forward(31, user(11)))
    gpu.malloc(MIB, [])  # autograd's threads have no frames
    fill(process, lambda number: gpu.malloc(8 * MIB, forward(31, user(12))))
    assert loop_iterations(analysed(process)) is None


def test_results_that_are_freed_do_not_pile_up(analysed):
    process = SyntheticProcess(capacity=GIB)
    gpu = process.device
    for _ in range(30):
        batch = gpu.malloc(2 * MIB, [user(10)])
        out = gpu.malloc(4 * MIB, forward(31, user(11)))
        gpu.free(out)
        gpu.free(batch)
    with pytest.raises(AllocatorOutOfMemory):
        gpu.malloc(2 * GIB, forward(31, user(11)))
    assert growth(analysed(process), NO_STEPS, no_source) is None


def test_steps_seen_by_the_agent_go_first(analysed):
    process = SyntheticProcess(capacity=GIB)
    gpu = process.device
    ends: list[int] = []

    def body(number: int) -> None:
        gpu.malloc(16 * MIB, [user(14), user(40, "<module>")])
        ends.append(process.now_us())

    fill(process, body)
    found = growth(analysed(process), StepEnds(tuple(range(len(ends))), tuple(ends)), no_source)
    assert found is not None
    assert (found.unit, found.stacks) == ("step", 1)
    assert found.births == tuple(range(2, len(ends)))
    assert found.per_step_bytes == 16 * MIB


def test_the_line_of_the_loop_under_a_main_function(analysed):
    process = SyntheticProcess(capacity=GIB)
    gpu = process.device
    ends: list[int] = []
    entry = user(40, "<module>")

    def body(number: int) -> None:
        for line in (31, 32, 33):
            gpu.malloc(4 * MIB, forward(line, user(14), entry))
        gpu.malloc(4 * MIB, [user(15), entry])
        ends.append(process.now_us())

    fill(process, body)
    found = growth(
        analysed(process), StepEnds(tuple(range(len(ends))), tuple(ends)), lambda f, n: f"line {n}"
    )
    assert found is not None
    assert found.caller is not None
    assert (found.caller.line, found.caller.source) == (14, "line 14")


def test_stacks_without_any_line_of_the_user(analysed):
    process = SyntheticProcess(capacity=GIB)
    gpu = process.device
    ends: list[int] = []

    def body(number: int) -> None:
        gpu.malloc(16 * MIB, [frame("/x/site-packages/lib/hook.py", 3, "hook")])
        ends.append(process.now_us())

    fill(process, body)
    found = growth(analysed(process), StepEnds(tuple(range(len(ends))), tuple(ends)), no_source)
    assert found is not None
    assert (found.where, found.caller) == (None, None)


def test_chains_that_share_nothing(analysed):
    process = SyntheticProcess(capacity=GIB)
    gpu = process.device
    ends: list[int] = []

    def body(number: int) -> None:
        gpu.malloc(16 * MIB, [user(3, "one", "/u/a.py")])
        gpu.malloc(16 * MIB, [user(4, "two", "/u/b.py")])
        ends.append(process.now_us())

    fill(process, body)
    found = growth(analysed(process), StepEnds(tuple(range(len(ends))), tuple(ends)), no_source)
    assert found is not None
    assert found.caller is not None
    assert found.caller.file in ("/u/a.py", "/u/b.py")


def test_checkpoints_are_recognised_by_their_stack_or_their_line(analysed):
    process = SyntheticProcess()
    gpu = process.device
    gpu.malloc(8 * MIB, [frame("/x/site-packages/torch/serialization.py", 9, "load"), user(3)])
    gpu.malloc(4 * MIB, [frame("/x/site-packages/torch/utils/_pytree.py", 9, "tree_map"), user(4)])
    gpu.malloc(2 * MIB, [user(5)])
    gpu.malloc(MIB, [])
    sources = {4: "state = torch.load(path)", 5: "x = torch.zeros(n)"}
    groups = live_groups(analysed(process), lambda file, line: sources.get(line, ""))
    by_line = {g.where.line if g.where else None: g.category for g in groups}
    assert by_line[3] == "loaded"
    assert by_line[4] == "loaded"
    assert by_line[5] != "loaded"
    assert None in by_line
    assert groups[0].bytes == 8 * MIB


def test_too_few_allocations_are_no_loop(analysed):
    process = SyntheticProcess()
    process.device.malloc(MIB, [user(3)])
    assert loop_iterations(analysed(process)) is None
