"""Addresses of functions in a running process, read from its own memory.

No file is opened: that is why it works for containers, chroots, overlay file systems and libraries replaced
on disk. Source of the layouts: System V ABI (ELF-64), and the GNU hash section as glibc's dl-lookup.c reads
it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from oomscope.launch.injectors.base import InjectError

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 5, 6, 0x6FFFFEF5

PYTHON_NAMES = (
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyRun_SimpleString",
    "PyRun_SimpleStringFlags",
    "Py_AddPendingCall",
)
LIBC_NAMES = ("pthread_create", "pthread_self", "pthread_detach", "mmap")


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/PID/maps."""

    start: int
    end: int
    permissions: str
    offset: int
    path: str


class Memory:
    """Memory of another process through /proc/PID/mem; needs the rights of ptrace but stops nobody."""

    def __init__(self, pid: int, *, writable: bool = False) -> None:
        self._pid = pid
        try:
            self._file = open(f"/proc/{pid}/mem", "r+b" if writable else "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise InjectError(
                "forbidden",
                f"the memory of process {pid} cannot be opened: {error.strerror}",
                may_try_another=True,
            ) from error

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, address: int, size: int) -> bytes:
        try:
            self._file.seek(address)
            data = self._file.read(size)
        except (OSError, OverflowError, ValueError) as error:
            raise InjectError(
                "memory", f"cannot read {size} bytes at {address:#x} of process {self._pid}"
            ) from error
        if len(data) != size:
            raise InjectError("memory", f"short read at {address:#x} of process {self._pid}")
        return data

    def write(self, address: int, data: bytes) -> None:
        self._file.seek(address)
        self._file.write(data)

    def unpack(self, address: int, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.read(address, struct.calcsize(layout)))

    def name_at(self, address: int) -> bytes:
        """A zero-terminated string of at most 64 bytes; it may end at the end of a mapping."""
        self._file.seek(address)
        return self._file.read(64).split(b"\0", 1)[0]


def read_maps(pid: int) -> list[Mapping]:
    """All mappings of `pid`.

    Raises:
        InjectError: they may not be read, or the process is gone.
    """
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise InjectError(
            "forbidden",
            f"the memory map of process {pid} cannot be read: {error.strerror}",
            may_try_another=True,
        ) from error
    out = []
    for line in lines:
        fields = line.split(None, 5)
        start, _, end = fields[0].partition("-")
        path = fields[5] if len(fields) > 5 else ""
        out.append(Mapping(int(start, 16), int(end, 16), fields[1], int(fields[2], 16), path))
    return out


@dataclass(frozen=True, slots=True)
class Symbols:
    """What the injector needs to call."""

    address: dict[str, int]
    restore_rt: int
    """`mov $15, %rax; syscall` of the C library: the return from a signal handler."""


#: glibc's and musl's __restore_rt on x86-64.
_RESTORE_RT = bytes.fromhex("48c7c00f0000000f05")


def resolve(pid: int) -> Symbols:
    """Finds Python's and the C library's functions in `pid`.

    Raises:
        InjectError: "not_python" when the interpreter is not there or exports nothing.
    """
    mappings = read_maps(pid)
    first: dict[str, int] = {}
    for each in mappings:
        if each.path.startswith("/") and each.offset == 0 and "r" in each.permissions:
            first.setdefault(each.path, each.start)
    try:
        executable = os.readlink(f"/proc/{pid}/exe")
    except OSError as error:
        raise InjectError(
            "forbidden", f"the program of process {pid} cannot be read", may_try_another=True
        ) from error
    python = [path for path in first if "libpython" in _name(path)] + [
        path for path in first if path == executable
    ]
    libc = [path for path in first if _name(path).split(".")[0].split("-")[0] in ("libc", "libpthread", "ld")]
    found: dict[str, int] = {}
    with Memory(pid) as memory:
        for paths, names in ((python, PYTHON_NAMES), (libc, LIBC_NAMES)):
            for path in paths:
                found.update(
                    dynamic_symbols(memory, first[path], [name for name in names if name not in found])
                )
        restore = _find_restore(memory, mappings)
    missing = [name for name in (*PYTHON_NAMES[:2], "Py_AddPendingCall", *LIBC_NAMES) if name not in found]
    if "PyRun_SimpleString" not in found and "PyRun_SimpleStringFlags" not in found:
        missing.append("PyRun_SimpleString")
    if missing:
        raise InjectError(
            "not_python",
            f"process {pid} exports no {', '.join(missing)}: it is not CPython, or a static build without "
            "symbols",
            hint="its stacks can still be read; to see inside, start the job with oomscope run",
        )
    if not restore:
        raise InjectError("libc", f"the C library of process {pid} has no known return from signal handlers")
    return Symbols(found, restore)


