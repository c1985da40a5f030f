import contextlib
import http.client
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.agent.nodes import ask, has_other_nodes
from oomscope.launch.nodes import member as members
from oomscope.launch.nodes import switchboard
from oomscope.launch.nodes.link import NodeLink
from oomscope.launch.nodes.member import Connection, Member, clock_offset
from oomscope.launch.nodes.server import HubServer
from oomscope.launch.nodes.switchboard import RefusedError, Switchboard
from oomscope.live.state import clock_offsets
from oomscope.store.tail import read_records


def wait_for(condition, seconds=20.0):
    """Until `condition` holds; a test fails when it never does."""
    done = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        done.wait(0.02)
    raise AssertionError("it never came to hold")


@pytest.fixture
def connect():
    """connect(hub address) -> Connection, closed at the end."""
    with contextlib.ExitStack() as opened:
        yield lambda address: opened.enter_context(
            contextlib.closing(Connection(address["url"], address["token"]))
        )


@pytest.fixture
def make_member(hub):
    """make_member(folder, node=1, deliver=…, notes=…) -> Member of `hub`, closed at the end."""
    with contextlib.ExitStack() as opened:

        def make(folder, node=1, deliver=lambda message: (1, 1), notes=None):
            (folder / "procs").mkdir(parents=True, exist_ok=True)
            notes = [] if notes is None else notes
            member = Member(
                folder, hub.address, node=node, session="/sessions/b", deliver=deliver, note=notes.append
            )
            opened.callback(member.close)
            return member

        yield make


# -- who has other nodes


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        ({"world_size": 4, "local_world_size": 2}, True),
        ({"world_size": 4, "local_world_size": 4}, False),
        ({"world_size": 1, "local_world_size": None}, False),
        ({"world_size": 8, "local_world_size": None}, False),
        ({}, False),
    ],
)
def test_other_nodes_exist_when_the_launcher_says_so(identity, expected):
    assert has_other_nodes(identity) is expected


# -- files


def test_records_of_a_member_are_appended_once_and_whole(hub, tmp_path, make_member):
    folder = tmp_path / "b"
    member = make_member(folder)
    records = folder / "procs" / "r00002-nodeB-7.jsonl"
    records.write_bytes(b'{"k":"hello"}\n')
    member.push()
    with records.open("ab") as stream:
        stream.write(b'{"k":"step"}\n')
    member.push()
    member.push()
    assert (hub.folder / "procs" / records.name).read_bytes() == records.read_bytes()


def test_a_member_goes_on_where_the_hub_says_that_its_copy_ends(hub, tmp_path, make_member):
    folder = tmp_path / "b"
    first = make_member(folder)
    records = folder / "procs" / "r00002-nodeB-7.jsonl"
    records.write_bytes(b"one\n")
    first.push()
    records.write_bytes(b"one\ntwo\n")
    again = make_member(folder)  # it knows nothing of what was sent
    again.push()
    again.push()
    assert (hub.folder / "procs" / records.name).read_bytes() == b"one\ntwo\n"


def test_large_snapshots_and_logs_stay_on_their_node(hub, tmp_path, monkeypatch, make_member):
    monkeypatch.setattr(members, "MAX_SNAPSHOT_BYTES", 10)
    folder = tmp_path / "b"
    member = make_member(folder)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "r00002-step000003-oom.pickle").write_bytes(b"123456789")
    (folder / "snapshots" / "r00003-step000003-oom.pickle").write_bytes(b"12345678901")
    (folder / "snapshots" / "r00003-step000003-peer-oom.pickle").write_bytes(b"1")
    (folder / "logs").mkdir()
    (folder / "logs" / "launcher.log").write_bytes(b"1")
    member.push()
    found = sorted(path.name for path in hub.folder.rglob("*") if path.is_file())
    assert found == ["r00002-step000003-oom.pickle"]


def test_the_files_of_a_host_are_told_apart(hub, tmp_path, make_member):
    """Two nodes may have the same name: containers often do."""
    (hub.folder / "host").mkdir()
    (hub.folder / "host" / "box.jsonl").write_bytes(b"hub\n")
    folder = tmp_path / "b"
    member = make_member(folder)
    (folder / "host").mkdir()
    (folder / "host" / "box.jsonl").write_bytes(b"member\n")
    (folder / "elastic.jsonl").write_bytes(b"{}\n")
    member.push()
    assert (hub.folder / "host" / "box.jsonl").read_bytes() == b"hub\n"
    assert (hub.folder / "host" / "box-node1.jsonl").read_bytes() == b"member\n"
    assert (hub.folder / "elastic-node1.jsonl").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../x.jsonl",
        "procs/../../x.jsonl",
        "procs/.hidden.jsonl",
        "procs/a/b.jsonl",
        "/etc/passwd",
        "state.json",
        "boot/agent.json",
        "procs/a.jsonl\n",
        "snapshots/x.sh",
        "",
    ],
)
def test_names_outside_of_what_members_write_are_refused(hub, name):
    with pytest.raises(RefusedError) as caught:
        hub.board.append(1, name, 0, b"x")
    assert caught.value.status == 400


