# ruff: noqa: T201, SIM115  # a job, not a library
"""A small training job for attach tests: every step leaves its time and loss in a file.

Environment: HEARTBEAT (file prefix), SECONDS, STEPS (instead of SECONDS), WORKERS, STEP_MS (sleep per step), STOP (a
file that will hold the number of the last step; all ranks must be able to read it before they get there).
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator), index % 10


def main():
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    if world > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    workers = int(os.environ.get("WORKERS", "0"))
    loader = DataLoader(Samples(), batch_size=32, num_workers=workers)
    steps = int(os.environ.get("STEPS", "0"))
    end = time.monotonic() + float(os.environ.get("SECONDS", "30"))
    pause = float(os.environ.get("STEP_MS", "5")) / 1000
    heartbeat = (
        open(f"{os.environ['HEARTBEAT']}.{rank}", "w", buffering=1) if "HEARTBEAT" in os.environ else None
    )
    step = 0
    for x, y in loader:
        batch_size = x.shape[0]
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if heartbeat:
            heartbeat.write(f"{time.monotonic_ns()} {loss.item()!r}\n")
        time.sleep(pause)
        if "STOP" in os.environ and not steps and os.path.exists(os.environ["STOP"]):
            steps = int(open(os.environ["STOP"]).read())
        if step == steps or (not steps and time.monotonic() > end):
            break
    print(f"rank {rank} done {step} {batch_size}", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
