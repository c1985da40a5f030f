"""The supervisor's socket: where ranks bring alarms, and where they bring the nodes of their job together."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oomscope.launch.nodes.member import Member
from oomscope.launch.nodes.server import HubServer
from oomscope.launch.nodes.switchboard import Message, Switchboard
from oomscope.protocol import layout, messages

#: How long the ranks of this node may take to dump for an alarm from elsewhere.
_DUMP_S = 1.5
#: At the end: how long a hub waits for members that still write, and for those that went quiet.
_OTHERS_S = 15.0
_QUIET_S = 3.0
_FLUSH_S = 5.0


class NodeLink:
    """Listens beside one launch. Nothing of it can make the launch fail.

    Attributes:
        node: number of this node; 0 until a rank has said otherwise.
        is_hub: other nodes may join here.
        is_member: this node has been told where the hub is.
    """

    def __init__(self, attempt_dir: Path, rundir: str, session: Path, note: Callable[[str], None]) -> None:
        self.node = 0
        self._folder = attempt_dir
        self._rundir = rundir
        self._session = session
        self._note = note
        self._server: HubServer | None = None
        self._board: Switchboard | None = None
        self._token = secrets.token_hex(16)
        self._member: Member | None = None
        self._stop = False
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_hub(self) -> bool:
        return self._board is not None

    @property
    def is_member(self) -> bool:
        return self._member is not None

    def start(self) -> NodeLink:
        """Listen; without a folder for sockets there is no link."""
        with contextlib.suppress(OSError):
            self._socket = messages.datagram(os.path.join(self._rundir, layout.SUPERVISOR_SOCKET))
            self._thread = threading.Thread(target=self._run, name="oomscope-link", daemon=True)
            self._thread.start()
        return self

    def finish(self, exit_code: int) -> None:
        """After the launcher's end: gather what the other nodes still write, or send them what is left here."""
        if self._board is not None:
            self._board.wait_for_the_others(_QUIET_S, _OTHERS_S)
        if self._member is not None:
            self._member.finish(exit_code, _FLUSH_S)
        self._stop = True
        if self._thread is not None:
            self._thread.join(1.0)
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._server.close()

    # -- messages of ranks

    def _run(self) -> None:
        assert self._socket is not None
        while not self._stop:
            if not select.select([self._socket], [], [], 0.2)[0]:
                continue
            try:
                data, sender = self._socket.recvfrom(messages.MAX_MESSAGE)
            except OSError:
                continue
            message = messages.parse(data)
            if message is None:
                continue
            # An alarm waits for other nodes and must not keep the next one.
            threading.Thread(target=self._answer, args=(message, sender), daemon=True).start()

    def _answer(self, message: Message, sender: str) -> None:
        handlers = {"hub": self._open_hub, "join": self._join, "alarm": self._alarm}
        handler = handlers.get(str(message.get("cmd")))
        if handler is None:
            return
        reply = handler(message)
        if sender and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(json.dumps(reply).encode(), sender)

    def _open_hub(self, message: Message) -> Message:
        """Rank 0 runs here, and other nodes exist."""
        if self._server is None:
            board = Switchboard(self._folder, deliver=self._deliver, note=self._note)
            try:
                self._server = HubServer(str(message.get("address") or "localhost"), self._token, board)
            except OSError as error:
                self._note(f"other nodes cannot report here: {error.strerror or error}")
                return {}
            self._board = board
        address = message.get("address") or "localhost"
        host = f"[{address}]" if ":" in str(address) else address
        return {"url": f"http://{host}:{self._server.port}", "token": self._token}

    def _join(self, message: Message) -> Message:
        """Rank 0 runs elsewhere, and its node listens at message["hub"]."""
        node, hub = message.get("node"), message.get("hub")
        if self._member is None and isinstance(node, int) and isinstance(hub, dict):
            self.node = node
            with contextlib.suppress(ValueError):
                self._member = Member(
                    self._folder,
                    hub,
                    node=node,
                    session=str(self._session),
                    deliver=self._deliver,
                    note=self._note,
                )
                self._member.start()
        return {"joined": self._member is not None}

    def _alarm(self, message: Message) -> Message:
        """A rank here is dying: tell the ranks on other nodes, and the rank how many have answered."""
        passed = {**message, "cmd": "dump"}
        counts: Message = {}
        if self._member is not None:
            counts = self._member.alarm(passed)
        elif self._board is not None:
            counts = self._board.alarm(passed, None)
        return {"ack": message.get("id"), "nodes": 0, **counts}

    def _deliver(self, message: Message) -> tuple[int, int]:
        """Hand an alarm from elsewhere to the ranks of this node; (asked, answered)."""
        passed: dict[str, Any] = {
            "cmd": "dump",
            **{name: message.get(name) for name in ("id", "reason", "rank", "t")},
        }
        name = os.path.join(self._rundir, f"n{secrets.token_hex(4)}.sock")
        try:
            with messages.datagram(name) as sender:
                try:
                    asked = messages.broadcast(sender, self._rundir, passed)
                    until = time.monotonic() + _DUMP_S
                    return asked, len(messages.collect(sender, asked, str(passed["id"]), until))
                finally:
                    os.unlink(name)
        except OSError:
            return 0, 0
