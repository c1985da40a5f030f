"""Train a GPT on sentences padded to the longest of their batch; one batch holds a very long one.

Defect: the memory of a step follows the length of its batch, and one batch is three times as long as most.
Card: sim:12GiB.  Rule: oom.longest_batch.  Fix: ckpt-selective (or fused-ce, or a cap on the length).
"""

import random

import torch
from gpt_model import build, next_token_loss, options

SPIKE = 6


def main() -> None:
    args = options(__doc__, batch_size=8, layers=12, iterations=8)
    model, optimizer = build(args)
    lengths = random.Random(args.seed)
    for step in range(args.iterations):
        length = args.seq_len if step == SPIKE else lengths.randint(args.seq_len // 5, args.seq_len // 3)
        tokens = torch.randint(args.vocab, (args.batch_size, length), device=args.device)
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} length {length} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
