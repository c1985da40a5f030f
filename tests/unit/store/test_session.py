import json
import os
import subprocess
import sys
import time

import pytest

from oomscope.errors import SessionError, SetupError, UsageError
from oomscope.store import control, library
from oomscope.store.files import write_json
from oomscope.store.session import ProcessMark, Session, default_home


@pytest.fixture
def session(tmp_path):
    return Session.create(
        tmp_path,
        name="train.py",
        command=["oomscope", "run", "train.py"],
        environ={"RANK": "0", "X_TOKEN": "s"},
    )


def age(session, days):
    info = json.loads((session.path / "session.json").read_text())
    info["created"] -= int(days * 86400e9)
    write_json(session.path / "session.json", info)


def test_a_new_session_can_be_opened_again(session):
    again = Session.open(session.path)
    assert again.info["command"] == ["oomscope", "run", "train.py"]
    assert again.info["environment"] == {"RANK": "0"}
    assert again.id.split("-")[2] == "train"
    assert session.path.stat().st_mode & 0o077 == 0
    assert again.state()["state"] == "starting"


def test_attempts_are_numbered(session):
    assert session.attempts() == []
    first = session.new_attempt(fixes=[])
    second = session.new_attempt(fixes=["ckpt"])
    assert [each.number for each in session.attempts()] == [1, 2]
    assert first.path.name == "001"
    assert second.info()["fixes"] == ["ckpt"]
    assert first.result() is None
    first.write_result({"exit_code": 1})
    assert first.result() == {"exit_code": 1}


def test_predictions_live_below_their_attempt(session):
    attempt = session.new_attempt()
    one, two = attempt.prediction("ckpt+amp"), attempt.prediction("ckpt+amp")
    assert one.path.parent == attempt.path / "predictions"
    assert one.path.name == "ckpt-amp"
    assert two.path.name == "ckpt-amp-2"
    assert one.procs.is_dir()


def test_state_keeps_what_is_not_given(session):
    mark = ProcessMark.of(os.getpid())
    session.set_state("running", attempt=1, supervisor=mark)
    session.set_state("diagnosing")
    assert session.state()["attempt"] == 1
    assert ProcessMark.from_json(session.state()["supervisor"]) == mark
    with pytest.raises(ValueError, match="unknown"):
        session.set_state("happy")


def test_a_session_without_its_processes_is_lost(session):
    session.set_state("running", supervisor=ProcessMark.of(os.getpid()))
    assert session.current_state() == "running"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    mark = ProcessMark(child.pid, 1)
    child.wait()
    session.set_state("running", supervisor=mark, launcher=mark)
    assert session.current_state() == "lost"
    session.set_state("done")
    assert session.current_state() == "done"


def test_a_torn_state_is_lost_and_not_an_error(session):
    (session.path / "state.json").write_text('{"state": "runn')
    assert session.current_state() == "lost"


def test_an_unwritable_state_folder_is_named(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(SetupError, match="state folder") as caught:
        Session.create(blocker, name="train.py")
    assert "OOMSCOPE_HOME" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "not a session folder"),
        ('{"format": "other"}', "not a session folder"),
        ('{"format": "oomscope-session", "version": 99}', "newer oomscope"),
        ('{"format": "oomscope-session"}', "damaged"),
        ('{"format": "oomsc', "cannot read"),
    ],
)
def test_foreign_torn_and_newer_folders_are_refused(tmp_path, content, match):
    if content is not None:
        (tmp_path / "session.json").write_text(content)
    with pytest.raises(SessionError, match=match):
        Session.open(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(SessionError, match="no session folder"):
        Session.open(tmp_path / "nothing")


def test_the_state_folder_follows_the_environment(tmp_path):
    assert default_home({"OOMSCOPE_HOME": str(tmp_path)}) == tmp_path
    assert default_home({"XDG_STATE_HOME": "/state"}).as_posix() == "/state/oomscope"


def test_supervisor_records_are_kept_in_order(session):
    session.append_supervisor({"k": "note", "text": "a"})
    session.append_supervisor({"k": "note", "text": "b"})
    assert [record["text"] for record in session.supervisor_records()] == ["a", "b"]


def test_requests_arrive_once_and_are_answered(session):
    sent = control.send(session, "rerun", fixes=("ckpt",))
    (session.path / "control" / "broken.json").write_text("{")
    (session.path / "control" / "strange.json").write_text('{"do": "explode"}')
    received = control.receive(session)
    assert received == [sent]
    assert control.receive(session) == []
    control.answer(session, sent, True, "running")
    assert session.supervisor_records()[-1]["id"] == sent.id
    with pytest.raises(UsageError, match="unknown request"):
        control.send(session, "explode")


def test_sessions_are_listed_newest_first_and_found_by_parts(tmp_path):
    one = Session.create(tmp_path, name="train.py")
    time.sleep(0.01)
    two = Session.create(tmp_path, name="other.py")
    (tmp_path / "sessions" / "junk").mkdir()
    assert [each.id for each in library.sessions(tmp_path)] == [two.id, one.id]
    assert library.find("last", tmp_path).id == two.id
    assert library.find(one.id, tmp_path).id == one.id
    assert library.find("train", tmp_path).id == one.id
    assert library.find(str(one.path), tmp_path).id == one.id
    with pytest.raises(SessionError, match="several"):
        library.find(one.id[:8], tmp_path)
    with pytest.raises(SessionError, match="no session"):
        library.find("nothing", tmp_path)


def test_no_session_yet_is_said(tmp_path):
    with pytest.raises(SessionError, match="no session yet"):
        library.find("last", tmp_path)


def test_retention_spares_the_pinned_and_the_running(tmp_path):
    old, pinned, running = (Session.create(tmp_path, name=name) for name in ("old", "pinned", "running"))
    for each in (old, pinned, running):
        each.set_state("done")
        age(each, 30)
    pinned.pin()
    running.set_state("running", supervisor=ProcessMark.of(os.getpid()))
    deleted = library.prune(tmp_path)
    assert deleted == [old.id]
    assert {each.id for each in library.sessions(tmp_path)} == {pinned.id, running.id}


def test_retention_deletes_snapshots_before_sessions(tmp_path):
    session = Session.create(tmp_path, name="big")
    attempt = session.new_attempt()
    (attempt.snapshots / "r00000-step000001-oom.pickle").write_bytes(b"x" * 100_000)
    session.set_state("done")
    deleted = library.prune(tmp_path, keep_bytes=50_000)
    assert len(deleted) == 1
    assert deleted[0].endswith(".pickle")
    assert Session.open(session.path)
