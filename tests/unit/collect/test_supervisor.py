"""Collector children: typed states, staleness, restarts, files."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest

from oomscope.collect import child, recorder, registry, supervisor
from oomscope.collect.base import State, Tier
from oomscope.errors import UsageError
from oomscope.plugins import Loaded


def wait_for(check, timeout=60.0):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if check():
            return
        time.sleep(0.02)
    raise AssertionError("nothing happened in time")


def drive(collector, until, timeout=60.0):
    records = []

    def step():
        records.extend(collector.poll())
        return until(records)

    wait_for(step, timeout)
    return records


@pytest.fixture
def started():
    made = []

    def make(*args, **kwargs):
        made.append(supervisor.SupervisedCollector(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_host_collector_in_its_process(started):
    collector = started("host", 0.1)
    collector.watch([os.getpid()])
    records = drive(
        collector,
        lambda rows: any(
            row["k"] == "host" and any(p["pid"] == os.getpid() for p in row["processes"]) for row in rows
        ),
    )
    assert collector.status.state is State.OK
    assert any(row["k"] == "collector" and row["state"] == "ok" for row in records)


def test_a_collector_runs_behind_the_job(started):
    """From before its first import on: its start is what a busy machine feels."""
    code = "import os; print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)); input()"
    collector = started("x", 0.1, command=[sys.executable, "-c", code])
    collector.poll()
    pid = collector._child.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) >= supervisor.NICENESS
    if hasattr(os, "SCHED_BATCH"):
        assert os.sched_getscheduler(pid) == os.SCHED_BATCH


def test_collectors_start_one_after_the_other(tmp_path):
    with recorder.HostRecorder(tmp_path, names=("host", "nvidia"), period_s=0.1) as running:
        first, second = running._collectors
        wait_for(lambda: first._child is not None)
        if first.status.state is State.STARTING:
            assert second._child is None
        wait_for(lambda: second.status.state is not State.STARTING)
        assert first.status.state is State.OK


def test_no_driver_is_unavailable_and_not_tried_again(started, tmp_path):
    # An empty library of that name in front makes the result independent of this machine's drivers.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    collector = started("nvidia", 0.1, environ={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    drive(collector, lambda _: collector.status.state is State.UNAVAILABLE)
    assert collector.status.code == "no_library"
    assert collector.status.restarts == 0
    assert collector.poll() == []


def test_a_hung_driver_is_stale_then_killed(started, machine):
    fake = machine(2)
    collector = started("nvidia", 0.1, environ=fake.environ())
    drive(collector, lambda rows: any(row["k"] == "gpu" for row in rows))
    pid = collector._child.pid
    fake.state.hang = 1
    drive(collector, lambda _: collector.status.state is State.STALE)
    assert str(pid) in collector.status.why
    drive(collector, lambda _: collector.status.restarts == 1)
    fake.state.hang = 0
    drive(collector, lambda _: collector.status.state is State.OK)


def test_a_crashing_driver_is_restarted(started, machine):
    fake = machine(1)
    collector = started("nvidia", 0.1, environ=fake.environ())
    drive(collector, lambda rows: any(row["k"] == "gpu" for row in rows))
    fake.state.crash = 1
    drive(collector, lambda _: collector.status.restarts >= 1)
    assert f"signal {int(signal.SIGSEGV)}" in collector.status.why
    fake.state.crash = 0
    drive(collector, lambda _: collector.status.state is State.OK)


def test_given_up_after_the_restarts(started, monkeypatch):
    now = [0.0]
    collector = started(
        "broken", 1.0, command=[sys.executable, "-c", "raise SystemExit(5)"], clock=lambda: now[0]
    )

    def step():
        collector.poll()
        now[0] += 31.0 if collector._child is None else 0.0
        return collector.status.state is State.FAILED

    wait_for(step)
    assert collector.status.restarts == supervisor.MAX_RESTARTS + 1
    assert "exit code 5" in collector.status.why


def test_garbage_on_the_pipe_is_skipped(started):
    lines = ["garbage", "[1]", '{"k": 5}', '{"k":"gpu","t":1}', '{"k":"tick","t":1}']
    code = f"import time; print({chr(10).join(lines)!r}, flush=True); time.sleep(60)"
    collector = started("x", 0.1, command=[sys.executable, "-c", code])
    records = drive(collector, lambda _: collector.status.state is State.OK)
    assert [row for row in records if row["k"] == "gpu"] == [{"k": "gpu", "t": 1}]


def test_the_child_ends_with_its_parent(started):
    collector = started("host", 0.1)
    drive(collector, lambda rows: any(row["k"] == "host" for row in rows))
    process = collector._child
    collector.close()
    wait_for(lambda: process.poll() is not None)
    assert process.returncode == 0


def test_tiers_keep_their_periods():
    schedule = child.Schedule(1.0, now=0.0)
    due = [schedule.due(float(second)) for second in range(21)]
    assert all(Tier.FAST in tiers for tiers in due)
    assert sum(Tier.MEDIUM in tiers for tiers in due) == 11
    assert sum(Tier.SLOW in tiers for tiers in due) == 3
    schedule.due(1000.0)
    assert schedule.wait_s(1000.0) == pytest.approx(1.0), "missed readings are not made up for"


def test_a_recorder_writes_one_file_per_node(tmp_path, machine):
    fake = machine(2)
    with recorder.HostRecorder(tmp_path, period_s=0.1, environ=fake.environ(), node="nodeA") as running:
        running.watch([os.getpid()])
        wait_for(lambda: running.path.exists() and running.path.read_text().count('"k":"gpu"') >= 2)
        wait_for(lambda: '"k":"host"' in running.path.read_text())
        fake[1].used = 40 << 30
        wait_for(lambda: str(40 << 30) in running.path.read_text())
    assert running.path == tmp_path / "host" / "nodeA.jsonl"
    assert running.path.stat().st_mode & 0o777 == 0o600
    records = recorder.read_host_records(tmp_path)
    assert all(record["node"] == "nodeA" for record in records)
    assert [record["t"] for record in records] == sorted(record["t"] for record in records)
    assert {record["k"] for record in records} >= {"devices", "gpu", "host", "collector"}


def test_unchanged_readings_are_written_every_ten_seconds():
    thinner = recorder.Thinner()
    row = {
        "k": "gpu",
        "uuid": "a",
        "used_bytes": 1 << 30,
        "processes": [{"pid": 1, "used_bytes": 5}],
        "state": "ok",
    }
    second = 10**9
    kept = [thinner.keep({**row, "t": t * second}) for t in range(25)]
    assert sum(kept) == 3
    assert thinner.keep({**row, "t": 25 * second, "used_bytes": 2 << 30})
    assert thinner.keep({**row, "t": 26 * second, "used_bytes": 2 << 30, "state": "lost"})
    assert thinner.keep({"k": "xid", "t": 1})


def test_torn_lines_are_left_out(tmp_path):
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "n.jsonl").write_bytes(b'{"t":2,"k":"gpu"}\n{"t":1,"k":"host"}\nnull\n{"t":3,"k"')
    assert [record["t"] for record in recorder.read_host_records(tmp_path)] == [1, 2]


def test_plugins_join_the_registry(monkeypatch):
    loaded = [
        Loaded(registry.GROUP, "bad", "bad:X", None, "ImportError: no bad"),
        Loaded(registry.GROUP, "nvidia", "other:Thing", None, None),
    ]
    monkeypatch.setattr(registry.plugins, "load", lambda group: loaded)
    entries = {entry.name: entry for entry in registry.entries()}
    assert entries["bad"].error == "ImportError: no bad"
    assert entries["nvidia"].target == registry.BUILT_IN["nvidia"], (
        "a plugin cannot replace a built-in one silently"
    )
    with pytest.raises(UsageError):
        registry.build("nothing")


def test_a_broken_plugin_is_unavailable_in_its_child(capfd):
    assert child.main(["no-such-collector"]) == child.EXIT_UNAVAILABLE
    record = json.loads(capfd.readouterr().out)
    assert (record["state"], record["code"]) == ("unavailable", "plugin")
