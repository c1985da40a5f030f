# ruff: noqa: E501  # texts and tables
import json

import pytest

from oomscope.core.diagnosis import Evidence, diagnose
from oomscope.live.evidence import collect
from oomscope.live.evidence_host import host_fact, outcomes, process_facts, read_host
from oomscope.units import GIB, MIB


def host(t, **more):
    return {"k": "host", "t": t, "mem_total_bytes": 64 * GIB, "mem_available_bytes": 10 * GIB, **more}


def process(pid, rss, shared=0, **more):
    return {"pid": pid, "rss_bytes": rss, "rss_shared_bytes": shared, **more}


def test_nothing_recorded_nothing_said():
    assert host_fact([], {}, {}) is None
    assert host_fact([], {}, {"exit_code": 0}) is None


def test_only_the_host_of_the_judged_rank_counts(tmp_path):
    """Pids of several nodes say nothing about each other."""
    (tmp_path / "host").mkdir()
    for name, t in (("a", 1), ("b-node1", 2), ("a-node2", 3)):
        (tmp_path / "host" / f"{name}.jsonl").write_text(json.dumps(host(t)) + "\n")
    assert [record["t"] for record in read_host(tmp_path)] == [1, 2, 3]
    assert [record["t"] for record in read_host(tmp_path, "b.cluster")] == [2]
    assert [record["t"] for record in read_host(tmp_path, "elsewhere")] == [1, 2, 3]


def test_exit_codes_of_the_job_and_of_its_processes():
    fact = host_fact(
        [{"k": "process_end", "pid": 7, "status": -9}], {7: 3}, {"signal": 9, "first_failing_rank": 3}
    )
    assert fact is not None
    assert fact.exit_codes == ((3, -9),)
    assert host_fact([], {}, {"exit_code": 137}).exit_codes == ((None, 137),)


def test_the_machine_at_its_worst():
    records = [
        host(1, shm_total_bytes=64 * MIB, shm_free_bytes=60 * MIB, cgroup={"path": "/a", "limit_bytes": 8 * GIB, "oom_kills": 2}),
        host(2, mem_available_bytes=GIB, processes=[process(5, GIB, shm_total_bytes=64 * MIB, shm_free_bytes=MIB)],
             cgroup={"path": "/a", "limit_bytes": 8 * GIB, "oom_kills": 3}),
    ]  # fmt: skip
    fact = host_fact(records, {}, {})
    assert (fact.memory_total, fact.memory_available) == (64 * GIB, GIB)
    assert (fact.shm_free, fact.shm_total) == (MIB, 64 * MIB)
    assert (fact.cgroup_limit, fact.cgroup_oom_kills) == (8 * GIB, 1)
    verdict = diagnose(Evidence(host=fact, signals=())).verdict
    assert verdict.rule.cause == "host_cgroup"


def test_another_cgroup_is_no_rise():
    records = [host(1, cgroup={"path": "/a", "oom_kills": 0}), host(2, cgroup={"path": "/b", "oom_kills": 9})]
    assert host_fact(records, {}, {}).cgroup_oom_kills is None


def test_private_memory_of_workers_is_watched():
    def rows(n, **worker):
        return [process(1, 4 * GIB, private_bytes=4 * GIB), process(2, 3 * GIB, **worker)]

    grows = [host(n, processes=rows(n, private_bytes=(1 + n) * GIB)) for n in range(20)]
    assert host_fact(grows, {1: 0}, {}).worker_bytes.is_leak
    # Resident pages of a forked worker are counted in full from its first moment; only private ones show the copying.
    resident = [host(n, processes=rows(n)) for n in range(20)]
    assert host_fact(resident, {1: 0}, {}).worker_bytes is None
    now_and_then = [
        host(n, processes=rows(n, private_bytes=(1 + n) * GIB) if n % 2 else rows(n)) for n in range(20)
    ]
    assert host_fact(now_and_then, {1: 0}, {}).worker_bytes.steps == 8
    alone = [host(n, processes=[process(1, n * GIB, private_bytes=n * GIB)]) for n in range(20)]
    assert host_fact(alone, {1: 0}, {}).worker_bytes is None


