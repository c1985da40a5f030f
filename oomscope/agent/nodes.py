"""Brings the supervisors of a job's nodes together, through the store that the job itself meets in.

Each node has a supervisor of its own, outside the job. Rank 0 asks its supervisor where the others can reach it and
leaves the answer in the job's store; the first rank of every other node hands it to its own supervisor. From then on
the supervisors talk to each other and the ranks have nothing more to do with it: no rank blocks in the store, where a
thread would print warnings, or abort the interpreter, when the store ends before it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from ..protocol import layout
from ..protocol.messages import MAX_MESSAGE, datagram, parse
from ..protocol.records import Identity
from .guard import guarded

#: Where rank 0 leaves its supervisor's address; the job's store keeps one set of keys per restart.
KEY = "oomscope/hub"
#: How long the first rank of another node waits for that, and how long a supervisor may take to answer.
_PATIENCE_S = 60.0
_ANSWER_S = 5.0
_PERIOD_S = 0.25


def has_other_nodes(identity: Identity) -> bool:
    """Whether ranks of this job run on other hosts, as far as the launcher told."""
    world, local = identity.get("world_size") or 1, identity.get("local_world_size")
    return world > 1 and local is not None and local < world


def introduce(identity: Identity, rundir: str) -> None:
    """Start the introduction, once the process group exists; only the first rank of each node does anything."""
    if identity.get("local_rank") != 0 or not has_other_nodes(identity):
        return
    store = sys.modules["torch.distributed.distributed_c10d"]._get_default_store()
    threading.Thread(
        target=_introduce, args=(store, identity, rundir), name="oomscope-nodes", daemon=True
    ).start()


@guarded("nodes")
def _introduce(store: Any, identity: Identity, rundir: str) -> None:
    node = identity.get("node_rank")
    if identity.get("rank") == 0:
        address = os.environ.get("MASTER_ADDR", "")
        hub = ask(
            rundir, {"cmd": "hub", "address": address, "node": node or 0, "world_size": _world(identity)}
        )
        store.set(KEY, json.dumps(hub or {}))
        return
    until = time.monotonic() + _PATIENCE_S
    while not store.check([KEY]):
        if time.monotonic() > until:
            return
        time.sleep(_PERIOD_S)
    hub = parse(bytes(store.get(KEY))[:MAX_MESSAGE])
    if hub:
        ask(rundir, {"cmd": "join", "node": node if node is not None else identity.get("rank"), "hub": hub})


def _world(identity: Identity) -> int:
    return identity.get("world_size") or 1


def ask(rundir: str, question: dict[str, Any]) -> dict[str, Any] | None:
    """One question to the supervisor of this node; None without one, or without an answer."""
    target = os.path.join(rundir, layout.SUPERVISOR_SOCKET)
    if not os.path.exists(target):
        return None
    own = os.path.join(rundir, f"m{os.getpid()}.sock")
    with datagram(own) as sender:
        try:
            sender.settimeout(_ANSWER_S)
            sender.sendto(json.dumps(question).encode(), target)
            return parse(sender.recv(MAX_MESSAGE))
        except OSError:  # it is gone, or a timeout
            return None
        finally:
            os.unlink(own)
