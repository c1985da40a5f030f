"""Writing small files so that a reader never sees half of one, and appending lines that survive a crash."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from oomscope.errors import SessionError
from oomscope.protocol.records import encode, without_nan

_TORN = "the file is cut off or not one of ours; oomscope sessions lists the sessions that can be read"


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Replace `path` by `value` as JSON, at once: a reader sees the old or the new content.

    Raises:
        OSError: the folder is not writable or the disk is full; the old content is untouched.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    data = (json.dumps(without_nan(value), indent=1, default=str) + "\n").encode("utf-8", "backslashreplace")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as stream:
            stream.write(data)
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The object in `path`; None when the file is missing.

    Raises:
        SessionError: it is there but is not a JSON object (torn or foreign).
    """
    try:
        with open(path, encoding="utf-8") as stream:
            value = json.load(stream)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise SessionError(f"cannot read {path}: {error}", hint=_TORN) from error
    if not isinstance(value, dict):
        raise SessionError(
            f"cannot read {path}: expected a JSON object, found {type(value).__name__}", hint=_TORN
        )
    return value


class LineWriter:
    """Appends records to one file, each with one write(); several processes may append to the same file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.sequence = 0
        self._torn = False

    def append(self, record: dict[str, Any]) -> bool:
        """Add `t` and `n` where missing and write.

        False when it could not be written (never raises for a full disk).
        """
        line = encode({"t": time.time_ns(), "n": self.sequence, **record})
        self.sequence += 1
        if self._torn:
            line = b"\n" + line
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.path, flags, 0o600)
            try:
                written = os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        self._torn = written < len(line)
        return not self._torn
