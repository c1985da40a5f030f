import json
import os
import socket
import threading

import pytest

from oomscope.agent import peers
from oomscope.protocol import layout


@pytest.fixture
def folder(tmp_path_factory):
    """A short path: socket addresses have room for about a hundred bytes."""
    import shutil
    import tempfile

    path = tempfile.mkdtemp(prefix="oom", dir="/tmp")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def agent(folder):
    records, snapshots = [], []
    agent = peers.Peers(
        folder, records.append, own_folder="/none", facts=lambda: {"step": 4}, snapshot=snapshots.append
    )
    assert agent.open()
    agent.records, agent.snapshots = records, snapshots
    yield agent
    agent.close()


def send(folder, name, message):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.bind(os.path.join(folder, name))
        sender.settimeout(2)
        sender.sendto(message, os.path.join(folder, f"{os.getpid()}.sock"))
        return sender


def test_a_request_makes_one_dump_with_stacks(folder, agent):
    message = json.dumps({"cmd": "dump", "id": "1", "reason": "oom", "rank": 1, "t": 5}).encode()
    done = threading.Event()
    training = threading.Thread(target=lambda: done.wait(30))
    training.start()
    try:
        for name in ("b1.sock", "b2.sock"):
            send(folder, name, message)
            agent.receive()
    finally:
        done.set()
        training.join()
    (dump,) = agent.records
    assert (dump["k"], dump["origin"], dump["step"]) == ("dump", 1, 4)
    assert any("test_peers.py" in frame[0] for stack in dump["stacks"] for frame in stack["frames"])
    assert agent.snapshots == ["peer-oom"]


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff", b"[]", b"{}", b'{"cmd": "rm"}', b'{"cmd": "dump"' + b" " * 5000, b'{"cmd": 1, "id": {}}'],
)
def test_rubbish_is_ignored(folder, agent, message):
    send(folder, "b.sock", message)
    agent.receive()
    assert [record["k"] for record in agent.records if record["k"] != "dump"] == []


def test_needless_dumps_are_limited(folder, agent):
    for number in range(20):
        send(
            folder,
            f"b{number}.sock",
            json.dumps({"cmd": "dump", "id": str(number), "reason": "request"}).encode(),
        )
        agent.receive()
    assert len(agent.records) == 1


def test_an_alarm_waits_for_the_living_and_not_for_the_dead(folder, agent):
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    dead.bind(os.path.join(folder, "99999998.sock"))
    dead.close()
    answers = []

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as living:
        living.bind(os.path.join(folder, "99999999.sock"))
        living.settimeout(5)

        def answer():
            data, sender = living.recvfrom(4096)
            answers.append(json.loads(data))
            living.sendto(json.dumps({"ack": answers[0]["id"], "pid": 1}).encode(), sender)

        thread = threading.Thread(target=answer)
        thread.start()
        agent.alarm("oom", 3)
        thread.join()
    (alarm,) = agent.records
    assert (alarm["peers"], alarm["acks"]) == (1, 1)
    assert alarm["waited_ms"] < 2000
    assert answers[0]["rank"] == 3
    assert sorted(os.listdir(folder)) == sorted([f"{os.getpid()}.sock", "99999998.sock", "99999999.sock"])


def test_a_peer_that_never_answers_costs_a_bounded_time(folder, agent, monkeypatch):
    monkeypatch.setattr(peers, "WAIT_S", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mute:
        mute.bind(os.path.join(folder, "99999999.sock"))
        agent.alarm("oom", 0)
    (alarm,) = agent.records
    assert (alarm["peers"], alarm["acks"]) == (1, 0)
    assert 150 < alarm["waited_ms"] < 2000


def test_without_a_folder_there_is_no_socket(tmp_path):
    agent = peers.Peers(
        str(tmp_path / "gone"), print, own_folder="", facts=dict, snapshot=lambda reason: None
    )
    assert not agent.open()
    agent.receive()
    agent.close()


def test_a_supervisor_that_is_stopped_holds_up_nobody(folder, agent, monkeypatch):
    monkeypatch.setattr(peers, "WAIT_S", 0.2)
    agent.has_other_nodes = True
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stopped:
        stopped.bind(os.path.join(folder, layout.SUPERVISOR_SOCKET))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            try:
                while True:
                    other.sendto(b"{}", os.path.join(folder, layout.SUPERVISOR_SOCKET))
            except BlockingIOError:
                pass
        agent.alarm("oom", 0)
    (alarm,) = agent.records
    assert alarm["waited_ms"] < 2000
