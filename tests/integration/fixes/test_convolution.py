"""Predictions for a convolutional network: the simulated device counts no workspace, so the interval has to."""

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

GIB = 1 << 30
SCRIPT = """
import torch
from torch import nn

net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, {kernel}, padding="same"), nn.ReLU())
net = net.cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    net(torch.randn(4, 3, 512, 512, device="cuda")).mean().backward()
    optimizer.step()
"""


def ends(tmp_path, start_job, kernel):
    script = tmp_path / "net.py"
    script.write_text(SCRIPT.format(kernel=kernel))
    job = start_job(tmp_path, [str(script)], "40GiB")
    assert job.result.exit_code == 0
    made = job.predict(only=["expandable"])
    (found,) = made["fixes"]
    return found["predicted"]


def test_the_largest_workspace_of_a_convolution_is_inside_the_interval(tmp_path, start_job):
    # The unfolded input of the second convolution: 64 channels x 9 x 512 x 512 x 4 samples x 4 bytes, cut at 1 GiB.
    found = ends(tmp_path, start_job, 3)
    above = found["high_bytes"] - found["peak_reserved_bytes"]
    assert found["peak_reserved_bytes"] < 5 * GIB, "a peak of which 15 % is less than the workspace"
    assert above >= GIB
    assert above < GIB + 0.05 * found["peak_reserved_bytes"]


def test_a_convolution_of_one_pixel_adds_no_workspace(tmp_path, start_job):
    found = ends(tmp_path, start_job, 1)
    # The first convolution has 3 channels: 27 values for each of 512 x 512 pixels of 4 samples.
    assert found["high_bytes"] <= int(1.15 * found["peak_reserved_bytes"]) + 32 * (1 << 20)
