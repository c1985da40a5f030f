"""One rank's out-of-memory error, told to the others.

Each says where it is and what it holds, before anything is torn down.

Every agent binds a datagram socket in a private local folder. The rank that fails sends one message to each
and waits, at most three seconds, until they have answered; a dead peer refuses at once. There is no server. A
viewer's "dump now" is the same message. What arrives is data from outside: bounded, parsed as JSON, and at
worst a needless dump, which is rate-limited.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import Any, Callable

from ..protocol import layout
from ..protocol.messages import MAX_MESSAGE, broadcast, collect, datagram, parse
from .guard import guarded
from .recorder import Frame, stack_of

#: How long a dying rank waits for the others.
WAIT_S = 3.0
#: Dumps that nobody of the job asked for are answered this often at most.
MIN_INTERVAL_S = 10.0
_MAX_FRAMES = 32


class Peers:
    """This process's socket, and what it does when a message comes.

    Args:
        folder: where all sockets of the attempt are.
        emit: takes records.
        own_folder: prefix of our own frames.
        facts: gives the counters that go into a dump.
        snapshot: writes an allocator snapshot for a reason, or None.
    """

    def __init__(
        self,
        folder: str,
        emit: Callable[[dict[str, Any]], None],
        *,
        own_folder: str,
        facts: Callable[[], dict[str, Any]],
        snapshot: Callable[[str], str | None],
    ) -> None:
        self.socket: socket.socket | None = None
        self.has_other_nodes = False
        self._folder = folder
        self._path = os.path.join(folder, f"{os.getpid()}.sock")
        self._emit = emit
        self._own = own_folder
        self._facts = facts
        self._snapshot = snapshot
        self._seen: set[str] = set()
        self._last_dump = 0.0

    @guarded("peers")
    def open(self) -> bool:
        """Bind the socket; False where it cannot be (the folder is gone: no supervisor, another host)."""
        if not os.path.isdir(self._folder):
            return False
        self.socket = datagram(self._path)
        self.socket.setblocking(False)
        return True

    @guarded("peers")
    def receive(self) -> None:
        """Take one message; called by the agent's thread when there is one."""
        if self.socket is None:
            return
        try:
            data, sender = self.socket.recvfrom(MAX_MESSAGE)
        except OSError:
            return
        message = parse(data)
        if message is None or message.get("cmd") != "dump":
            return
        identifier = str(message.get("id"))[:64]
        if self._may_dump(identifier, message):
            self.dump(identifier, message)
        if sender:
            answer = json.dumps({"ack": identifier, "pid": os.getpid()}).encode()
            try:
                self.socket.sendto(answer, sender)
            except OSError:
                return

    def dump(self, identifier: str, message: dict[str, Any]) -> None:
        """Record every thread's stack and the counters, and a snapshot where there is a device."""
        sent = message.get("t")
        origin = message.get("rank")
        self._emit(
            {
                "k": "dump",
                "id": identifier,
                "reason": str(message.get("reason"))[:40],
                "origin": origin if isinstance(origin, int) else None,
                "delay_ns": time.time_ns() - sent if isinstance(sent, int) else None,
                "stacks": self.stacks(),
                **self._facts(),
            }
        )
        self._snapshot(f"peer-{str(message.get('reason'))[:20]}")

    def stacks(self) -> list[dict[str, Any]]:
        """Each thread's name and frames, innermost first; our own thread is left out."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        found: list[dict[str, Any]] = []
        for ident, frame in sys._current_frames().items():
            frames: list[Frame] = stack_of(frame, self._own)[:_MAX_FRAMES]
            if ident != threading.get_ident() and frames:
                found.append({"thread": names.get(ident, str(ident)), "frames": frames})
        return found

    @guarded("alarm")
    def alarm(self, reason: str, rank: int | None) -> None:
        """Ask all peers to dump, wait for their answers, and record how many came."""
        started = time.monotonic()
        identifier = f"{os.getpid()}-{time.time_ns()}"
        self._seen.add(identifier)
        message = {"cmd": "dump", "id": identifier, "reason": reason, "rank": rank, "t": time.time_ns()}
        own = os.path.join(self._folder, f"a{os.getpid()}.sock")
        with datagram(own) as sender:
            sender.setblocking(False)  # a receiver that is stopped must not hold up a rank that is dying
            try:
                told = self._tell_other_nodes(sender, message)
                asked = broadcast(sender, self._folder, message, skip=os.path.basename(self._path))
                answers = collect(sender, asked + told, identifier, started + WAIT_S)
            finally:
                os.unlink(own)
        waited = time.monotonic() - started
        beyond = next((each for each in answers if "nodes" in each), None)
        acks = len(answers) - (beyond is not None)
        record: dict[str, Any] = {
            "k": "alarm",
            "id": identifier,
            "reason": reason,
            "peers": asked,
            "acks": acks,
        }
        if told:
            record["elsewhere"] = {name: (beyond or {}).get(name) for name in ("nodes", "peers", "acks")}
        self._emit({**record, "waited_ms": round(waited * 1000, 1)})

    def _tell_other_nodes(self, sender: socket.socket, message: dict[str, Any]) -> int:
        """Hand the alarm to the supervisor, which passes it on; 1 when it took it."""
        if not self.has_other_nodes:
            return 0
        data = json.dumps({**message, "cmd": "alarm"}).encode()
        try:
            sender.sendto(data, os.path.join(self._folder, layout.SUPERVISOR_SOCKET))
        except OSError:
            return 0
        return 1

    def close(self) -> None:
        """At the end of the process: take the socket away."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
            try:
                os.unlink(self._path)
            except OSError:
                return

    def after_fork(self) -> None:
        """In a forked child: the socket is the parent's."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def _may_dump(self, identifier: str, message: dict[str, Any]) -> bool:
        if identifier in self._seen:
            return False
        now = time.monotonic()
        if message.get("reason") != "oom" and now - self._last_dump < MIN_INTERVAL_S:
            return False
        if len(self._seen) > 100:
            return False
        self._seen.add(identifier)
        self._last_dump = now
        return True
