# ruff: noqa: T201  # a job, not a library
"""Trains on oomscope's simulated device of 256 MiB, so that the agent's side of CUDA can be attached to without a GPU.

When the file in TRIGGER appears, it asks for too much memory, catches the error and goes on.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch

from oomscope import simulate

simulate.start({"device": "256MiB"}, lambda record: None)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
trigger = Path(os.environ["TRIGGER"])
end = time.monotonic() + 60
step = 0
while time.monotonic() < end:
    model(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 3:
        print("ready", flush=True)
    if trigger.exists():
        trigger.unlink()
        try:
            torch.empty(1 << 30, device="cuda")
        except torch.OutOfMemoryError:
            print("caught", flush=True)
    time.sleep(0.02)
