"""Growth with the variable that holds it, on the device and on the host."""

from dataclasses import replace

from oomscope.core.diagnosis import Evidence, diagnose
from oomscope.core.diagnosis.evidence import GrowthGroup, HolderFact, HostFact, RankFact, StepRow, Where
from oomscope.core.diagnosis.rules import tools
from oomscope.core.lint.additions import additions
from oomscope.core.series.trend import judge
from oomscope.units import GIB, MIB

LEAK = judge(list(range(30)), [GIB + n * 10 * MIB for n in range(30)])
FLAT = judge(list(range(30)), [GIB] * 30)
HERE = Where("train.py", 7, "train", "kept.append(x)")


def holder(**fields: object) -> HolderFact:
    plain = HolderFact(
        "kept", "local of train", "list", "4x4 float32 tensor on cuda", 30, 1.0, 10 * MIB, False, HERE
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def best(evidence: Evidence):
    found = diagnose(evidence).verdict
    assert found is not None
    return found


def test_on_the_device_the_container_is_named_with_its_line():
    found = best(Evidence(rank=RankFact(0), trend=LEAK, holders=(holder(),)))
    assert found.rule.cause == "container_accumulation"
    assert found.finding.where == HERE
    assert "`kept`" in found.finding.explanation
    assert any(fact.source == "holder" for fact in found.finding.evidence)


def test_a_holder_of_graphs_outweighs_survivors_of_one_line():
    growth = GrowthGroup(300 * MIB, 30, 10.0 * MIB, tuple(range(3, 30)), None, None, 1)
    graph = holder(
        path="total", owner="Tensor", item="autograd graph", bytes_per_step=0, per_step=12.0, has_graph=True
    )
    found = best(Evidence(rank=RankFact(0), trend=LEAK, growth=growth, holders=(graph,)))
    assert found.rule.cause == "graph_accumulation"
    assert "12 nodes per step" in " ".join(fact.text for fact in found.finding.evidence)


def test_what_is_too_small_to_be_the_growth_is_no_holder():
    small = holder(path="history", item="float", bytes_per_step=24)
    found = best(Evidence(rank=RankFact(0), trend=LEAK, holders=(small,)))
    assert found.rule.cause == "unknown"
    assert best(Evidence(rank=RankFact(0), trend=LEAK, holders=(small, holder()))).finding.where == HERE


def test_host_memory_with_its_holder():
    host = Evidence(
        rank=RankFact(0), rss_trend=LEAK, holders=(holder(),), host=HostFact(memory_available=10 * GIB)
    )
    found = best(host)
    assert found.rule.cause == "container_accumulation"
    assert "process's own memory" in found.finding.explanation
    assert "lasts about 1,024 steps" in " ".join(fact.text for fact in found.finding.evidence)
    graph = best(replace(host, trend=FLAT, holders=(holder(has_graph=True),)))
    assert graph.rule.cause == "graph_accumulation"
    assert graph.finding.where == HERE


def test_host_memory_without_a_holder_is_told_with_the_captures_that_decide():
    found = diagnose(Evidence(rank=RankFact(0), rss_trend=LEAK, finished=True))
    assert found.verdict is not None
    assert found.verdict.rule.cause == "unknown"
    assert found.verdict.finding.missing == (tools.HOLDER, tools.NATIVE)
    assert "Host memory grows" in found.verdict.finding.explanation
    answers = {node.node: node.answer for node in found.flow}
    assert (answers["Q3"], answers["H"]) == ("yes", "yes")


def test_a_healthy_process_that_creeps_has_no_finding():
    few = judge(list(range(9)), [GIB + n * 10 * MIB for n in range(9)])
    slow = judge(list(range(30)), [GIB + n * MIB // 4 for n in range(30)])
    for trend in (few, slow):
        assert diagnose(Evidence(rank=RankFact(0), rss_trend=trend, finished=True)).verdicts == ()


SOURCE = """
def setup(self):
    self.cache = {}
    self.cache["x"] = 0

def run(self, losses):
    for batch in loader:
        self.cache[batch.id] = batch
        losses += [batch]
        total = total + batch.loss
        seen.add(batch)
    losses.append(1)
"""


def test_lines_that_add_come_with_those_in_loops_first():
    def lines(path: str) -> list[int]:
        return [finding.line for finding in additions(SOURCE, path)]

    assert lines("self.cache") == [8, 4]
    assert lines("trainer.cache[3]") == [8, 4]
    assert lines("losses") == [9, 12]
    assert lines("total") == [10]
    assert lines("hook: seen") == [11]
    assert lines("nothing") == []
    assert lines("a b") == []
    assert additions("def (", "x") == []


def test_the_time_until_the_card_is_full_has_a_range_and_a_duration():
    rows = tuple(StepRow(n, low=GIB + n * 10 * MIB, end_ns=n * 2_000_000_000) for n in range(30))
    rank = RankFact(0, capacity_bytes=8 * GIB, peak_allocated_bytes=2 * GIB, steps=rows)
    noisy = judge(list(range(30)), [GIB + n * 10 * MIB + (n * 7 % 5) * MIB for n in range(30)])
    found = best(Evidence(rank=rank, trend=noisy, holders=(holder(),)))
    said = next(fact.text for fact in found.finding.evidence if "full in about" in fact.text)
    assert said.endswith("20 minutes")
    simulated = best(Evidence(rank=replace(rank, simulated=True), trend=noisy, holders=(holder(),)))
    assert not any("minutes" in fact.text for fact in simulated.finding.evidence)
