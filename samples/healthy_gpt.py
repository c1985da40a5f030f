"""Train a GPT-2 small that fits with room to spare.

Defect: none.  Card: sim:a100-40g.  Rule: no finding.
"""

import torch
from gpt_model import build, next_token_loss, options


def main() -> None:
    args = options(__doc__, batch_size=8, iterations=12)
    model, optimizer = build(args)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.iterations)
    history = []
    for step in range(args.iterations):
        tokens = torch.randint(args.vocab, (args.batch_size, args.seq_len), device=args.device)
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        history.append(loss.item())
        print(f"step {step} loss {history[-1]:.4f}")


if __name__ == "__main__":
    main()
