import json
import os
import time

import pytest

from oomscope.live.session import SessionView, log_files
from oomscope.protocol.layout import proc_file
from oomscope.store.session import Session, process_start_time


def write(attempt, rank, *records, pid=1):
    path = attempt.procs / proc_file(rank, "elsewhere", pid)
    with open(path, "a") as stream:
        for record in records:
            stream.write(json.dumps({"t": time.time_ns(), "n": 0, **record}) + "\n")


def hello(rank, host="elsewhere", world=2, **more):
    return {
        "k": "hello",
        "version": 1,
        "pid": 1,
        "host": host,
        "identity": {"rank": rank, "world_size": world},
        **more,
    }


@pytest.fixture
def session(tmp_path):
    return Session.create(tmp_path, name="train.py")


def test_a_view_follows_the_session_from_its_first_moment(session):
    view = SessionView(session)
    assert view.attempt is None
    view.poll()
    assert not view.poll()
    attempt = session.new_attempt()
    assert view.poll()
    assert view.attempt.number == 1
    write(attempt, 1, hello(1))
    write(attempt, 0, hello(0), {"k": "step", "step": 0, "peak_rss_bytes": 5, "rss_bytes": 4})
    assert view.poll()
    assert [(each.rank, each.step) for each in view.ranks] == [(0, 1), (1, 0)]
    session.append_supervisor({"k": "note", "text": "x"})
    assert view.poll()
    assert [event["text"] for event in view.events] == ["x"]
    assert not view.poll()


def test_a_new_attempt_takes_the_place_of_the_old_one(session):
    first = session.new_attempt()
    write(first, 0, hello(0), {"k": "step", "step": 7})
    view, pinned = SessionView(session), SessionView(session, attempt=1)
    view.poll()
    session.new_attempt()
    view.poll()
    pinned.poll()
    assert (view.attempt.number, view.ranks) == (2, [])
    assert (pinned.attempt.number, len(pinned.ranks)) == (1, 1)


def test_helpers_are_no_ranks(session):
    attempt = session.new_attempt()
    write(attempt, 0, hello(0), {"k": "step", "step": 1})
    write(attempt, None, hello(None), pid=2)
    view = SessionView(session)
    view.poll()
    assert (len(view.ranks), len(view.others)) == (1, 1)


def test_a_script_that_only_starts_another_one_is_not_the_rank(session):
    attempt = session.new_attempt()
    write(attempt, 0, hello(0, world=1))
    write(attempt, None, hello(None), {"k": "step", "step": 3}, pid=2)
    view = SessionView(session)
    view.poll()
    assert [(each.rank, each.step) for each in view.ranks] == [(0, 4)]


def test_the_parent_of_spawned_ranks_is_not_rank_0(session):
    attempt = session.new_attempt()
    write(attempt, 0, hello(0, world=1), pid=1)
    write(
        attempt,
        None,
        hello(None, world=None),
        {"k": "rank", "rank": 0, "world_size": 2},
        {"k": "step", "step": 3},
        pid=2,
    )
    write(attempt, 0, {"k": "reading", "step": 0}, pid=1)
    view = SessionView(session)
    view.poll()
    assert [(each.rank, each.step) for each in view.ranks] == [(0, 4)]


def test_a_process_of_this_host_that_is_gone_is_lost(session):
    attempt = session.new_attempt()
    import socket

    here = socket.gethostname()
    write(attempt, 0, hello(0, here, start_time=1))
    alive = {**hello(1, here), "pid": os.getpid(), "start_time": process_start_time(os.getpid())}
    write(attempt, 1, alive, pid=2)
    view = SessionView(session)
    view.poll()
    assert [each.state for each in view.ranks] == ["lost", "running"]


def test_when_the_attempt_is_over_silence_means_lost(session):
    attempt = session.new_attempt()
    write(attempt, 0, hello(0))
    attempt.write_result({"exit_code": 1})
    view = SessionView(session)
    view.poll()
    assert view.ranks[0].state == "lost"


def test_torn_lines_and_lost_records_are_counted(session):
    attempt = session.new_attempt()
    write(attempt, 0, hello(0), {"k": "gap", "lost": 4})
    with open(attempt.procs / proc_file(0, "elsewhere", 1), "a") as stream:
        stream.write("{torn\n")
    view = SessionView(session)
    view.poll()
    assert (view.bad_lines, view.lost_records) == (1, 4)


def test_log_files_are_found_as_every_launcher_names_them(session):
    attempt = session.new_attempt()
    assert log_files(attempt.path) == []
    (attempt.path / "launcher.log").write_text("")
    for folder in ("rank0", "run_x/attempt_0/1"):
        (attempt.logs / folder).mkdir(parents=True)
        (attempt.logs / folder / "stderr.log").write_text("")
        (attempt.logs / folder / "stdout.log").write_text("")
    found = [(each.rank, each.stream) for each in log_files(attempt.path)]
    assert found == [(None, "launcher"), (0, "stdout"), (0, "stderr"), (1, "stdout"), (1, "stderr")]
