"""The end of a log, and the list of sessions."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import recorded_sessions as recorded

from oomscope.protocol.records import encode
from oomscope.store.session import Session
from oomscope.views import logs, sessions
from oomscope.views.session import SessionModel


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_text("".join(f"line {n}\n" for n in range(10_000)))
    lines, cut = logs.tail(path, size=100)
    assert cut
    assert lines[-1] == "line 9999"
    assert all(line.startswith("line ") for line in lines)


def test_progress_bar_shows_its_last_state(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(b"10%\r50%\r100%\ndone\r\n\xff\xfe\n")
    lines, cut = logs.tail(path)
    assert not cut
    assert lines[:2] == ["100%", "done"]


def test_streams_of_the_newest_attempt_come_first(tmp_path: Path) -> None:
    session = recorded.finished(tmp_path)
    (session.path / "attempts/002/logs/rank0").mkdir()
    (session.path / "attempts/002/logs/rank0/stdout.log").write_text("")
    names = [stream.name for stream in logs.streams(session.path)]
    assert names[0] == "attempt 2 · rank0/stdout.log"
    assert "attempt 1 · rank0/stderr.log" in names
    assert names[-1] == "supervisor.jsonl"


def test_session_rows(tmp_path: Path) -> None:
    recorded.finished(tmp_path)
    rows = sessions.table(tmp_path).rows
    assert [(row.script, row.attempts, row.verdict, row.state) for row in rows] == [
        ("activations_too_big.py", 2, "oom.capacity_activations", "done")
    ]
    assert rows[0].matches("done ACTIV")
    assert not rows[0].matches("done leak")


def test_age() -> None:
    assert [sessions.age(s) for s in (5, 90, 7200, 3 * 86400)] == ["5 s", "2 min", "2 h", "3 d"]


def test_model_keeps_the_cause_when_the_rerun_has_none(tmp_path: Path) -> None:
    session = recorded.finished(tmp_path)
    (session.path / "attempts/002/findings.json").write_text('{"verdicts": [], "flow": []}')
    frame = SessionModel(Session.open(session.path)).poll()
    assert frame.diagnosis is not None
    assert frame.diagnosis_attempt == 1
    assert frame.diagnosis.verdict is not None
    assert frame.composition is not None
    assert frame.alert is not None
    assert frame.alert.text == "attempt 2 (ckpt): simulated peak 14.7 of 39.4 GiB, predicted 14.6"


def test_model_survives_a_folder_that_grows(tmp_path: Path) -> None:
    session = recorded.starting(tmp_path)
    model = SessionModel(session)
    assert model.poll().ranks == ()
    writer = recorded.Writer(session.attempts()[0], 0, 99)
    recorded.hello(writer, 0, t=recorded.NOW_NS, world=1, gpu=None, capacity=None, simulated=False)
    writer.close()
    assert [row.rank for row in model.poll().ranks] == [0]


KINDS = (
    "hello", "rank", "reading", "step", "phase", "phase_peak", "oom", "exception", "bye", "peak", "fix", "model", "gap",
)  # fmt: skip
FIELDS = (
    "rank", "step", "phase", "identity", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "capacity_bytes",
    "loss", "low_allocated_bytes", "device_free_bytes", "device_total_bytes", "retries", "rss_bytes", "peak_rss_bytes",
    "gpu_name", "type", "message", "is_oom", "composition", "modules", "simulated", "host", "pid", "start_time",
    "world_size",
)  # fmt: skip
VALUES = (
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats() | st.text(max_size=6)
    | st.lists(st.integers(), max_size=2) | st.dictionaries(st.sampled_from(FIELDS), st.integers(), max_size=2)
)  # fmt: skip
RECORDS = st.lists(
    st.fixed_dictionaries({"k": st.sampled_from(KINDS), "t": st.integers(0, 2**62)}).flatmap(
        lambda head: st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8).map(
            lambda rest: {**rest, **head}
        )
    ),
    max_size=12,
)


@given(RECORDS, RECORDS)
@settings(max_examples=60, deadline=None)
def test_any_records_can_be_shown(records: list[dict[str, Any]], supervised: list[dict[str, Any]]) -> None:
    """What a broken or newer agent wrote must not take the viewer down."""
    with tempfile.TemporaryDirectory() as folder:
        session = recorded.starting(Path(folder))
        path = session.attempts()[0].procs / "r00000-node-a-1.jsonl"
        path.write_bytes(b"".join(encode({"rank": 0, **record}) for record in records) + b'{"torn')
        for record in supervised:
            session.append_supervisor(record)
        frame = SessionModel(session).poll()
        for row in frame.ranks:
            assert isinstance(row.sentence(), str)
