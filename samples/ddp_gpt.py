"""Train a GPT with DistributedDataParallel, on as many cards as there are processes.

    oomscope run --device sim:14GiB --nproc-per-node 4 samples/ddp_gpt.py

Defect: DistributedDataParallel holds every gradient twice, in `.grad` and in its buckets, on a card that is short of
less than one copy.
Card: sim:14GiB.  Rule: oom.ddp_buckets.  Fix: bucket-view (`gradient_as_bucket_view=True`).
"""

import os

import torch
import torch.distributed as dist
from gpt_model import build, next_token_loss, options
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = options(__doc__, batch_size=1, seq_len=1024, layers=24, heads=16, width=1280, iterations=4)
    on_cpu = args.device == "cpu"
    local_rank = int(os.environ["LOCAL_RANK"])
    if not on_cpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("gloo" if on_cpu else "nccl")
    model, _ = build(args)
    device_ids = None if on_cpu else [local_rank]
    model = DistributedDataParallel(model, device_ids=device_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step in range(args.iterations):
        tokens = torch.randint(args.vocab, (args.batch_size, args.seq_len), device=args.device)
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
