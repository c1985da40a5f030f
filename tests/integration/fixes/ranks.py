"""One rank of a two-rank gloo run, with run-time fixes; rank 0 prints one JSON object with every number."""

import functools
import gc
import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from oomscope.agent.apply import apply


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 60)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(fixes: list[str], order: str) -> None:
    records = []
    runtime = apply({"fixes": [{"id": each} for each in fixes]}, records.append)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(rank)  # different weights: the wrapper must send rank 0's
    net = Net()
    make = functools.partial(torch.optim.AdamW, lr=1e-2)
    opt = make(net.parameters()) if order == "before" else None
    model = DistributedDataParallel(net)
    opt = opt or make(net.parameters())
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for step in range(4):
        for micro in range(2):
            tokens = torch.randint(60, (4, 8), generator=generator)
            if micro == 0 and step % 2:
                with model.no_sync():
                    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                    loss.backward()
            else:
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    saved = sys.argv[3]
    if rank == 0:
        torch.save(model.state_dict(), saved)
    gathered = [None, None]
    dist.all_gather_object(gathered, losses)
    if rank == 0:
        states = {
            r["id"]: [r["state"], r["detail"]]
            for r in records
            if r["k"] == "fix" and r["state"] != "save_skipped"
        }
        skipped = any(r.get("state") == "save_skipped" for r in records)
        sys.stdout.write(json.dumps({"losses": gathered, "states": states, "save_skipped": skipped}) + "\n")
        sys.stdout.flush()
    runtime.undo()
    del model, opt, net
    gc.collect()  # gloo aborts at exit when a model outlives its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main([each for each in sys.argv[1].split(",") if each], sys.argv[2])
