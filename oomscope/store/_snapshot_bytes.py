"""From a file to the bytes of the pickle in it, with clear words for what holds none.

Plain, gzip, zstd, and torch's HTML exports.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import json
import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from oomscope.errors import SnapshotError

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_LFS = b"version https://git-lfs"
_STEP = 1 << 22

Buffer = bytes | bytearray | memoryview | mmap.mmap


def pickle_bytes(path: Path, *, limit: int) -> Buffer:
    """The pickle in `path`, as a buffer that may be mapped from the file.

    Args:
        path: a pickle, a compressed one, or an HTML page that torch's `_memory_viz` wrote.
        limit: most bytes that a compressed or encoded file may unfold to.

    Raises:
        SnapshotError: empty, a Git LFS pointer, another format, or larger than `limit` when unfolded.
    """
    with path.open("rb") as file:
        head = file.read(4096)
        kind = _kind(head, path)
        file.seek(0)
        if kind == "gzip":
            return _from_html(_unfold(gzip.GzipFile(fileobj=file), limit, path), path)
        if kind == "zstd":
            return _from_html(_zstd(file, limit, path), path)
        if kind == "html":
            return _from_html(file.read(), path)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _kind(head: bytes, path: Path) -> str:
    """What the first bytes say it is."""
    if not head:
        raise SnapshotError(f"{path} is empty")
    if head.startswith(_LFS):
        raise SnapshotError(
            f"{path} is a Git LFS pointer, not the file itself",
            hint=f"run: git lfs pull --include {path.name}",
        )
    if head.startswith(_GZIP):
        return "gzip"
    if head.startswith(_ZSTD):
        return "zstd"
    if head.startswith(b"PK\x03\x04"):
        raise SnapshotError(f"{path} is a zip archive (a torch checkpoint?), not a memory snapshot")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"<"):
        return "html"
    if text.startswith(b"{") or head.startswith(b"["):
        raise SnapshotError(f"{path} is JSON, not a pickled memory snapshot")
    return "pickle"


def _unfold(file: IO[bytes] | Any, limit: int, path: Path) -> bytes:
    """Everything in a decompressing file, at most `limit` bytes."""
    out = io.BytesIO()
    try:
        while chunk := file.read(_STEP):
            if out.tell() + len(chunk) > limit:
                raise SnapshotError(
                    f"{path} unfolds to more than {limit} bytes",
                    hint="decompress it yourself, or raise --max-memory",
                )
            out.write(chunk)
    except (OSError, EOFError, zlib.error) as error:
        raise SnapshotError(f"{path}: damaged compressed data ({error})") from error
    return out.getvalue()


def _zstd(file: IO[bytes], limit: int, path: Path) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise SnapshotError(
            f"{path} is compressed with zstd, and the package for it is not installed",
            hint="pip install zstandard (or: zstd -d FILE)",
        ) from error
    try:
        return _unfold(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True), limit, path)
    except zstandard.ZstdError as error:
        raise SnapshotError(f"{path}: damaged compressed data ({error})") from error


def _from_html(data: bytes, path: Path) -> Buffer:
    """The pickle inside torch's HTML page; `data` itself when it is no page.

    The page holds `"base64": "..."` with up to three NUL bytes after the pickle. Source:
    torch/cuda/_memory_viz.py, _format_viz.
    """
    if not data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return data
    start = data.find(b'"base64"')
    opening = data.find(b'"', start + 8) if start >= 0 else -1
    closing = data.find(b'"', opening + 1) if opening >= 0 else -1
    if closing < 0 or data[start + 8 : opening].strip() != b":":
        raise SnapshotError(
            f"{path} is a page without an embedded snapshot",
            hint="open the .pickle from which the page was made",
        )
    try:
        return base64.b64decode(memoryview(data)[opening + 1 : closing], validate=True)
    except binascii.Error as error:
        raise SnapshotError(f"{path}: the snapshot inside the page is damaged ({error})") from error


def file_head(path: Path, count: int = 16) -> str:
    """The first bytes of a file for a message."""
    with path.open("rb") as file:
        return json.dumps(file.read(count).decode("latin-1"))


def release(data: Buffer) -> None:
    """Tell the kernel that a mapped file has been read, so that its pages do not count against us."""
    if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED)


OnProgress = Callable[[float, str], None]


def size_of(path: Path) -> int:
    """Bytes of a regular file.

    Raises:
        SnapshotError: missing, unreadable, or not a regular file (a pipe would block for ever).
    """
    try:
        status = path.stat()
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}") from error
    if not path.is_file():
        raise SnapshotError(f"{path} is not a regular file")
    if not os.access(path, os.R_OK):
        raise SnapshotError(f"{path}: permission denied")
    return status.st_size
