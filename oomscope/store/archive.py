"""A session as one file, to keep or to send: everything that another machine needs to show it."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from oomscope.errors import SetupError
from oomscope.protocol import layout
from oomscope.store.session import Session

#: Of no use elsewhere: requests to a supervisor that is not there, and the agent as it was copied in.
_LEFT_OUT = frozenset({layout.CONTROL_DIR, layout.BOOT_DIR})


def size(session: Session, *, snapshots: bool = True) -> int:
    """Bytes of the files that `pack` would take, before compression."""
    return sum(path.stat().st_size for path in _files(session.path, snapshots))


def pack(session: Session, folder: Path, *, snapshots: bool = True) -> Path:
    """Write `<id>.tar.gz` into `folder` and return its path.

    The file appears under its name only when it is whole. Unpacked anywhere, `oomscope attach FOLDER` opens it.

    Args:
        session: what to pack; it may still run, then its records end somewhere.
        folder: where the file goes.
        snapshots: with the memory snapshots, which are most of the bytes.

    Raises:
        SetupError: there is such a file already, or it cannot be written.
    """
    target = folder / f"{session.id}.tar.gz"
    if target.exists():
        raise SetupError(f"{target} is there already", hint="move it away or delete it")
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{session.id}-", dir=folder)
        with os.fdopen(descriptor, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for path in _files(session.path, snapshots):
                inside = f"{session.id}/{path.relative_to(session.path)}"
                with contextlib.suppress(FileNotFoundError):  # a running session deletes its temporary files
                    archive.add(path, inside, recursive=False)
        os.replace(temporary, target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise SetupError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def _files(folder: Path, snapshots: bool) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(
            name
            for name in folders
            if not (here == folder and name in _LEFT_OUT) and (snapshots or name != layout.SNAPSHOTS_DIR)
        )
        for name in sorted(names):
            path = here / name
            if path.is_file() and not path.is_symlink():
                yield path
