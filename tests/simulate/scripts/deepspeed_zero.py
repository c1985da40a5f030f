# ruff: noqa: T201
"""DeepSpeed ZeRO; `deepspeed_zero.py STAGE`."""

import sys

import deepspeed
import torch
from torch import nn

stage = int(sys.argv[1])
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": stage},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for _ in range(3):
    loss = engine(torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)).square().mean()
    engine.backward(loss)
    engine.step()
print(f"peak={torch.cuda.max_memory_allocated()}")
