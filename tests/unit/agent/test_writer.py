import json
import os
import subprocess
import sys

import pytest

from oomscope.agent.writer import Emitter, PendingValue
from oomscope.store.tail import Tail, read_records


@pytest.fixture
def emitter(tmp_path):
    emitter = Emitter()
    yield emitter
    emitter.close()


def start(emitter, tmp_path):
    path = str(tmp_path / "r00000-h-1.jsonl")
    emitter.open(path, {"k": "hello", "version": 1})
    return path


def test_nothing_is_written_before_the_process_is_a_rank(emitter, tmp_path):
    emitter.emit({"k": "oom", "step": 0})
    assert not emitter.flush()
    path = start(emitter, tmp_path)
    records = read_records(path)
    assert [record["k"] for record in records] == ["hello", "oom"]
    assert [record["n"] for record in records] == [0, 1]
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_critical_records_are_on_disk_when_emit_returns(emitter, tmp_path):
    path = start(emitter, tmp_path)
    emitter.emit({"k": "step", "step": 0})
    assert len(read_records(path)) == 1
    emitter.emit({"k": "exception", "type": "ValueError"})
    assert [record["k"] for record in read_records(path)] == ["hello", "step", "exception"]


def test_a_record_keeps_the_time_it_brings(emitter, tmp_path):
    path = start(emitter, tmp_path)
    emitter.emit({"k": "oom", "t": 42})
    assert read_records(path)[-1]["t"] == 42


def test_a_step_waits_for_its_loss_but_not_forever(emitter, tmp_path):
    path = start(emitter, tmp_path)
    late = PendingValue()
    emitter.emit({"k": "step", "step": 0, "loss": late})
    emitter.emit({"k": "step", "step": 1, "loss": 1.0})
    emitter.flush()
    assert len(read_records(path)) == 1
    late.value, late.ready = 0.5, True
    emitter.flush()
    assert [record["loss"] for record in read_records(path)[1:]] == [0.5, 1.0]
    emitter.emit({"k": "step", "step": 2, "loss": PendingValue()})
    emitter.emit({"k": "oom", "step": 3})
    assert [record.get("loss") for record in read_records(path)[-2:]] == [None, None]


def test_a_full_queue_is_counted(tmp_path):
    emitter = Emitter(max_queue=10)
    for step in range(25):
        emitter.emit({"k": "step", "step": step})
    path = start(emitter, tmp_path)
    tail = Tail(path)
    records = tail.poll()
    assert tail.lost == 15
    assert [record["step"] for record in records if record["k"] == "step"] == list(range(10))
    emitter.close()


def test_a_file_has_a_limit(tmp_path):
    emitter = Emitter(max_bytes=2000)
    path = start(emitter, tmp_path)
    for step in range(500):
        emitter.emit({"k": "step", "step": step})
        emitter.flush()
    assert os.path.getsize(path) < 2200
    assert emitter.lost > 0
    emitter.close()


_FULL = """
import json, resource, signal, sys
from oomscope.agent.writer import Emitter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
emitter = Emitter()
emitter.open(sys.argv[1], {"k": "hello", "version": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
for step in range(300):
    emitter.emit({"k": "step", "step": step, "pad": "x" * 40})
    if step % 7 == 6:
        emitter.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for step in range(300, 310):
    emitter.emit({"k": "step", "step": step})
    emitter.flush()
emitter.close()
"""


@pytest.mark.integration
def test_a_full_disk_costs_records_that_are_counted(tmp_path):
    """The kernel writes a part of a line at the limit, then nothing: as on a full disk."""
    path = tmp_path / "r00000-h-1.jsonl"
    subprocess.run([sys.executable, "-c", _FULL, str(path)], check=True, timeout=60)
    tail = Tail(path)
    records = tail.drain()
    steps = [record["step"] for record in records if record["k"] == "step"]
    assert steps[-10:] == list(range(300, 310))
    assert tail.bad_lines == 1
    assert tail.lost == 310 - len(steps)
    assert steps == sorted(set(steps))


def test_a_forked_child_does_not_write_into_its_parents_file(emitter, tmp_path):
    path = start(emitter, tmp_path)
    emitter.emit({"k": "step", "step": 0})
    pid = os.fork()
    if pid == 0:
        emitter.after_fork()
        emitter.emit({"k": "exception", "type": "in the child"})
        emitter.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    emitter.flush()
    assert [record["k"] for record in read_records(path)] == ["hello", "step"]


def test_odd_values_become_text(emitter, tmp_path):
    path = start(emitter, tmp_path)
    emitter.emit({"k": "fix", "detail": {1, 2}.__class__, "path": tmp_path})
    assert json.dumps(read_records(path)[-1])
