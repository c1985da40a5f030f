"""Where an attached agent writes: the session folder, or a spool in the job's own view of the file system.

A job in a container, a chroot or of another user cannot write into our session folder. Its agent gets a
folder in *its* /tmp, and we copy what it appends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import marshal
import os
import secrets
import shutil
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

from oomscope.agent import bundle
from oomscope.collect.procfs import read_stat
from oomscope.errors import AttachFailed
from oomscope.launch.discover import Rank
from oomscope.protocol import layout
from oomscope.protocol.records import PROTOCOL_VERSION
from oomscope.store.files import write_json

#: Age of the lease at which an agent leaves; it is renewed every second.
LEASE_S = 10.0
_LEASE_FILE = "lease"
_FOLDERS = (layout.PROCS_DIR, layout.SNAPSHOTS_DIR, layout.STACKS_DIR, layout.LOGS_DIR, layout.BOOT_DIR)
#: Copied at most per call and file.
_CHUNK = 4 << 20

#: Compiled by us when the job's Python has our bytecode: compiling 20 modules there would hold the GIL for 20 ms.
_CODES_FILE = "_oomscope_job.codes"

# The pauses between two modules hand the interpreter back to the job, whose every operation waits for it meanwhile.
_LOADER = """
import sys
folder, digest = {folder!r}, {digest!r}
package = sys.modules.get("_oomscope_job")
if package is None or getattr(package, "_digest", digest) != digest:
    import marshal, time
    from importlib.util import MAGIC_NUMBER
    for name in [each for each in sys.modules if each == "_oomscope_job" or each.startswith("_oomscope_job.")]:
        del sys.modules[name]
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "_oomscope_job_bundle"]
    path, codes = folder + "/{bundle}", {{}}
    with open(folder + "/{codes}", "rb") as stream:
        if stream.read(len(MAGIC_NUMBER)) == MAGIC_NUMBER:
            codes = marshal.loads(stream.read())
    def load(name, source, file):
        time.sleep(0.0005)
        code = codes.get(name)
        return compile(source(), file, "exec", dont_inherit=True) if code is None else marshal.loads(code)
    def text():
        with open(path, "rb") as stream:
            return stream.read()
    namespace = {{"__name__": "_oomscope_job_bundle", "__file__": path}}
    exec(load("", text, path), namespace)
    def exec_module(self, module):
        name = module.__spec__.name
        exec(load(name, lambda: self.get_source(name), self.get_filename(name)), module.__dict__)
    namespace["Importer"].exec_module = exec_module
    namespace["install"]()
    import _oomscope_job
    _oomscope_job._digest = digest
from _oomscope_job.agent.attached import attach
attach(folder)
"""


def compiled(folder: str) -> bytes:
    """The agent as bytecode of this Python for the path `folder` of the job: magic number, then a marshalled table.

    The key "" is the bundle itself.
    """
    files = bundle.module_files(simulate=False)
    name_of_file = {name: f"{folder}/{bundle.PACKAGE}/{name.replace('.', '/')}" for name in files}
    codes = {
        "": marshal.dumps(
            compile(bundle.source(), f"{folder}/{layout.BUNDLE_FILE}", "exec", dont_inherit=True)
        )
    }
    for name, file in files.items():
        path = name_of_file[name] + ("/__init__.py" if file.name == "__init__.py" else ".py")
        code = compile(file.read_text(encoding="utf-8"), path, "exec", dont_inherit=True)
        codes[f"{bundle.PACKAGE}.{name}"] = marshal.dumps(code)
    return MAGIC_NUMBER + marshal.dumps(codes)


@dataclass(slots=True)
class Place:
    """Folder of one rank's agent.

    `outside` is the path for us, `inside` the same folder for the job.
    """

    outside: Path
    inside: str
    attempt: Path
    """Of the session; equals `outside` when the job can write there."""
    sockets: str

    @property
    def is_spool(self) -> bool:
        return self.outside != self.attempt

    @property
    def lease(self) -> Path:
        return self.outside / _LEASE_FILE

    def answer(self, namespace_pid: int) -> Path:
        return self.outside / f"attach-{namespace_pid}.json"

    def error(self, namespace_pid: int) -> Path:
        return self.outside / f"attach-{namespace_pid}.error"

    def socket_of(self, namespace_pid: int, pid: int) -> str:
        """Path, for us, of the agent's datagram socket."""
        root = f"/proc/{pid}/root" if self.is_spool else ""
        return f"{root}{self.sockets}/{namespace_pid}.sock"

    def loader(self, namespace_pid: int) -> tuple[str, str]:
        """(source to inject, file for its errors), both for the job's side."""
        source = _LOADER.format(
            folder=f"{self.inside}/{layout.BOOT_DIR}",
            digest=digest(),
            bundle=layout.BUNDLE_FILE,
            codes=_CODES_FILE,
        )
        return source, f"{self.inside}/{self.error(namespace_pid).name}"


def digest() -> str:
    """Names one version of the agent's source."""
    return hashlib.sha256(bundle.source().encode()).hexdigest()[:16]


