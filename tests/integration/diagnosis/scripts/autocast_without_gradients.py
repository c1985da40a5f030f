# ruff: noqa: T201
"""One autocast region around many forwards without gradients: the casts of all weights stay cached."""

import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(24)]).to("cuda").eval()
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
    for _ in range(10):
        out = model(torch.randn(64, 4096, device="cuda"))
        print(out.shape)
