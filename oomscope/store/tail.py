"""Incremental reading of append-only record files.

A writer may be killed in the middle of a line and a disk may be full in the middle of a write, so a reader
keeps an unfinished last line for later, counts lines that do not parse, and goes on. Files are opened again
at every poll: on network file systems only a new open is sure to see what another host appended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from oomscope.errors import SessionError
from oomscope.protocol import layout
from oomscope.protocol.records import HELLO, MAX_LINE_BYTES, PROTOCOL_VERSION

_DECODER = msgspec.json.Decoder(dict[str, Any])

#: How much one poll of one file reads, so that a viewer which opens an old session stays responsive.
_CHUNK = 4 << 20


class Tail:
    """Reads one record file from where it stopped last time.

    Attributes:
        bad_lines: lines so far that were not a JSON object (torn by a kill or by a full disk).
        lost: records so far that the writer says it could not write (`gap`).
    """

    def __init__(self, path: str | os.PathLike[str], *, last: int | None = None) -> None:
        """`last`: of what is there already read only so many bytes at the end."""
        self.path = Path(path)
        self.bad_lines = 0
        self.lost = 0
        self._offset = 0
        self._rest = b""
        if last is not None:
            self._skip(last)

    def _skip(self, last: int) -> None:
        """Start at the first whole line of the last `last` bytes."""
        try:
            with open(self.path, "rb") as stream:
                start = os.fstat(stream.fileno()).st_size - last
                if start > 0:
                    stream.seek(start - 1)
                    stream.readline(MAX_LINE_BYTES)
                    self._offset = stream.tell()
        except OSError:
            return

    def poll(self) -> list[dict[str, Any]]:
        """The complete records appended since the last call.

        [] when there are none or the file is not there (yet).

        Raises:
            SessionError: the writer was a newer oomscope.
        """
        data = self._read()
        if not data:
            return []
        head, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if not newline:
            if len(self._rest) > MAX_LINE_BYTES:
                self._rest = b""
                self.bad_lines += 1
            return []
        return [record for line in head.split(b"\n") if line and (record := self._parse(line)) is not None]

    def drain(self) -> list[dict[str, Any]]:
        """All that is left, in one list."""
        records: list[dict[str, Any]] = []
        before = -1
        while self._offset != before:
            before = self._offset
            records += self.poll()
        return records

    def _read(self) -> bytes:
        try:
            with open(self.path, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if (
                    size < self._offset
                ):  # replaced or cut: start again rather than read from the middle of a line
                    self._offset, self._rest = 0, b""
                stream.seek(self._offset)
                data = stream.read(_CHUNK)
        except OSError:
            return b""
        self._offset += len(data)
        return data

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.bad_lines += 1
            return None
        kind = record.get("k")
        if not isinstance(kind, str):
            self.bad_lines += 1
            return None
        if kind == HELLO:
            _check_version(record, self.path)
        elif kind == "gap":
            lost = record.get("lost")
            self.lost += lost if isinstance(lost, int) else 0
        return record


def _check_version(hello: dict[str, Any], path: Path) -> None:
    version = hello.get("version")
    if isinstance(version, int) and version > PROTOCOL_VERSION:
        raise SessionError(
            f"{path.name} was written by a newer oomscope: "
            f"records version {version}, this one reads {PROTOCOL_VERSION}",
            hint="pip install --upgrade oomscope",
        )


class FolderTail:
    """Reads all record files of one attempt's procs/ folder, also those that appear later."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._tails: dict[str, Tail] = {}

    def poll(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """(file name, new records) of each file that has some, in the order of the names."""
        try:
            names = sorted(
                entry.name for entry in os.scandir(self.folder) if layout.parse_proc_file(entry.name)
            )
        except OSError:
            return
        for name in names:
            tail = self._tails.get(name)
            if tail is None:
                tail = self._tails[name] = Tail(self.folder / name)
            records = tail.poll()
            if records:
                yield name, records

    @property
    def bad_lines(self) -> int:
        return sum(tail.bad_lines for tail in self._tails.values())

    @property
    def lost(self) -> int:
        return sum(tail.lost for tail in self._tails.values())


def iterate(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The complete records of one file, in order, without holding them all.

    Raises:
        SessionError: the writer was a newer oomscope.
    """
    tail = Tail(path)
    while True:
        before = tail._offset
        yield from tail.poll()
        if tail._offset == before:
            return


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All complete records of one file, in order.

    Raises:
        SessionError: the writer was a newer oomscope.
    """
    return list(iterate(path))


def record_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The record files of an attempt (or prediction) folder, in order of their names."""
    procs = Path(folder) / layout.PROCS_DIR
    try:
        return sorted(procs / entry.name for entry in os.scandir(procs) if layout.parse_proc_file(entry.name))
    except OSError:
        return []


def read_attempt(folder: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
    """All records of an attempt (or prediction) folder: file name in procs/ -> its records, in order."""
    return {path.name: read_records(path) for path in record_files(folder)}
