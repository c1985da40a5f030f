"""Two sharded ranks that train well, and gather the whole model on each card to save it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(24))).to("cuda")
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)


def save_checkpoint(step):
    state = {name: shard.full_tensor() for name, shard in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(state, f"step{step}.pt")


for step in range(5):
    loss = model(torch.randn(8, 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        save_checkpoint(step)
