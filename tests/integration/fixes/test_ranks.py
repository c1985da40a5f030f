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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(HERE / "ranks.py"), fixes, order, str(saved)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1]), saved


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
