"""Jobs on two nodes: two launches on this machine, each with a home of its own, and one of them with a wrong clock.

The nodes know nothing of each other but torchrun's rendezvous, and their ranks cannot see each other's sockets.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

TRAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
marker = sys.argv[1]
for i in range(2000):
    # Whoever fails waits until the nodes have met: that takes less than a second.
    met = os.path.exists(marker)
    if rank == int(sys.argv[2]) and met:
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1 GiB.')
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if i % 10 == 9:
        print("step", i, flush=True)
    time.sleep(0.02)
"""


class Node:
    """One launch of `oomscope run`."""

    def __init__(self, number, folder, command, env):
        self.number = number
        self.home = folder / f"home{number}"
        self.output = folder / f"out{number}.txt"
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**env, "OOMSCOPE_HOME": str(self.home)},
                stdout=stream,
                stderr=stream,
            )

    @property
    def session(self) -> Path:
        (found,) = (self.home / "sessions").iterdir()
        return found

    @property
    def attempt(self) -> Path:
        return self.session / "attempts" / "001"

    def result(self):
        return json.loads((self.attempt / "result.json").read_text())

    def records(self, kind):
        """(rank, record) of all files in procs/."""
        return [
            (int(path.name[1:6]), record)
            for path in sorted((self.attempt / "procs").glob("r*.jsonl"))
            for record in map(json.loads, path.read_text().splitlines())
            if record["k"] == kind
        ]


@pytest.fixture(scope="session")
def skewed(tmp_path_factory):
    """skewed(seconds) -> environment of a process whose wall clock is off; {} for none."""
    library = tmp_path_factory.mktemp("skew") / "skew.so"

    def environment(seconds):
        if not seconds:
            return {}
        if shutil.which("gcc") is None:
            pytest.skip("no gcc to build a wrong clock")
        if not library.exists():
            source = Path(__file__).with_name("skew.c")
            subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        return {"LD_PRELOAD": str(library), "SKEW_S": str(seconds)}

    return environment


@pytest.fixture
def two_nodes(tmp_path, environment, free_port, skewed):
    """two_nodes(failing rank, skew of node 1 in seconds) -> [Node 0, Node 1] after the end."""
    nodes = []

    def run(bad, skew_s=0):
        script, marker = tmp_path / "train.py", tmp_path / "met"
        script.write_text(TRAIN)
        for number in (0, 1):
            command = [sys.executable, "-m", "oomscope", "run", "--no-fix", "--ui", "never"]
            command += ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port)]
            command += [str(script), str(marker), str(bad)]
            nodes.append(Node(number, tmp_path, command, {**environment, **skewed(skew_s if number else 0)}))
        wait_until(lambda: journal(nodes[0]), nodes)
        marker.touch()
        for node in nodes:
            node.process.wait(240)
        return nodes

    yield run
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait()


def journal(node):
    """Lines of nodes.jsonl; [] as long as nobody has joined."""
    found = list(node.home.glob("sessions/*/attempts/001/nodes.jsonl"))
    return [json.loads(line) for line in found[0].read_text().splitlines()] if found else []


def wait_until(condition, nodes, seconds=240):
    import time

    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the nodes never met"
        assert all(node.process.poll() is None for node in nodes), nodes[0].output.read_text()[-2000:]
        time.sleep(0.05)


@pytest.mark.parametrize(("bad", "skew_s"), [(2, 0), (3, 40), (1, -40)])
def test_all_ranks_of_all_nodes_dump_and_the_true_first_one_is_named(two_nodes, bad, skew_s):
    first, second = two_nodes(bad, skew_s)
    assert (first.process.returncode, second.process.returncode) == (1, 1)
    result = first.result()
    assert result["first_failing_rank"] == bad
    assert result["oom"]
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1, 2, 3]
    dumps = first.records("dump")
    assert sorted(rank for rank, _ in dumps) == sorted({0, 1, 2, 3} - {bad})
    # The machine may be busy: a quiet one needs 1 to 4 ms.
    assert all(abs(record["delay_ns"]) < 2e9 for _, record in dumps)
    ((_, alarm),) = first.records("alarm")
    assert (alarm["peers"], alarm["acks"]) == (1, 1)
    assert alarm["elsewhere"] == {"nodes": 1, "peers": 2, "acks": 2}
    (clock,) = {each["offset_ns"] for each in journal(first) if each["k"] == "node"}
    assert abs(clock + skew_s * 10**9) < 5e8
    assert second.result()["node"] == 1
    assert [rank["rank"] for rank in second.result()["ranks"]] == [2, 3]
    findings = json.loads((first.attempt / "findings.json").read_text())
    assert findings["subject"]["rank"] == bad
    assert os.stat(first.attempt / "nodes.jsonl").st_mode & 0o077 == 0


def test_without_an_error_both_nodes_end_well(tmp_path, environment, free_port):
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("range(2000)", "range(40)") + "dist.destroy_process_group()\n")
    nodes = []
    for number in (0, 1):
        command = [
            sys.executable,
            "-m",
            "oomscope",
            "run",
            "--ui",
            "never",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
        ]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}", "--rdzv-id", "two"]
        command += [str(script), str(tmp_path / "never"), "9"]
        nodes.append(Node(number, tmp_path, command, environment))
    assert [node.process.wait(240) for node in nodes] == [0, 0]
    # Which launch becomes node 0 is the rendezvous' choice.
    ranks = sorted(len(node.result()["ranks"]) for node in nodes)
    assert ranks == [1, 2]
    for node in nodes:
        assert "oomscope: " in node.output.read_text()
        assert not node.records("agent_error")
