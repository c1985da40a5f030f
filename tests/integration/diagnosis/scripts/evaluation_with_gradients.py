# ruff: noqa: T201
"""Evaluation switches to eval mode and forgets torch.no_grad()."""

import torch
from torch import nn


def evaluate(model: nn.Module, batches: int) -> float:
    model.eval()
    total = 0.0
    for _ in range(batches):
        out = model(torch.randn(16384, 1024, device="cuda"))
        total += out.mean().item()
    model.train()
    return total


model = nn.Sequential(
    *[nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)]
).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    for _ in range(4):
        model(torch.randn(1024, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(evaluate(model, 2))
