"""Jobs on the CPU whose own memory grows: the variable that holds it is named, whatever the source looks like."""

import os
import sys

import pytest

from oomscope.launch.command import build_command
from oomscope.launch.job import JobSpec, run_job
from oomscope.live.evidence import collect
from oomscope.live.judge import judge
from oomscope.store.session import Session

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TRAIN = """
import time
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Memory:
    def __init__(self):
        self.seen = {{}}

    def put(self, key, value):
        self.seen[key] = value


def train(memory):
    for step in range(40):
        out = model(torch.randn(8192, 64))
        loss = out.pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        {body}
        time.sleep(0.03)


train(Memory())
"""
CASES = {
    "results": ("memory.put(step, out.detach())", "container_accumulation", "self.seen[key] = value"),
    "graphs": (
        "memory.put(step, model(torch.randn(8192, 64)).sum())", "graph_accumulation", "self.seen[key] = value"
    ),
    "nothing": ("memory.put(step % 2, out.detach())", None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_holder_is_named(name, tmp_path):
    body, cause, line = CASES[name]
    script = tmp_path / f"{name}.py"
    script.write_text(TRAIN.format(body=body))
    launch = build_command([str(script)], sys.executable)
    session = Session.create(tmp_path, name=name, command=list(launch.command), cwd=tmp_path)
    attempt = session.new_attempt()
    spec = JobSpec(
        command=tuple(launch.command),
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        device=None,
        plan={},
        steps=None,
        detail=False,
        role="attempt",
        attempt_dir=attempt.path,
        output="files",
    )
    assert run_job(spec, session=session, timeout_s=120).exit_code == 0
    best = judge(collect(attempt.path)).verdict
    if cause is None:
        assert best is None
        return
    assert best is not None
    assert best.rule.cause == cause
    assert best.finding.confidence >= 0.75
    assert best.finding.where is not None
    assert best.finding.where.source == line
    assert "`memory.seen`" in best.finding.explanation