def test_a_member_cannot_touch_files_that_are_not_its_own(hub):
    (hub.folder / "procs").mkdir()
    (hub.folder / "procs" / "r00000-a-1.jsonl").write_bytes(b"hub\n")
    hub.board.append(1, "procs/r00001-b-1.jsonl", 0, b"one\n")
    for node, name, offset in ((1, "procs/r00000-a-1.jsonl", 4), (2, "procs/r00001-b-1.jsonl", 4)):
        with pytest.raises(RefusedError) as caught:
            hub.board.append(node, name, offset, b"x")
        assert caught.value.status == 403
    (hub.folder / "procs" / "link.jsonl").symlink_to(hub.folder / "nowhere")
    with pytest.raises(OSError, match="symbolic"):
        hub.board.append(1, "procs/link.jsonl", 0, b"x")
    assert not (hub.folder / "nowhere").exists()


def test_what_members_may_append_is_bounded(hub, monkeypatch):
    monkeypatch.setattr(switchboard, "MAX_BYTES", 10)
    hub.board.append(1, "procs/a.jsonl", 0, b"12345678")
    with pytest.raises(RefusedError) as caught:
        hub.board.append(1, "procs/a.jsonl", 8, b"123")
    assert caught.value.status == 507


# -- requests


def test_without_the_token_nothing_is_answered(hub, connect):
    for token in ("", "Secret", "secrets", "ümlaut".encode().decode("latin-1")):
        status, reply = connect({**hub.address, "token": token}).request("GET", "/time")
        assert (status, reply) == (401, {})
    assert connect(hub.address).request("GET", "/time")[0] == 200


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """A connection to one hub for all examples of hypothesis."""
    board = Switchboard(
        tmp_path_factory.mktemp("hub"), deliver=lambda message: (0, 0), note=lambda text: None
    )
    server = HubServer("127.0.0.1", "t", board)
    connection = Connection(f"http://127.0.0.1:{server.port}", "t")
    with contextlib.closing(server), contextlib.closing(connection):
        yield connection


@given(body=st.binary(max_size=200), path=st.sampled_from(["/join", "/alarm", "/answer", "/end"]))
def test_rubbish_in_a_body_is_refused_and_the_hub_lives_on(lasting, body, path):
    assert lasting.request("POST", path, body)[0] == 400
    assert lasting.request("GET", "/time")[0] == 200


def test_a_body_that_is_too_large_is_not_read(hub):
    connection = http.client.HTTPConnection("127.0.0.1", hub.server.port, timeout=10)
    connection.putrequest("PUT", "/file?node=1&name=procs/a.jsonl&offset=0")
    connection.putheader("Authorization", "Bearer secret")
    connection.putheader("Content-Length", str(5 << 20))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


# -- clocks


def test_the_clock_is_measured_within_its_own_error(hub, connect):
    offset, error = clock_offset(connect(hub.address))
    assert abs(offset) <= error  # both clocks are the same one


def test_a_skewed_clock_is_set_right(hub, monkeypatch, connect):
    """A node that is 30 s behind measures +30 s, and sends and hears alarms in its own time."""
    behind = 30_000_000_000

    class Clock:
        monotonic, monotonic_ns = (
            staticmethod(members.time.monotonic),
            staticmethod(members.time.monotonic_ns),
        )
        time_ns = staticmethod(lambda real=members.time.time_ns: real() - behind)

    monkeypatch.setattr(members, "time", Clock)
    offset, error = clock_offset(connect(hub.address))
    assert abs(offset - behind) <= error


def test_the_last_measurement_of_each_node_counts():
    records = [
        {"k": "node", "node": 1, "offset_ns": 5},
        {"k": "node", "node": 2, "offset_ns": -7},
        {"k": "node", "node": 1, "offset_ns": 6},
        {"k": "node", "node": "x", "offset_ns": 6},
        {"k": "node", "node": 3},
        {"k": "node_end", "node": 3, "offset_ns": 1},
    ]
    assert clock_offsets(records) == {1: 6, 2: -7}


# -- alarms


