# ruff: noqa: T201
"""A loop with Accelerate: mixed precision, accumulation, gathering."""

import json

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 512)), batch_size=8)
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
for (batch,) in data:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.gather(loss.detach())
print(f"device={json.dumps(str(accelerator.device))}")
print(f"processes={accelerator.num_processes}")
print(f"peak={torch.cuda.max_memory_allocated()}")
