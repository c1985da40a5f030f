# ruff: noqa: T201  # a job, not a library
"""Ranks of torch.multiprocessing.spawn: their numbers are set inside Python."""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world, port, seconds):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    end = time.monotonic() + seconds
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    running = torch.ones(1)
    told = False
    while running.item():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if rank == 0 and not told:
            told = True
            print("training", flush=True)
        time.sleep(0.02)
        running = torch.tensor([float(time.monotonic() < end)])
        dist.broadcast(running, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    mp.spawn(work, (2, int(sys.argv[1]), float(sys.argv[2])), nprocs=2)