def _name(path: str) -> str:
    return os.path.basename(path.removesuffix(" (deleted)"))


def _find_restore(memory: Memory, mappings: Iterable[Mapping]) -> int:
    for each in mappings:
        if "x" in each.permissions and _name(each.path).startswith(("libc.so", "libc-", "ld-musl")):
            place = memory.read(each.start, each.end - each.start).find(_RESTORE_RT)
            if place >= 0:
                return each.start + place
    return 0


def dynamic_symbols(memory: Memory, base: int, wanted: Iterable[str]) -> dict[str, int]:
    """Addresses of those of `wanted` that the ELF image mapped at `base` defines."""
    header = memory.read(base, 64)
    if header[:5] != b"\x7fELF\x02":
        return {}
    (table,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    programs = memory.read(base + table, size * count)
    load: int | None = None
    dynamic: tuple[int, int] | None = None
    for index in range(count):
        kind, _, _, virtual, _, _, length, _ = struct.unpack_from("<IIQQQQQQ", programs, index * size)
        if kind == _PT_LOAD and load is None:
            load = virtual & ~0xFFF
        if kind == _PT_DYNAMIC:
            dynamic = (virtual, length)
    if load is None or dynamic is None:
        return {}
    bias = base - load
    tags = _dynamic_tags(memory.read(bias + dynamic[0], dynamic[1]))
    if not {_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH} <= tags.keys():
        return {}
    # glibc relocates these pointers in place, musl does not.
    strings, symbols, table = (
        value if value >= base else value + bias
        for value in (tags[_DT_STRTAB], tags[_DT_SYMTAB], tags[_DT_GNU_HASH])
    )
    return _look_up(memory, bias, strings, symbols, table, wanted)


def _dynamic_tags(raw: bytes) -> dict[int, int]:
    tags: dict[int, int] = {}
    for place in range(0, len(raw) - 15, 16):
        tag, value = struct.unpack_from("<QQ", raw, place)
        if tag == 0:
            break
        tags.setdefault(tag, value)
    return tags


def _look_up(
    memory: Memory, bias: int, strings: int, symbols: int, table: int, wanted: Iterable[str]
) -> dict[str, int]:
    buckets, first, bloom, _ = memory.unpack(table, "<4I")
    bucket_table = table + 16 + bloom * 8
    chains = bucket_table + buckets * 4
    found: dict[str, int] = {}
    for name in wanted:
        wanted_hash = _gnu_hash(name)
        (index,) = memory.unpack(bucket_table + (wanted_hash % buckets) * 4, "<I")
        while index >= first:
            (chain_hash,) = memory.unpack(chains + (index - first) * 4, "<I")
            if chain_hash | 1 == wanted_hash | 1:
                offset, _, _, section, value, _ = memory.unpack(symbols + index * 24, "<IBBHQQ")
                if section and value and memory.name_at(strings + offset) == name.encode():
                    found[name] = bias + value
                    break
            if chain_hash & 1:  # end of the chain
                break
            index += 1
    return found


def _gnu_hash(name: str) -> int:
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value