def test_processes_of_the_gpus():
    records = [
        {"k": "gpu", "uuid": "GPU-a", "gpu": 3, "processes": [{"pid": 1, "used_bytes": GIB}, {"pid": 9, "used_bytes": 2 * GIB}]},
        {"k": "gpu", "uuid": "GPU-a", "gpu": 3, "processes": [{"pid": 9, "used_bytes": 5 * GIB}, {"pid": 4, "used_bytes": None}]},
        {"k": "gpu", "uuid": "GPU-b", "gpu": 4, "processes": "none"},
        {"k": "gpu", "uuid": 7, "gpu": 4},
    ]  # fmt: skip
    facts = process_facts(records, {1: 0}, {"GPU-a": 0})
    assert [(f.gpu, f.pid, f.bytes, f.rank) for f in facts] == [(0, 9, 5 * GIB, None), (0, 1, GIB, 0)]


@pytest.fixture
def session(tmp_path):
    for number in (1, 2):
        (tmp_path / "attempts" / f"{number:03d}" / "procs").mkdir(parents=True)
    return tmp_path / "attempts"


def write(path, value):
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("reached", "cause"),
    [(8, None), (19, "fix_ineffective")],
)
def test_what_a_fix_saved_against_its_prediction(session, reached, cause):
    write(
        session / "001" / "result.json",
        {"ranks": [{"peak_reserved_bytes": 16 * GIB}, {"peak_reserved_bytes": None}]},
    )
    write(
        session / "001" / "fixes.json",
        {
            "peak_reserved_bytes": 20 * GIB,
            "fixes": [{"id": "ckpt", "predicted": {"peak_reserved_bytes": 8 * GIB}}],
            "plans": [],
        },
    )
    write(session / "002" / "attempt.json", {"fixes": ["ckpt"]})
    write(
        session / "002" / "result.json", {"exit_code": 0, "ranks": [{"peak_reserved_bytes": reached * GIB}]}
    )
    (found,) = outcomes(session / "002")
    assert (found.fix, found.predicted_saving, found.measured_saving) == (
        "ckpt",
        12 * GIB,
        (20 - reached) * GIB,
    )
    verdict = diagnose(collect(session / "002")).verdict
    assert (verdict.rule.cause if verdict else None) == cause


def test_plans_of_several_fixes(session):
    write(session / "001" / "result.json", {"ranks": [{"peak_reserved_bytes": 20 * GIB}]})
    plan = {"fixes": ["ckpt", "amp-bf16"], "predicted": {"peak_reserved_bytes": 5 * GIB}}
    write(session / "001" / "fixes.json", {"fixes": [], "plans": ["x", plan]})
    write(session / "002" / "attempt.json", {"fixes": ["amp-bf16", "ckpt"]})
    write(session / "002" / "result.json", {"ranks": [{"peak_reserved_bytes": 6 * GIB}]})
    assert outcomes(session / "002")[0].predicted_saving == 15 * GIB


@pytest.mark.parametrize("fixes", [{}, {"fixes": "none"}, {"fixes": [{"id": "ckpt", "predicted": None}]}])
def test_without_a_prediction_there_is_no_outcome(session, fixes):
    write(session / "001" / "result.json", {"ranks": [{"peak_reserved_bytes": 20 * GIB}]})
    write(session / "001" / "fixes.json", fixes)
    write(session / "002" / "attempt.json", {"fixes": [{"id": "ckpt"}]})
    write(session / "002" / "result.json", {"ranks": [{"peak_reserved_bytes": 6 * GIB}]})
    assert outcomes(session / "002") == ()
    assert outcomes(session / "001") == ()


