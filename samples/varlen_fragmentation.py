"""Train a GPT on batches whose length differs from step to step.

Defect: every new length asks the caching allocator for blocks of new sizes; the old ones fit no more, and a 15 GiB card
runs out although enough bytes are free in all.
Card: sim:15GiB.  Rule: oom.fragmentation.  Fix: expandable (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).
"""

import random

import torch
from gpt_model import build, next_token_loss, options


def main() -> None:
    args = options(__doc__, batch_size=10, layers=8, heads=16, width=1024, iterations=20, seed=6)
    model, optimizer = build(args)
    lengths = random.Random(args.seed)
    for step in range(args.iterations):
        length = lengths.randint(args.seq_len // 4, args.seq_len)
        tokens = torch.randint(args.vocab, (args.batch_size, length), device=args.device)
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} length {length} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
