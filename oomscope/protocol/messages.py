"""Messages between the ranks of a node and their supervisor: one JSON object a datagram, in a private folder.

What arrives is data from outside: bounded, and parsed as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

#: Longest message that is read, in bytes.
MAX_MESSAGE = 4096


def broadcast(sender: socket.socket, folder: str, message: dict[str, Any], *, skip: str = "") -> int:
    """Send `message` to every agent's socket in `folder`; how many took it.

    A dead one refuses, and is left out.
    """
    data = json.dumps(message).encode()
    sent = 0
    sender.setblocking(False)
    for name in sorted(os.listdir(folder)):
        if name == skip or not name.endswith(".sock") or not name[0].isdigit():
            continue
        try:
            sender.sendto(data, os.path.join(folder, name))
            sent += 1
        except OSError:
            continue
    return sent


def collect(sender: socket.socket, asked: int, identifier: str, until: float) -> list[dict[str, Any]]:
    """The answers to a broadcast, until all have come or `until` (monotonic) has passed."""
    answers: list[dict[str, Any]] = []
    sender.settimeout(0.05)
    while len(answers) < asked and time.monotonic() < until:
        try:
            message = parse(sender.recv(MAX_MESSAGE))
        except OSError:  # a timeout is one too
            continue
        if message is not None and message.get("ack") == identifier:
            answers.append(message)
    return answers


def datagram(path: str) -> socket.socket:
    """A datagram socket with an address of its own, so that it can be answered.

    Raises:
        OSError: the address is taken or its folder is gone.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        connection.bind(path)
    except OSError:
        connection.close()
        raise
    return connection


def parse(data: bytes) -> dict[str, Any] | None:
    """One message; None when it is not a JSON object."""
    try:
        message = json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