def test_files_of_all_nodes_in_order_of_time(session):
    folder = session / "001" / "host"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps(host(3)) + "\n{torn\n[1]\n")
    (folder / "b.jsonl").write_text(json.dumps(host(2)) + "\n")
    assert [record["t"] for record in read_host(session / "001")] == [2, 3]


def test_a_killed_rank_is_host_memory(session):
    folder = session / "001"
    records = [
        {"k": "hello", "version": 1, "pid": 7, "t": 1, "n": 0, "identity": {"rank": 0}},
        {"k": "step", "step": 0, "t": 2, "n": 1},
    ]
    (folder / "procs" / "r00000-h-7.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "host").mkdir()
    cgroup = {"path": "/job", "limit_bytes": 8 * GIB}
    lines = [host(1, cgroup={**cgroup, "oom_kills": 0}), host(9, cgroup={**cgroup, "oom_kills": 1}),
             {"k": "process_end", "t": 9, "pid": 7, "status": -9}]  # fmt: skip
    (folder / "host" / "h.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(folder / "result.json", {"signal": 9, "exit_code": None, "first_failing_rank": 0})
    diagnosis = diagnose(collect(folder))
    assert diagnosis.verdict.rule.cause == "host_cgroup"
    assert next(n for n in diagnosis.flow if n.node == "H").answer == "yes"


KILL = {"k": "oom_kill", "t": 3, "pid": 7, "name": "python", "anon_rss_bytes": 60 * GIB, "scope": "machine"}


def test_the_kernel_log_says_that_a_rank_was_killed():
    fact = host_fact([host(1, processes=[process(7, GIB)]), KILL], {7: 0}, {"signal": 9, "exit_code": 137})
    found = diagnose(Evidence(host=fact)).to_json()
    assert found["failed"]
    assert found["verdicts"][0]["rule"] == "oom.unknown"
    assert "the kernel killed process 7" in found["verdicts"][0]["evidence"][0]["text"]
    assert next(each for each in found["flow"] if each["node"] == "H")["answer"] == "yes"


def test_the_limit_of_a_cgroup_is_named():
    records = [
        host(1, cgroup={"path": "/a", "limit_bytes": 8 * GIB, "oom_kills": 0}),
        {**KILL, "scope": "cgroup"},
    ]
    verdict = diagnose(Evidence(host=host_fact(records, {7: 0}, {"signal": 9}))).verdict
    assert verdict.rule.cause == "host_cgroup"
    assert "8.00 GiB" in verdict.finding.evidence[-1].text


def test_a_bare_sigkill_counts_only_where_memory_was_scarce():
    result = {"signal": 9, "exit_code": 137}
    assert host_fact([host(1)], {}, result).kill is None
    fact = host_fact([host(1, mem_available_bytes=GIB)], {}, result)
    assert "SIGKILL while 1.00 GiB of 64.00 GiB" in fact.kill.text
    assert host_fact([host(1, mem_available_bytes=GIB)], {}, {"exit_code": 1}).kill is None


def test_other_peoples_kills_are_none_of_the_job():
    assert host_fact([host(1), {**KILL, "pid": 8}], {7: 0}, {"exit_code": 1}).kill is None


def test_records_of_wrong_types_are_no_evidence():
    strange = [
        {**KILL, "anon_rss_bytes": "much"},
        {**KILL, "t": None},
        host(1, cgroup={"path": "/a", "oom_kills": "x"}),
    ]
    assert host_fact([*strange, host(2)], {7: 0}, {"signal": 9}).kill is None


def test_a_kill_that_nothing_explains_is_neither_a_memory_problem_nor_a_clean_run():
    found = diagnose(Evidence(host=host_fact([host(1)], {7: 0}, {"signal": 9}))).to_json()
    assert not found["failed"]
    assert found["verdicts"] == []
    assert "SIGKILL" in found["advice"][0]
