"""Fixes that public reports tried in vain: the prediction says beforehand that they save nothing, and why."""

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.slow]

MLP = """
import torch
from torch import nn

layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(2048, 10)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in range(3):
    loss = nn.functional.cross_entropy(
        model(torch.randn(64, 2048, device="cuda")), torch.zeros(64, dtype=torch.long, device="cuda")
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Parameters dominate: autocast adds half-precision copies of them, and checkpointing has next to nothing to save."""

ONE_BLOCK = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 8, 3, padding=1),
        )

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)


model = Net().to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in range(3):
    loss = model(torch.randn(16, 8, 256, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""The whole model is one checkpointed region: at its backward everything is there again."""

#: what was tried -> (script, card, fix, what its refusal or its prediction must say)
CASES = {
    "amp on a stack of linear layers": (MLP, "300MiB", "amp-bf16", "filled by parameters"),
    "checkpointing a stack of linear layers": (MLP, "300MiB", "ckpt", "no block group"),
    "checkpointing a model that is one checkpoint": (ONE_BLOCK, "600MiB", "ckpt", "already active"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_saving_is_under_five_per_cent(name, tmp_path, start_job):
    source, card, fix, reason = CASES[name]
    script = tmp_path / "train.py"
    script.write_text(source)
    made = start_job(tmp_path, [str(script)], card).predict(only=(fix,), budget_s=120)
    entry = next(each for each in made["fixes"] if each["id"] == fix)
    assert (entry["saving_bytes"] or 0) < 0.05 * made["peak_reserved_bytes"]
    if entry["applicable"]:
        assert entry["effective"] is False
        assert reason in entry["why_ineffective"]
    else:
        assert reason in entry["why_not"]


def test_one_checkpoint_around_the_whole_model_saves_nothing(tmp_path, start_job):
    peaks = []
    for name, call in (("with", ""), ("without", "self.body(x)")):
        folder = tmp_path / name
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(
            ONE_BLOCK.replace("torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)", call)
            if call
            else ONE_BLOCK
        )
        result = start_job(folder, [str(script)], "4GiB").result
        assert result.exit_code == 0
        peaks.append(result.ranks[0].peak_allocated_bytes)
    assert abs(peaks[1] - peaks[0]) < 0.05 * peaks[1]
