"""What the hub knows and does, apart from HTTP: its members, alarms on their way, and the files they append to."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomscope.protocol import layout
from oomscope.store.files import LineWriter

Message = dict[str, Any]

#: How long an alarm waits for the other nodes to say that their ranks have dumped.
ANSWER_S = 2.0
#: Bytes that all members together may append: records of a month, and the snapshots of failed ranks.
MAX_BYTES = 4 << 30
_MAX_ALARMS = 64
_TARGET = re.compile(
    r"(?:procs/[A-Za-z0-9][\w.-]{0,150}\.jsonl|host/[A-Za-z0-9][\w.-]{0,100}\.jsonl|elastic-node\d{1,6}\.jsonl"
    r"|stacks/[A-Za-z0-9][\w.-]{0,150}\.txt|snapshots/[A-Za-z0-9][\w.-]{0,150}\.(?:pickle|json))"
)


@dataclass
class Member:
    """One other node."""

    node: int
    host: str
    session: str
    offset_ns: int = 0
    """What to add to its clock to get the hub's."""
    error_ns: int = 0
    exit_code: int | None = None
    """None while its job runs."""
    heard: float = field(default_factory=time.monotonic)


class RefusedError(Exception):
    """A request that is not carried out; `status` is the HTTP status, `size` where to go on."""

    def __init__(self, status: int, size: int | None = None) -> None:
        super().__init__(status)
        self.status, self.size = status, size


class Switchboard:
    """Thread-safe. `deliver` hands a message to the ranks of the hub's own node and returns (asked, answered)."""

    def __init__(
        self,
        attempt_dir: Path,
        *,
        deliver: Callable[[Message], tuple[int, int]],
        note: Callable[[str], None],
    ) -> None:
        self.members: dict[int, Member] = {}
        self._folder = attempt_dir
        self._deliver = deliver
        self._note = note
        self._journal = LineWriter(attempt_dir / layout.NODES_FILE)
        self._changed = threading.Condition()
        self._alarms: list[tuple[int, int | None, Message]] = []
        self._sequence = 0
        self._answers: dict[str, dict[int, tuple[int, int]]] = {}
        self._owners: dict[str, int] = {}
        self._bytes = 0

    # -- members

    def join(self, node: int, host: str, session: str, offset_ns: int, error_ns: int) -> None:
        """A node is there, or has measured its clock again."""
        with self._changed:
            known = self.members.get(node)
            if known is None:
                self._note(f"node {node} ({host}) has joined; its own session there is {session}")
            self.members[node] = member = known or Member(node, host, session)
            member.offset_ns, member.error_ns, member.heard = offset_ns, error_ns, time.monotonic()
            self._changed.notify_all()
        self._journal.append(
            {
                "k": "node",
                "node": node,
                "host": host,
                "session": session,
                "offset_ns": offset_ns,
                "error_ns": error_ns,
            }
        )

    def end(self, node: int, exit_code: int) -> None:
        """The launcher of a node has ended and everything of it was appended."""
        with self._changed:
            member = self.members.get(node)
            if member is None or member.exit_code is not None:
                return
            member.exit_code = exit_code
            self._changed.notify_all()
        self._note(f"node {node} ({member.host}): the job there ended with exit code {exit_code}")
        self._journal.append({"k": "node_end", "node": node, "exit_code": exit_code})

    def wait_for_the_others(self, silent_s: float, most_s: float) -> None:
        """Until every member has ended, has been silent for `silent_s`, or `most_s` have passed."""
        until = time.monotonic() + most_s
        with self._changed:
            while time.monotonic() < until and any(
                each.exit_code is None and time.monotonic() - each.heard < silent_s
                for each in self.members.values()
            ):
                self._changed.wait(0.1)

    # -- alarms

    def alarm(self, message: Message, origin: int | None) -> Message:
        """Pass an alarm on to every node but `origin` (None: the hub's own) and wait for their answers.

        `message["t"]` is the hub's time. Returns {"nodes", "peers", "acks"}: nodes that answered, ranks that were
        asked there, and ranks that answered.
        """
        identifier = str(message.get("id"))[:64]
        with self._changed:
            self._sequence += 1
            self._alarms = [*self._alarms, (self._sequence, origin, message)][-_MAX_ALARMS:]
            wanted = {
                node for node, each in self.members.items() if node != origin and each.exit_code is None
            }
            answers = self._answers.setdefault(identifier, {})
            if len(self._answers) > _MAX_ALARMS:
                self._answers.pop(next(iter(self._answers)))
            self._changed.notify_all()
        own = self._deliver(message) if origin is not None else None
        with self._changed:
            until = time.monotonic() + ANSWER_S
            while not wanted <= set(answers) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            counts = [*answers.values(), *([own] if own is not None else [])]
        return {
            "nodes": len(counts),
            "peers": sum(asked for asked, _ in counts),
            "acks": sum(answered for _, answered in counts),
        }

    def alarms_after(self, node: int, after: int, wait_s: float) -> tuple[int, list[Message]]:
        """(number of the newest alarm, those for `node` since number `after`), as soon as there is one."""
        until = time.monotonic() + wait_s
        with self._changed:
            while True:
                found = [each for number, origin, each in self._alarms if number > after and origin != node]
                left = until - time.monotonic()
                if found or left <= 0:
                    return self._sequence, found
                self._changed.wait(left)

    def answer(self, node: int, identifier: str, asked: int, answered: int) -> None:
        """A node says how many of its ranks were asked and have answered."""
        with self._changed:
            if identifier in self._answers:
                self._answers[identifier][node] = (asked, answered)
                self._changed.notify_all()

    # -- files

    def append(self, node: int, target: str, offset: int, data: bytes) -> int:
        """Append to a file of this attempt; its new size.

        Raises:
            RefusedError: 400 not a name that members may write, 403 it belongs to another node, 409 `offset` is not its
                size, 507 too much in all.
            OSError: it cannot be written.
        """
        if not _TARGET.fullmatch(target):
            raise RefusedError(400)
        path = self._folder / target
        with self._changed:
            if self._bytes + len(data) > MAX_BYTES:
                raise RefusedError(507)
            if self._owners.get(target, node) != node or (target not in self._owners and path.exists()):
                raise RefusedError(403)
            self._owners[target] = node
            self._bytes += len(data)
            if node in self.members:
                self.members[node].heard = time.monotonic()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if offset != size:
                raise RefusedError(409, size)
            return size + os.write(descriptor, data)
        finally:
            os.close(descriptor)


def whole(value: Mapping[str, Any], name: str) -> int:
    """An integer field of a message.

    Raises:
        RefusedError: 400, it is not there or is no integer.
    """
    found = value.get(name)
    if isinstance(found, bool) or not isinstance(found, int):
        raise RefusedError(400)
    return found
