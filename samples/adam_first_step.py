"""Train a GPT of 1.4 billion parameters with a batch so small that the first forward and backward fit easily.

Defect: AdamW makes its two states in the first `optimizer.step()`; parameters, gradients and states together exceed
a 20 GiB card.
Card: sim:20GiB.  Rule: oom.optimizer_state_lazy.  Fix: optim-in-bwd (or 8-bit states, or sharding over more cards).
"""

import torch
from gpt_model import build, next_token_loss, options


def main() -> None:
    args = options(__doc__, batch_size=1, seq_len=512, layers=24, heads=16, width=2048, iterations=4)
    model, optimizer = build(args)
    for step in range(args.iterations):
        tokens = torch.randint(args.vocab, (args.batch_size, args.seq_len), device=args.device)
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
