"""The hub's HTTP port: the requests of members, checked and handed to the switchboard."""

from __future__ import annotations

import hmac
import json
import socket
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from oomscope.launch.nodes.switchboard import Message, RefusedError, Switchboard, whole
from oomscope.protocol.messages import parse

#: Largest body, in bytes; members send at most 1 MiB at a time.
MAX_BODY = 4 << 20
_MAX_WAIT_S = 30.0


class HubServer(ThreadingHTTPServer):
    """Listens in threads of its own until `close`."""

    daemon_threads = True

    def __init__(self, address: str, token: str, switchboard: Switchboard) -> None:
        """Bind to `address`, a name or number of this host, at a free port.

        Raises:
            OSError: that address is not one of this host.
        """
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self.token = token
        self.switchboard = switchboard
        super().__init__((str(target[0]), 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.1,), name="oomscope-hub", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A member that goes away in the middle of a request is no news."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    # One buffered reply and no Nagle: 0.1 ms a request in place of 44.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing goes to stderr, which is the job's."""

    def do_GET(self) -> None:
        self._serve({"/time": self._time, "/alarms": self._alarms})

    def do_POST(self) -> None:
        self._serve({"/join": self._join, "/alarm": self._alarm, "/answer": self._answer, "/end": self._end})

    def do_PUT(self) -> None:
        self._serve({"/file": self._file})

    def _serve(self, routes: dict[str, Any]) -> None:
        try:
            size = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            size = -1
        allowed = hmac.compare_digest(
            self.headers.get("Authorization", "").encode(), f"Bearer {self.server.token}".encode()
        )
        if not allowed or not 0 <= size <= MAX_BODY:
            self.close_connection = True  # the body is not read
            self._reply(401 if not allowed else 413, {})
            return
        body = self.rfile.read(size)
        address = urllib.parse.urlsplit(self.path)
        query = {name: values[0] for name, values in urllib.parse.parse_qs(address.query).items()}
        try:
            if address.path not in routes:
                raise RefusedError(404)
            self._reply(200, routes[address.path](query, body))
        except RefusedError as refusal:
            self._reply(refusal.status, {} if refusal.size is None else {"size": refusal.size})
        except OSError as error:
            self._reply(500, {"error": error.strerror})

    def _reply(self, status: int, value: Message) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    # -- one method per request

    def _time(self, query: dict[str, str], body: bytes) -> Message:
        return {"t": time.time_ns()}

    def _join(self, query: dict[str, str], body: bytes) -> Message:
        value = _object(body)
        self.server.switchboard.join(
            whole(value, "node"),
            str(value.get("host"))[:200],
            str(value.get("session"))[:1000],
            whole(value, "offset_ns"),
            whole(value, "error_ns"),
        )
        return {}

    def _alarms(self, query: dict[str, str], body: bytes) -> Message:
        wait_s = min(_number(query, "wait_ms") / 1000, _MAX_WAIT_S)
        newest, found = self.server.switchboard.alarms_after(
            _number(query, "node"), _number(query, "after"), wait_s
        )
        return {"newest": newest, "alarms": found}

    def _alarm(self, query: dict[str, str], body: bytes) -> Message:
        value = _object(body)
        message = value.get("message")
        if not isinstance(message, dict):
            raise RefusedError(400)
        return self.server.switchboard.alarm(message, whole(value, "node"))

    def _answer(self, query: dict[str, str], body: bytes) -> Message:
        value = _object(body)
        counts = whole(value, "asked"), whole(value, "answered")
        self.server.switchboard.answer(whole(value, "node"), str(value.get("id")), *counts)
        return {}

    def _end(self, query: dict[str, str], body: bytes) -> Message:
        value = _object(body)
        self.server.switchboard.end(whole(value, "node"), whole(value, "exit_code"))
        return {}

    def _file(self, query: dict[str, str], body: bytes) -> Message:
        board = self.server.switchboard
        node, offset = _number(query, "node"), _number(query, "offset")
        return {"size": board.append(node, query.get("name", ""), offset, body)}


def _object(body: bytes) -> Message:
    value = parse(body)
    if value is None:
        raise RefusedError(400)
    return value


def _number(query: dict[str, str], name: str) -> int:
    try:
        return int(query[name])
    except (KeyError, ValueError):
        raise RefusedError(400) from None
