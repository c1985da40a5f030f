import json

from oomscope.launch.terminations import tell_terminations
from oomscope.live.state import RankState
from oomscope.store.tail import read_records

NAME = "r00000-a-7"


def attempt(tmp_path, records, stacks="Thread 0x1:\n"):
    for folder in ("procs", "stacks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "procs" / f"{NAME}.jsonl").write_text(records)
    (tmp_path / "stacks" / f"{NAME}.txt").write_text(stacks)
    return tmp_path


def state_of(folder):
    state = RankState()
    for record in read_records(folder / "procs" / f"{NAME}.jsonl"):
        state.take(record)
    state.refresh(alive=False)
    return state.state


HELLO = json.dumps({"k": "hello", "t": 1, "n": 0, "pid": 7, "identity": {"rank": 0}}) + "\n"


def test_stacks_of_a_process_mean_that_it_was_terminated(tmp_path):
    folder = attempt(tmp_path, HELLO + '{"k": "reading", "t": 2, "n": 1}\n{"k": "rea')
    assert state_of(folder) == "lost"
    assert tell_terminations(folder) == [f"{NAME}.jsonl"]
    last = read_records(folder / "procs" / f"{NAME}.jsonl")[-1]
    when = (folder / "stacks" / f"{NAME}.txt").stat().st_mtime_ns
    assert last == {"t": when, "k": "term", "n": 2, "signal": "SIGTERM", "stacks": f"stacks/{NAME}.txt"}
    assert state_of(folder) == "stopped"
    assert tell_terminations(folder) == [], "it is told once"


def test_an_empty_file_means_nothing(tmp_path):
    folder = attempt(tmp_path, HELLO, stacks="")
    assert tell_terminations(folder) == []
    assert state_of(folder) == "lost"


def test_stacks_without_a_record_file_are_left_alone(tmp_path):
    folder = attempt(tmp_path, HELLO)
    (folder / "procs" / f"{NAME}.jsonl").unlink()
    assert tell_terminations(folder) == []
