"""Resume a GPT-2 medium from a checkpoint, and go on training.

Defect: `torch.load` without `map_location` brings the checkpoint onto the card, where `checkpoint` keeps a second copy
of the parameters.
Card: sim:13.6GiB.  Rule: oom.load_duplicate.  Fix: a source patch, `torch.load(…, map_location="cpu")`.
"""

import os
import tempfile

import torch
from gpt_model import build, next_token_loss, options


def train(args, model, optimizer, steps: int) -> None:
    for step in range(steps):
        tokens = torch.randint(args.vocab, (args.batch_size, args.seq_len), device=args.device)
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


def main() -> None:
    args = options(__doc__, batch_size=3, layers=24, heads=16, width=1024, iterations=4)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        model, optimizer = build(args)
        train(args, model, optimizer, 1)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        train(args, model, optimizer, args.iterations)


if __name__ == "__main__":
    main()
