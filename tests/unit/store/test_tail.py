import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.errors import SessionError
from oomscope.store.files import LineWriter, read_json, write_json
from oomscope.store.tail import FolderTail, Tail, read_attempt, read_records


def line(**fields):
    return json.dumps({"t": 1, "n": 0, **fields}).encode() + b"\n"


@given(st.lists(st.integers(0, 10**6), max_size=30), st.data())
def test_records_arrive_once_and_in_order_however_the_file_grows(tmp_path_factory, values, data):
    path = tmp_path_factory.mktemp("tail") / "r00000-h-1.jsonl"
    content = b"".join(line(k="step", step=value) for value in values)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    tail = Tail(path)
    assert tail.poll() == []
    seen = []
    for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        with open(path, "ab") as stream:
            stream.write(content[begin:end])
        seen += [record["step"] for record in tail.poll()]
    assert seen == values
    assert tail.bad_lines == 0


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_rubbish_is_counted_and_never_raises(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("tail") / "r00000-h-1.jsonl"
    path.write_bytes(line(k="step", step=1) + b"\n".join(parts) + b"\n" + line(k="step", step=2))
    records = [record["step"] for record in read_records(path) if record["k"] == "step" and "step" in record]
    assert records[0] == 1
    assert records[-1] == 2


def test_a_torn_last_line_is_kept_for_later(tmp_path):
    path = tmp_path / "r00000-h-1.jsonl"
    whole = line(k="step", step=5)
    path.write_bytes(whole[:10])
    tail = Tail(path)
    assert tail.poll() == []
    with open(path, "ab") as stream:
        stream.write(whole[10:])
    assert [record["step"] for record in tail.poll()] == [5]


def test_a_line_torn_by_a_kill_costs_only_itself(tmp_path):
    path = tmp_path / "r00000-h-1.jsonl"
    path.write_bytes(line(k="step", step=1) + line(k="step", step=2)[:12] + b"\n" + line(k="step", step=3))
    tail = Tail(path)
    assert [record["step"] for record in tail.poll()] == [1, 3]
    assert tail.bad_lines == 1


def test_an_endless_line_is_given_up(tmp_path):
    path = tmp_path / "r00000-h-1.jsonl"
    path.write_bytes(b"x" * (2 << 20))
    tail = Tail(path)
    assert tail.drain() == []
    with open(path, "ab") as stream:
        stream.write(b"\n" + line(k="step", step=3))
    assert [record["step"] for record in tail.drain()] == [3]


def test_gaps_are_added_up(tmp_path):
    path = tmp_path / "r00000-h-1.jsonl"
    path.write_bytes(line(k="gap", lost=3) + line(k="gap", lost=4) + line(k="gap", lost="many"))
    tail = Tail(path)
    tail.poll()
    assert tail.lost == 7


def test_a_newer_writer_is_refused_with_a_hint(tmp_path):
    path = tmp_path / "r00000-h-1.jsonl"
    path.write_bytes(line(k="hello", version=99))
    with pytest.raises(SessionError, match=r"newer oomscope.*99") as caught:
        read_records(path)
    assert "upgrade" in caught.value.hint


def test_unknown_kinds_and_fields_pass(tmp_path):
    path = tmp_path / "r00000-h-1.jsonl"
    path.write_bytes(line(k="from the future", x={"y": 1}))
    assert read_records(path)[0]["x"] == {"y": 1}


def test_a_replaced_file_is_read_from_its_start(tmp_path):
    path = tmp_path / "r00000-h-1.jsonl"
    path.write_bytes(line(k="step", step=1) * 3)
    tail = Tail(path)
    tail.poll()
    path.write_bytes(line(k="step", step=9))
    assert [record["step"] for record in tail.poll()] == [9]


def test_a_folder_shows_files_that_come_later(tmp_path):
    folder = FolderTail(tmp_path)
    assert list(folder.poll()) == []
    (tmp_path / "r00001-h-2.jsonl").write_bytes(line(k="step", step=1))
    (tmp_path / "notes.txt").write_bytes(b"not ours")
    assert [name for name, _ in folder.poll()] == ["r00001-h-2.jsonl"]
    (tmp_path / "r00000-h-1.jsonl").write_bytes(line(k="step", step=1))
    assert [name for name, _ in folder.poll()] == ["r00000-h-1.jsonl"]


def test_an_attempt_without_records_is_empty(tmp_path):
    assert read_attempt(tmp_path) == {}


def test_lines_are_appended_with_time_and_number(tmp_path):
    writer = LineWriter(tmp_path / "supervisor.jsonl")
    assert writer.append({"k": "note", "text": "a"})
    assert writer.append({"k": "note", "text": "b"})
    records = read_records(tmp_path / "supervisor.jsonl")
    assert [record["n"] for record in records] == [0, 1]
    assert all(record["t"] > 10**18 for record in records)


def test_a_line_that_cannot_be_written_is_no_exception(tmp_path):
    assert not LineWriter(tmp_path / "missing" / "supervisor.jsonl").append({"k": "note"})


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"state": "running"})
    write_json(path, {"state": "done"})
    assert read_json(path) == {"state": "done"}
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_torn_json_is_named(tmp_path, content):
    path = tmp_path / "session.json"
    path.write_bytes(content)
    with pytest.raises(SessionError, match=r"session\.json"):
        read_json(path)


def test_missing_json_is_none(tmp_path):
    assert read_json(tmp_path / "no.json") is None