def test_an_alarm_reaches_every_other_node_and_counts_their_ranks(hub, tmp_path, make_member):
    heard = {1: [], 2: []}
    running = []
    for node in (1, 2):
        member = make_member(
            tmp_path / str(node), node, lambda message, node=node: heard[node].append(message) or (4, 3)
        )
        member.start()
        running.append(member)
    wait_for(lambda: len(hub.board.members) == 2)
    counts = running[0].alarm({"cmd": "dump", "id": "x", "reason": "oom", "rank": 5, "t": 10})
    assert counts == {"nodes": 2, "peers": 6, "acks": 5}
    assert [message["id"] for message in heard[2]] == ["x"]
    assert heard[1] == []
    assert [message["rank"] for message in hub.delivered] == [5]
    counts = hub.board.alarm({"id": "y"}, None)
    assert counts == {"nodes": 2, "peers": 8, "acks": 6}
    for member in running:
        member.finish(1, 10)
    assert all(each.exit_code == 1 for each in hub.board.members.values())


def test_a_node_that_does_not_answer_costs_a_bounded_time(hub, monkeypatch):
    monkeypatch.setattr(switchboard, "ANSWER_S", 0.1)
    hub.board.join(1, "b", "/s", 0, 0)
    assert hub.board.alarm({"id": "x"}, None) == {"nodes": 0, "peers": 0, "acks": 0}


def test_a_node_that_joins_late_hears_no_old_alarm(hub, tmp_path, make_member):
    hub.board.alarm({"id": "old"}, None)
    heard = []
    member = make_member(tmp_path / "b", deliver=lambda message: heard.append(message["id"]) or (0, 0))
    member.start()
    wait_for(lambda: hub.board.members)
    hub.board.join(1, "b", "/s", 0, 0)

    def asked():
        hub.board.alarm({"id": "new"}, None)
        return heard

    wait_for(asked)
    assert set(heard) == {"new"}
    member.finish(0, 10)


def test_a_hub_that_is_gone_costs_one_note(hub, tmp_path, monkeypatch, make_member):
    monkeypatch.setattr(members, "_RETRY_S", 0.01)
    notes = []
    member = make_member(tmp_path / "b", notes=notes)
    hub.server.close()
    member.start()
    wait_for(lambda: notes)
    assert member.alarm({"id": "x"}) == {}
    member.finish(0, 10)
    assert len(notes) == 1
    assert "does not answer" in notes[0]


# -- the supervisor's socket


def link(tmp_path, rundir, name, notes):
    folder = tmp_path / name
    (folder / "procs").mkdir(parents=True)
    return NodeLink(folder, rundir, tmp_path / "session", notes.append).start()


def test_ranks_bring_their_supervisors_together(tmp_path, rundir, rank_socket):
    """The whole way: hub, join, an alarm from the member's side, and the rank on the hub's side that hears it."""
    other = os.path.join(rundir, "b")
    os.mkdir(other)
    notes = []
    hub_link, member_link = link(tmp_path, rundir, "a", notes), link(tmp_path, other, "b", notes)
    try:
        hub = ask(rundir, {"cmd": "hub", "address": "localhost", "node": 0})
        assert hub["url"].startswith("http://localhost:")
        assert ask(rundir, {"cmd": "hub", "address": "localhost", "node": 0}) == hub
        assert ask(other, {"cmd": "join", "node": 1, "hub": hub}) == {"joined": True}
        wait_for(lambda: any("has joined" in each for each in notes))

        def answer():
            data, sender = rank_socket.recvfrom(4096)
            rank_socket.sendto(json.dumps({"ack": json.loads(data)["id"]}).encode(), sender)

        rank = threading.Thread(target=answer)
        rank.start()
        reply = ask(other, {"cmd": "alarm", "id": "z", "reason": "oom", "rank": 3, "t": 1})
        rank.join()
        assert reply == {"ack": "z", "nodes": 1, "peers": 1, "acks": 1}
        assert (hub_link.is_hub, member_link.is_member, member_link.node) == (True, True, 1)
        member_link.finish(1)
        wait_for(lambda: any("ended with exit code 1" in each for each in notes))
    finally:
        hub_link.finish(1)
    records = read_records(tmp_path / "a" / "nodes.jsonl")
    assert [(each["k"], each["node"]) for each in records] == [("node", 1), ("node_end", 1)]


def test_an_address_of_another_host_is_told_and_harmless(tmp_path, rundir):
    notes = []
    one = link(tmp_path, rundir, "a", notes)
    try:
        assert ask(rundir, {"cmd": "hub", "address": "192.0.2.1", "node": 0}) == {}
    finally:
        one.finish(0)
    assert not one.is_hub
    assert "cannot report here" in notes[0]


def test_a_supervisor_ignores_what_it_does_not_know(tmp_path, rundir):
    notes = []
    one = link(tmp_path, rundir, "a", notes)
    try:
        assert ask(rundir, {"cmd": "join", "node": 1, "hub": {"url": "ftp://x", "token": 1}}) == {
            "joined": False
        }
        assert ask(rundir, {"cmd": "alarm", "id": 1}) == {"ack": 1, "nodes": 0}
    finally:
        one.finish(0)
    assert ask(rundir, {"cmd": "hub"}) is None
