"""The record of the peak: what filled the card, exactly at its highest point."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

MIB = 1 << 20
TRAINING = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.ones(ROWS, 1024).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"peak={torch.cuda.max_memory_allocated()}")
"""
PARAMETERS = 4 * 4 * MIB


def test_large_batch_peaks_in_activations(simulate_text: Any) -> None:
    run = simulate_text(TRAINING.replace("ROWS", "8192"))
    assert sum(run.composition().values()) == run.peak["peak_allocated_bytes"] == run.value("peak")
    assert run.peak["peak_reserved_bytes"] >= run.peak["peak_allocated_bytes"]

    found = run.composition()
    assert found["parameters"] == PARAMETERS
    assert found["optimizer state"] == 2 * PARAMETERS
    assert found["inputs"] == 32 * MIB
    assert found["activations"] >= 3 * 32 * MIB
    assert run.peak["phase"] in ("forward", "backward")
    names = {row["module"]: row["bytes"] for row in run.peak["modules"]}
    assert names["2.1"] >= 32 * MIB


def test_small_batch_peaks_in_the_optimizer(simulate_text: Any) -> None:
    run = simulate_text(TRAINING.replace("ROWS", "8"))
    found = run.composition()
    assert run.peak["phase"] == "optimizer"
    assert found["parameters"] == found["gradients"] == PARAMETERS
    assert found["optimizer state"] == 2 * PARAMETERS
    assert found["temporaries"] >= PARAMETERS  # the multi-tensor form holds a copy of the second moments


def test_gradients_are_found_without_an_optimizer_step(simulate_text: Any) -> None:
    text = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(8, 1024, device="cuda")).sum().backward()
"""
    found = simulate_text(text).composition()
    assert found["gradients"] == PARAMETERS
    assert "optimizer state" not in found


def test_recomputed_activations_count_as_activations(simulate_text: Any) -> None:
    text = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
block = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
x = torch.randn(8192, 1024, device="cuda", requires_grad=True)
checkpoint(block, x, use_reentrant=False).sum().backward()
"""
    run = simulate_text(text)
    assert run.peak["phase"] == "backward"
    assert run.composition()["activations"] >= 128 * MIB


def test_communication_buffers(simulate_text: Any) -> None:
    text = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
layer = torch.nn.Linear(4096, 4096, bias=False).cuda()
torch.nn.parallel.DistributedDataParallel(layer)(torch.ones(2, 4096, device="cuda")).sum().backward()
"""
    run = simulate_text(text, options=("--world-size", "4"))
    assert run.exit_code == 0, run.stderr
    assert run.composition()["communication"] >= 64 * MIB
    assert run.simulated["world_size"] == 4
    assert run.simulated["card"]["nccl_bytes"] > 0


def test_assumptions_are_counted(simulate_text: Any) -> None:
    text = """
import torch
x = torch.randn(1000, 1000, device="cuda")
for _ in range(3):
    (x @ x).sum().item()
x[x > 0]
"""
    assert simulate_text(text).simulated["assumed_values"] == {
        "aten::_local_scalar_dense": 3,
        "indexing with a mask": 1,
    }


def test_expandable_segments_reserve_less(simulate_text: Any) -> None:
    text = """
import torch
for size in [300, 500, 700, 400, 600, 800, 350, 650, 900, 450] * 3:
    held = [torch.empty(size << 18, device="cuda") for _ in range(3)]
    del held[1:]
    more = torch.empty(size << 17, device="cuda")
"""
    default = simulate_text(text)
    expandable = simulate_text(text, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert default.peak["peak_allocated_bytes"] == expandable.peak["peak_allocated_bytes"]
    assert default.peak["peak_reserved_bytes"] > 1.2 * expandable.peak["peak_reserved_bytes"]


def test_pipeline_stages_exchange_shapes(simulate: Any, tmp_path: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def stage(rank: int) -> Any:
        options = ("--world-size", "2", "--rank", str(rank), "--exchange", str(tmp_path))
        return simulate("pipeline.py", options=options)

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(stage, range(2)))
    assert [run.exit_code for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert all(run.peak["peak_allocated_bytes"] > 0 for run in runs)


def test_pipeline_stage_alone_says_which_rank_is_missing(simulate: Any) -> None:
    run = simulate("pipeline.py", options=("--world-size", "2", "--rank", "1"))
    assert run.exit_code == 1
    assert "rank 1 waits for an object from rank 0, which is not simulated" in run.stderr


def test_sizes_that_libraries_choose_make_an_interval(simulate_text: Any) -> None:
    text = """
import sys
import torch
kind = sys.argv[1]
if kind == "convolution":
    layer, source = torch.nn.Conv2d(16, 16, 3).cuda(), torch.randn(8, 16, 64, 64, device="cuda")
elif kind == "recurrent":
    layer, source = torch.nn.GRU(64, 256).cuda(), torch.randn(100, 32, 64, device="cuda")
else:
    layer, source = torch.nn.Linear(64, 64).cuda(), torch.randn(32, 64, device="cuda")
out = layer(source)
(out[0] if isinstance(out, tuple) else out).sum().backward()
"""
    peaks = {kind: simulate_text(text, kind).peak for kind in ("linear", "convolution", "recurrent")}
    spans = {
        kind: (peak["peak_reserved_bytes"] - peak["peak_reserved_low_bytes"],
               peak["peak_reserved_high_bytes"] - peak["peak_reserved_bytes"])
        for kind, peak in peaks.items()
    }  # fmt: skip
    assert spans["linear"] == (0, 0)
    unfolded = 8 * 16 * 9 * 62 * 62 * 4
    assert spans["convolution"] == (0, unfolded)
    reserve = 100 * 32 * 256 * 6 * 4
    assert spans["recurrent"] == (reserve // 4, reserve // 2)
