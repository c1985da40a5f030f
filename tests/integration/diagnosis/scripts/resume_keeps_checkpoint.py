"""A checkpoint is loaded onto the GPU and its dictionary stays referenced while training goes on."""

import os
import tempfile

import torch
from torch import nn


def build() -> nn.Module:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(4)]
    )


path = os.path.join(tempfile.mkdtemp(), "last.pt")
cpu = build()
torch.save({"model": cpu.state_dict()}, path)

checkpoint = torch.load(path, map_location="cuda")
model = build().to("cuda")
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(5):
    x = torch.randn(4096, 2048, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
