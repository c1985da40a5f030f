"""The multi-tensor optimizer's temporaries overflow a card on which parameters, gradients and state fit."""

import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)]).to("cuda")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=True)
for _ in range(5):
    x = torch.randn(64, 4096, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