def place_for(rank: Rank, attempt: Path, session_id: str) -> Place:
    """Makes the folder of the agent of `rank`, with its program and configuration.

    Raises:
        AttachFailed: the job's file system cannot be written to.
    """
    if _shares_our_view(rank):
        place = Place(attempt, str(attempt), attempt, layout.rundir(session_id, "attached"))
    else:
        name = f"/tmp/oomscope-attach-{secrets.token_hex(6)}"
        place = Place(Path(f"/proc/{rank.pid}/root{name}"), name, attempt, f"{name}/s")
    try:
        _write(place, rank)
    except OSError as error:
        raise AttachFailed(
            f"cannot write into {place.inside} of process {rank.pid}: {error.strerror}"
        ) from error
    return place


def _write(place: Place, rank: Rank) -> None:
    made: list[Path] = []
    if place.is_spool:
        place.outside.mkdir(mode=0o700)
        made.append(place.outside)
    sockets = Path(f"/proc/{rank.pid}/root{place.sockets}") if place.is_spool else Path(place.sockets)
    for folder in (*(place.outside / name for name in _FOLDERS), sockets):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made.append(folder)
    boot = place.outside / layout.BOOT_DIR
    program, config, codes = boot / layout.BUNDLE_FILE, boot / layout.AGENT_CONFIG, boot / _CODES_FILE
    if not codes.exists():  # the ranks of one job share a folder
        program.write_text(bundle.source(), encoding="utf-8")
        codes.write_bytes(compiled(f"{place.inside}/{layout.BOOT_DIR}"))
    write_json(config, _config(place))
    renew(place)
    if rank.uid != os.geteuid():
        for path in (*made, program, codes, config, place.lease):
            os.chown(path, rank.uid, -1, follow_symlinks=False)
    if place.is_spool:
        # What a viewer needs to reach the rank stands in the session too, with our path of the sockets.
        write_json(
            place.attempt / layout.BOOT_DIR / layout.AGENT_CONFIG, {**_config(place), "rundir": str(sockets)}
        )


def _config(place: Place) -> dict[str, Any]:
    return {
        "protocol": PROTOCOL_VERSION,
        "session": str(place.attempt.parents[1]),
        "attempt_dir": place.inside,
        "rundir": place.sockets,
        "role": "attached",
        "device": None,
        "steps": None,
        "plan": {"fixes": []},
        "detail": False,
        "history": {"enabled": True, "max_entries": 100_000, "stacks": "python"},
        "ranks": None,
        "supervisor_pid": os.getpid(),
        "main_is_rank": False,
        "lease": f"{place.inside}/{_LEASE_FILE}",
        "lease_s": LEASE_S,
        "snapshot_on_detach": False,
    }


def renew(place: Place) -> None:
    """A sign of life for the agents there."""
    descriptor = os.open(place.lease, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def ask_to_leave(place: Place) -> None:
    """Every agent that holds this lease detaches at its next tick."""
    descriptor = os.open(place.lease, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(descriptor, "w", encoding="utf-8") as stream:
        json.dump({"detach": True}, stream)


def _shares_our_view(rank: Rank) -> bool:
    """Can the job write into a folder of ours under the same path?"""
    if rank.uid != os.geteuid():
        return False
    try:
        return os.readlink(f"/proc/{rank.pid}/ns/mnt") == os.readlink(
            "/proc/self/ns/mnt"
        ) and os.path.samefile(f"/proc/{rank.pid}/root/", "/")
    except OSError:
        return False


class Relay:
    """Copies what appears in a spool: record files as they grow, snapshots when they are complete."""

    def __init__(self, place: Place, rank: Rank) -> None:
        self._place = place
        self._rank = rank
        self._offsets: dict[str, int] = {}

    def poll(self) -> None:
        if not self._place.is_spool:
            return
        if read_stat(self._rank.pid) is None:
            return  # its root has gone with it; what we have is what there is
        for folder in (layout.PROCS_DIR, layout.STACKS_DIR):
            for path in self._files(folder, (".jsonl", ".txt")):
                self._append(folder, path)
        for path in self._files(layout.SNAPSHOTS_DIR, (".pickle", ".json")):
            self._move(path)

    def _files(self, folder: str, endings: tuple[str, ...]) -> list[Path]:
        try:
            return [
                path
                for path in sorted((self._place.outside / folder).iterdir())
                if path.name.endswith(endings) and path.is_file() and not path.is_symlink()
            ]
        except OSError:
            return []

    def _append(self, folder: str, path: Path) -> None:
        key = f"{folder}/{path.name}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as source:
                source.seek(self._offsets.get(key, 0))
                data = source.read(_CHUNK)
            if data:
                target = os.open(
                    self._place.attempt / key, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
                )
                with open(target, "ab") as sink:
                    sink.write(data)
                self._offsets[key] = self._offsets.get(key, 0) + len(data)
        except OSError:
            return

    def _move(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            target = self._place.attempt / layout.SNAPSHOTS_DIR / path.name
            temporary = target.with_suffix(".part")
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as source, open(temporary, "wb") as sink:
                shutil.copyfileobj(source, sink)
            temporary.replace(target)
            path.unlink()

    def remove(self) -> None:
        """After the agent has left: take the spool away."""
        if self._place.is_spool and read_stat(self._rank.pid) is not None:
            shutil.rmtree(self._place.outside, ignore_errors=True)
