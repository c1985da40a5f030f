"""A session as one file: whole or not there, and a session again where it is unpacked."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from oomscope.errors import SetupError
from oomscope.store import archive
from oomscope.store.session import Session


@pytest.fixture
def session(tmp_path: Path) -> Session:
    made = Session.create(tmp_path / "state", name="train.py", command=("python", "train.py"))
    attempt = made.new_attempt()
    (attempt.path / "snapshots").mkdir(exist_ok=True)
    (attempt.path / "snapshots" / "r00000-step000001-oom.pickle").write_bytes(b"x" * 10_000)
    (made.path / "control" / "request.json").write_text("{}")
    (made.path / "link").symlink_to("/etc/passwd")
    return made


def test_unpacked_it_is_a_session_again(session: Session, tmp_path: Path) -> None:
    target = archive.pack(session, tmp_path)
    assert target == tmp_path / f"{session.id}.tar.gz"
    assert target.stat().st_mode & 0o077 == 0
    with tarfile.open(target) as stream:
        names = stream.getnames()
        stream.extractall(tmp_path / "elsewhere", filter="data")
    assert not any("control" in name or name.endswith("link") for name in names)
    assert Session.open(tmp_path / "elsewhere" / session.id).attempts()


def test_without_snapshots(session: Session, tmp_path: Path) -> None:
    with tarfile.open(archive.pack(session, tmp_path, snapshots=False)) as stream:
        assert not any(name.endswith(".pickle") for name in stream.getnames())
    assert archive.size(session) - archive.size(session, snapshots=False) == 10_000


def test_nothing_is_overwritten_and_nothing_is_left_half(session: Session, tmp_path: Path) -> None:
    (tmp_path / f"{session.id}.tar.gz").write_text("mine")
    with pytest.raises(SetupError, match="is there already"):
        archive.pack(session, tmp_path)
    with pytest.raises(SetupError, match="cannot write"):
        archive.pack(session, tmp_path / "missing")
    assert (tmp_path / f"{session.id}.tar.gz").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
