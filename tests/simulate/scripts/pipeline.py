"""Two stages of a pipeline."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("nccl")
rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
part = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).to(device)
schedule = ScheduleGPipe(
    PipelineStage(part, rank, 2, device), 4, loss_fn=lambda out, target: (out - target).square().mean()
)
optimizer = torch.optim.AdamW(part.parameters())
for _ in range(2):
    data = torch.randn(64, 256, device=device)
    schedule.step(data) if rank == 0 else schedule.step(target=data)
    optimizer.step()
    optimizer.zero_grad()
