"""Snapshots of real training on this machine's GPU replay exactly under the installed torch.

Each case runs in a process of its own, because allocator settings are read once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomscope.core.allocator.measures import at_oom
from oomscope.core.allocator.verify import verify
from oomscope.store.snapshots import load_snapshot

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEAD = """
import sys, torch
torch.cuda.init()
torch.cuda.memory._record_memory_history(max_entries=200_000)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(),
                                                  torch.nn.Linear(4096, 1024)) for _ in range(6)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step(rows):
    loss = model(torch.randn(rows, 1024, device="cuda")).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
TAIL = """
torch.cuda.memory._dump_snapshot(sys.argv[1])
"""
STEPS = "for rows in (512, 2048, 777, 4096, 64): step(rows)\n"
STREAMS = """
side = torch.cuda.Stream()
for rows in (512, 2048, 777, 4096):
    with torch.cuda.stream(side):
        batch = torch.randn(rows, 1024, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    model(batch).sum().backward()
    batch.record_stream(torch.cuda.current_stream())
    del batch
    optimizer.zero_grad()
"""
GRAPH = """
static = torch.randn(512, 1024, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    model(static)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = model(static)
graph.replay()
"""
OOM = """
torch.cuda.set_per_process_memory_fraction(0.05)
kept = []
try:
    while True:
        kept.append(torch.empty(37 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    pass
"""
CASES = {
    "default": ("", STEPS),
    "expandable": ("expandable_segments:True", STEPS),
    "split": ("max_split_size_mb:64", STEPS),
    "rounded": ("roundup_power2_divisions:4", STEPS),
    "streams": ("", STREAMS),
    "streams-expandable": ("expandable_segments:True", STREAMS),
    "graph": ("", GRAPH),
    "empty-cache": ("", STEPS + "torch.cuda.empty_cache()\n" + STEPS),
    "oom": ("", STEPS + OOM),
    "oom-expandable": ("expandable_segments:True", STEPS + OOM),
    "collect": (
        "garbage_collection_threshold:0.5",
        "torch.cuda.set_per_process_memory_fraction(0.05)\n" + STEPS * 2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_recorded_history_replays_exactly(name: str, tmp_path: Path) -> None:
    conf, body = CASES[name]
    path = tmp_path / f"{name}.pickle"
    done = subprocess.run(
        [sys.executable, "-c", HEAD + body + TAIL, str(path)],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    snapshot = load_snapshot(path)
    device = snapshot.devices[0]
    found = verify(snapshot, device)
    assert found.exact, found.to_json()["first_divergence"]
    if name.startswith("oom"):
        measures = at_oom(snapshot, device, verification=found)
        assert measures is not None
        assert measures.capacity_bytes is not None
