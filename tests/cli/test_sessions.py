"""`oomscope sessions` and `oomscope attach` without a terminal."""

import json
from pathlib import Path

import jsonschema
import pytest

import oomscope
from oomscope.cli.main import main
from oomscope.protocol.layout import proc_file
from oomscope.store.session import Session

SCHEMAS = Path(oomscope.__file__).parent / "schemas"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OOMSCOPE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def session(home):
    session = Session.create(
        home, name="train.py", command=["run", "/some/where/train.py"], device="sim:a100-40g"
    )
    attempt = session.new_attempt()
    records = [
        {"k": "hello", "version": 1, "pid": 1, "host": "h", "simulated": True, "identity": {"rank": 0}},
        {"k": "rank", "rank": 0, "capacity_bytes": 40 << 30, "simulated": True, "gpu_name": "A100"},
        {
            "k": "step",
            "step": 0,
            "peak_allocated_bytes": 1 << 30,
            "peak_reserved_bytes": 2 << 30,
            "loss": None,
        },
        {
            "k": "exception",
            "type": "OutOfMemoryError",
            "message": "CUDA out of memory.\nmore",
            "is_oom": True,
        },
    ]
    path = attempt.procs / proc_file(0, "h", 1)
    path.write_text("".join(json.dumps({"t": 1, "n": 0, **record}) + "\n" for record in records))
    attempt.write_result({"exit_code": 1, "oom": True})
    (attempt.path / "findings.json").write_text(json.dumps({"verdicts": [{"rule": "oom.fragmentation"}]}))
    session.set_state("oom")
    return session


def run(capsys, *args):
    code = main(list(args))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def validate(text, name):
    value = json.loads(text)
    jsonschema.validate(value, json.loads((SCHEMAS / name).read_text()))
    return value


def test_no_session_yet(capsys):
    code, out, err = run(capsys, "sessions")
    assert (code, out) == (0, "")
    assert "no sessions yet" in err
    value = validate(run(capsys, "sessions", "--json")[1], "sessions.1.json")
    assert value["sessions"] == []


def test_sessions_are_listed_with_state_and_cause(capsys, session):
    code, out, _ = run(capsys, "sessions")
    assert code == 0
    header, line = out.splitlines()
    assert header.split()[:3] == ["SESSION", "AGE", "STATE"]
    assert session.id in line
    assert "oom.fragmentation" in line
    assert "run train.py" in line
    value = validate(run(capsys, "sessions", "--json")[1], "sessions.1.json")
    (row,) = value["sessions"]
    assert (row["state"], row["exit_code"], row["oom"], row["attempts"]) == ("oom", 1, True, 1)


def test_only_the_newest_are_shown_and_the_rest_is_said(capsys, home):
    for _ in range(3):
        Session.create(home, name="train.py")
    _, out, err = run(capsys, "sessions", "-n", "2")
    assert len(out.splitlines()) == 3
    assert "1 older" in err


def test_a_session_with_torn_files_is_listed_all_the_same(capsys, session):
    attempt = session.attempts()[-1]
    (attempt.path / "result.json").write_text('{"exit')
    (attempt.path / "findings.json").write_text("[]")
    value = validate(run(capsys, "sessions", "--json")[1], "sessions.1.json")
    assert (value["sessions"][0]["oom"], value["sessions"][0]["rule"]) == (None, None)


def test_attach_without_a_terminal_says_where_the_job_stands(capsys, session):
    code, out, _ = run(capsys, "attach", "--ui", "never", session.id[-4:])
    assert code == 0
    assert out.splitlines()[0] == f"{session.id}: oom, attempt 1"
    assert "rank 0: oom, 1 steps, simulated peak reserved 2.00 GiB of 40.00 GiB" in out
    assert "OutOfMemoryError: CUDA out of memory." in out
    value = validate(run(capsys, "attach", "--json")[1], "session.1.json")
    assert value["id"] == session.id
    assert value["ranks"][0]["peak_reserved_bytes"] == 2 << 30


def test_an_unknown_target_is_one_sentence_and_a_hint(capsys, session):
    """It may have meant a session or a running job, so both are named."""
    code, out, err = run(capsys, "attach", "nothing-like-it")
    assert (code, out) == (5, "")
    sentence, hint = err.splitlines()
    assert sentence.startswith("oomscope: nothing matches 'nothing-like-it'")
    assert sentence.endswith("no session 'nothing-like-it'")
    assert hint.startswith("  hint: ")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"format": "oomscope-session", "version": 2}', "newer oomscope"),
        ("{", "cannot read"),
        ("{}", "not a session"),
    ],
)
def test_unusable_folders_are_refused(capsys, tmp_path, content, text):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "session.json").write_text(content)
    code, _, err = run(capsys, "attach", str(folder))
    assert code == 3
    assert text in err


def test_prune_deletes_what_is_old(capsys, session):
    info = json.loads((session.path / "session.json").read_text())
    info["created"] = 1
    (session.path / "session.json").write_text(json.dumps(info))
    _, _, err = run(capsys, "sessions", "--prune")
    assert f"deleted {session.id}" in err
    assert not session.path.exists()


def test_a_session_is_pinned_and_unpinned(session):
    assert main(["sessions", "--pin", session.id]) == 0
    assert session.is_pinned
    assert main(["sessions", "--unpin", session.id]) == 0
    assert not session.is_pinned


def test_a_session_is_exported_into_one_file(capsys, session, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["sessions", "--export", session.id[-4:], "--without-snapshots"]) == 0
    target = tmp_path / "here" / f"{session.id}.tar.gz"
    assert capsys.readouterr().out.strip() == str(target)
    assert target.is_file()
    assert main(["sessions", "--export", session.id]) == 4
    assert "is there already" in capsys.readouterr().err
