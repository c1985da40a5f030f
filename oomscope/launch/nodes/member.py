"""The side of a node that is not the hub: it measures its clock, hears alarms, and sends what its ranks write."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oomscope.launch.nodes.switchboard import Message
from oomscope.protocol import layout
from oomscope.protocol.messages import parse

#: Seconds between two looks for new records, and between two measurements of the clock.
PUSH_S = 0.5
_CLOCK_S = 60.0
_PINGS = 9
_CHUNK = 1 << 20
#: The snapshot of the rank that ran out of memory goes along when it is not larger.
MAX_SNAPSHOT_BYTES = 64 << 20
_WAIT_MS = 20_000
_TIMEOUT_S = 30.0
_RETRY_S = 1.0
#: What a look or a request may raise while the network or the hub is in trouble.
_TROUBLE = (OSError, http.client.HTTPException)


class Connection:
    """One kept-alive connection to the hub, opened again after an error. One thread uses it."""

    def __init__(self, url: str, token: str, timeout_s: float = _TIMEOUT_S) -> None:
        """`url` is http://HOST:PORT.

        Raises:
            ValueError: it is not.
        """
        address = urllib.parse.urlsplit(url)
        if address.scheme != "http" or not address.hostname or not address.port:
            raise ValueError(url)
        self._http = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
        self._headers = {"Authorization": f"Bearer {token}"}

    def request(
        self, method: str, path: str, body: bytes | None = None, **query: object
    ) -> tuple[int, Message]:
        """(HTTP status, the reply's object).

        Raises:
            OSError, http.client.HTTPException: no connection, or it broke.
        """
        target = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        try:
            if self._http.sock is None:
                self._http.connect()
                opened: Any = self._http.sock
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._http.request(method, target, body, self._headers)
            reply = self._http.getresponse()
            return reply.status, parse(reply.read()) or {}
        except _TROUBLE:
            self._http.close()
            raise

    def post(self, path: str, **value: Any) -> Message:
        """The reply's object.

        Raises:
            OSError, http.client.HTTPException: as `request`, and when the hub refuses.
        """
        status, reply = self.request("POST", path, json.dumps(value).encode())
        if status != 200:
            raise OSError(f"the hub answered {status}")
        return reply

    def abort(self) -> None:
        """From another thread: end a request that waits."""
        sock: Any = self._http.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._http.close()


def clock_offset(connection: Connection) -> tuple[int, int]:
    """(ns to add to this host's clock to get the hub's, how wrong that may be).

    Of several round trips the shortest counts: the hub read its clock somewhere in the middle of it, so half of it
    bounds the error.

    Raises:
        OSError, http.client.HTTPException: the hub does not answer.
    """
    best: tuple[int, int] | None = None
    for _ in range(_PINGS):
        sent, began = time.time_ns(), time.monotonic_ns()
        _, reply = connection.request("GET", "/time")
        took = time.monotonic_ns() - began
        there = reply.get("t")
        if isinstance(there, int) and (best is None or took < 2 * best[1]):
            best = there - (sent + took // 2), took // 2
    if best is None:
        raise OSError("the hub told no time")
    return best


class Member:
    """Runs two threads until `finish`: one hears alarms, one sends records.

    Args:
        attempt_dir: whose records are sent.
        hub: {"url", "token"} as the job's store had it.
        node: number of this node.
        session: path of this node's session, for the hub's journal.
        deliver: hands an alarm to the ranks here; returns (asked, answered).
        note: hears what happens, one sentence each.
    """

    def __init__(
        self,
        attempt_dir: Path,
        hub: Message,
        *,
        node: int,
        session: str,
        deliver: Callable[[Message], tuple[int, int]],
        note: Callable[[str], None],
    ) -> None:
        """Prepare.

        Raises:
            ValueError: `hub` is not what a hub leaves in the store.
        """
        self.node = node
        self.offset_ns = 0
        self._url, self._token = str(hub.get("url")), str(hub.get("token"))
        self._folder = attempt_dir
        self._session = session
        self._deliver = deliver
        self._note = note
        self._sizes: dict[Path, int] = {}
        self._refused: set[Path] = set()
        self._wake = threading.Event()
        self._exit_code: int | None = None
        self._sender, self._hearer = (Connection(self._url, self._token) for _ in range(2))
        self._threads = [
            threading.Thread(target=each, name="oomscope-node", daemon=True)
            for each in (self._send, self._hear)
        ]

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def alarm(self, message: Message) -> Message:
        """Tell the hub, in its time; its answer {"nodes", "peers", "acks"}, or {} when it cannot be reached."""
        connection = Connection(self._url, self._token, 3.0)
        try:
            return connection.post("/alarm", node=self.node, message=self._shifted(message, self.offset_ns))
        except _TROUBLE:
            return {}
        finally:
            connection.close()

    def finish(self, exit_code: int, timeout_s: float) -> None:
        """Send the rest, say how the job ended here, and stop."""
        self._exit_code = exit_code
        self._wake.set()
        self._threads[0].join(timeout_s)
        self._hearer.abort()
        self._threads[1].join(1.0)
        self.close()

    def close(self) -> None:
        """Close what no thread uses any more."""
        self._sender.close()
        self._hearer.close()

    @staticmethod
    def _shifted(message: Message, by_ns: int) -> Message:
        """The message with its time on another clock."""
        t = message.get("t")
        return {**message, "t": t + by_ns} if isinstance(t, int) else message

    # -- sending

    def _send(self) -> None:
        measured: float | None = None
        complained = False
        while True:
            last = self._exit_code is not None
            try:
                if measured is None or time.monotonic() - measured >= _CLOCK_S:
                    self._measure()
                    if measured is None:
                        self._note(
                            f"this is node {self.node}; what is seen here also goes to node 0's session"
                        )
                    measured = time.monotonic()
                self.push()
                if last:
                    self._sender.post("/end", node=self.node, exit_code=self._exit_code)
                    return
            except _TROUBLE as error:
                if not complained:
                    complained = True
                    self._note(
                        f"node 0 does not answer at {self._url} ({error}): what is seen here stays here"
                    )
            if last:
                return
            self._wake.wait(_RETRY_S if complained else PUSH_S)

    def _measure(self) -> None:
        self.offset_ns, error_ns = clock_offset(self._sender)
        self._sender.post(
            "/join",
            node=self.node,
            host=socket.gethostname(),
            session=self._session,
            offset_ns=self.offset_ns,
            error_ns=error_ns,
        )

    def push(self) -> None:
        """Send what was appended since the last time.

        Raises:
            OSError, http.client.HTTPException: the hub does not answer.
        """
        for path, name in self._files():
            if path not in self._refused:
                self._push_file(path, name)

    def _push_file(self, path: Path, name: str) -> None:
        offset = self._sizes.get(path, 0)
        for chunk in _chunks(path, offset):
            status, reply = self._sender.request(
                "PUT", "/file", chunk, node=self.node, name=name, offset=self._sizes.get(path, 0)
            )
            size = reply.get("size")
            if status not in (200, 409) or not isinstance(size, int):
                self._refused.add(path)
                self._note(f"node 0 does not take {name} (HTTP status {status})")
                return
            self._sizes[path] = size
            if status == 409:
                return

    def _files(self) -> Iterator[tuple[Path, str]]:
        """The files to send, and their names there."""
        folder = self._folder
        for kind, pattern in ((layout.PROCS_DIR, "*.jsonl"), (layout.STACKS_DIR, "*.txt")):
            for path in sorted((folder / kind).glob(pattern)):
                yield path, f"{kind}/{path.name}"
        for path in sorted((folder / layout.HOST_DIR).glob("*.jsonl")):
            yield path, f"{layout.HOST_DIR}/{path.stem}-node{self.node}.jsonl"
        elastic = folder / layout.ELASTIC_FILE
        if elastic.exists():
            yield elastic, f"elastic-node{self.node}.jsonl"
        for path in sorted((folder / layout.SNAPSHOTS_DIR).glob("*-oom.*")):
            if "-peer-" not in path.name and path.stat().st_size <= MAX_SNAPSHOT_BYTES:
                yield path, f"{layout.SNAPSHOTS_DIR}/{path.name}"

    # -- hearing

    def _hear(self) -> None:
        after: int | None = None
        while self._exit_code is None:
            try:
                status, reply = self._hearer.request(
                    "GET",
                    "/alarms",
                    node=self.node,
                    after=after if after is not None else 1 << 60,
                    wait_ms=_WAIT_MS if after is not None else 0,
                )
                if status != 200:
                    self._wake.wait(_RETRY_S)
                    continue
                newest = reply.get("newest")
                after = newest if isinstance(newest, int) else after
                for message in _messages(reply.get("alarms")):
                    asked, answered = self._deliver(self._shifted(message, -self.offset_ns))
                    counts = {"asked": asked, "answered": answered}
                    self._hearer.post("/answer", node=self.node, id=str(message.get("id")), **counts)
            except _TROUBLE:
                self._wake.wait(_RETRY_S)


def _messages(value: object) -> list[Message]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _chunks(path: Path, offset: int) -> Iterator[bytes]:
    """What follows `offset`; a file that cannot be read has nothing new."""
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            while data := stream.read(_CHUNK):
                yield data
    except OSError:
        return
