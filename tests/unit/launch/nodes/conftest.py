"""A hub in this process, with an HTTP port on the loopback address."""

import os
import shutil
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from oomscope.launch.nodes.server import HubServer
from oomscope.launch.nodes.switchboard import Switchboard


@dataclass
class Hub:
    folder: Path
    board: Switchboard
    server: HubServer
    delivered: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    @property
    def address(self):
        return {"url": f"http://127.0.0.1:{self.server.port}", "token": "secret"}


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    delivered, notes = [], []

    def deliver(message):
        delivered.append(message)
        return 2, 2

    board = Switchboard(folder, deliver=deliver, note=notes.append)
    server = HubServer("127.0.0.1", "secret", board)
    yield Hub(folder, board, server, delivered, notes)
    server.close()


@pytest.fixture
def rundir():
    """A short path: socket addresses have room for about a hundred bytes."""
    path = tempfile.mkdtemp(prefix="oom", dir="/tmp")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def rank_socket(rundir):
    """A rank's socket in `rundir`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
        rank.bind(os.path.join(rundir, "99999999.sock"))
        rank.settimeout(10)
        yield rank
