"""Train a GPT-2 medium whose batch is too large for the card.

Defect: the activations of a 24 x 1024 batch in fp32 exceed what a 40 GB card has left.
Card: sim:a100-40g.  Rule: oom.capacity_activations.  Fix: ckpt (or amp-bf16, or a smaller batch).
"""

import torch
from gpt_model import build, next_token_loss, options


def main() -> None:
    args = options(__doc__, batch_size=24, layers=24, heads=16, width=1024)
    model, optimizer = build(args)
    for step in range(args.iterations):
        tokens = torch.randint(args.vocab, (args.batch_size, args.seq_len), device=args.device)
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
