"""Jobs on the CPU whose own memory grows: the variable that holds it is named, whatever the source looks like."""

import pytest

from oomscope.live.evidence import collect
from oomscope.live.judge import judge

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
def test_the_holder_is_named(name, tmp_path, run_on_cpu):
    body, cause, line = CASES[name]
    script = tmp_path / f"{name}.py"
    script.write_text(TRAIN.format(body=body))
    folder, result = run_on_cpu(script)
    assert result.exit_code == 0
    best = judge(collect(folder)).verdict
    if cause is None:
        assert best is None
        return
    assert best is not None
    assert best.rule.cause == cause
    assert best.finding.confidence >= 0.75
    assert best.finding.where is not None
    assert best.finding.where.source == line
    assert "`memory.seen`" in best.finding.explanation
