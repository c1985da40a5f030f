"""Fixes of distributed training on two real gloo ranks: the same losses on each rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

HERE = Path(__file__).parent


def launch(fixes, order, folder):
    saved = folder / "model.pt"
    return torchrun(HERE / "ranks.py", fixes, order, saved), saved


def torchrun(script, *arguments):
    """The JSON object that rank 0 of two prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return launch("", "after", tmp_path_factory.mktemp("plain"))[0]


@pytest.mark.parametrize("fix", ["ckpt", "bucket-view", "zero1"])
def test_equal_losses_on_every_rank(fix, plain, tmp_path):
    fixed, _ = launch(fix, "after", tmp_path)
    assert fixed["states"][fix][0] == "applied"
    assert fixed["losses"] == plain["losses"]


@pytest.mark.parametrize("order", ["after", "before"])
def test_fsdp2_in_place_of_ddp_trains_the_same_and_saves_no_half_model(order, plain, tmp_path):
    fixed, saved = launch("fsdp2", order, tmp_path)
    assert fixed["states"]["fsdp2"] == ["applied", "3 blocks and the root over 2 ranks"]
    for mine, theirs in zip(fixed["losses"], plain["losses"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert fixed["save_skipped"] is True
    assert not saved.exists()


PLAIN = """\
import gc, json, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = Net()
model = DDP(model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(dist.get_rank())
losses = []
for step in range(4):
    x = torch.randint(60, (4, 8), generator=generator)
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
gathered = [None, None]
dist.all_gather_object(gathered, losses)
if dist.get_rank() == 0:
    sys.stdout.write(json.dumps(gathered) + chr(10))
    sys.stdout.flush()
del model, opt
gc.collect()
dist.destroy_process_group()
"""


def run_source(code, folder):
    script = folder / "train.py"
    script.write_text(code)
    return torchrun(script)


@pytest.fixture(scope="module")
def plain_source(tmp_path_factory):
    return run_source(PLAIN, tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("fix", ["bucket-view", "zero1", "fsdp2"])
def test_source_patches_train_the_same_on_every_rank(fix, plain_source, tmp_path):
    from oomscope.core.fixes.patches import patch

    patched = run_source(patch(fix, PLAIN).code, tmp_path)
    for mine, theirs in zip(patched, plain_source, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
