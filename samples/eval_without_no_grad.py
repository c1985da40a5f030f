"""Train a GPT-2 small, and evaluate it every second step on batches four times as large.

Defect: the evaluation records gradients, so every activation is kept for a backward that never comes.
Card: sim:20GiB.  Rule: oom.eval_no_nograd.  Fix: eval-no-grad (`torch.no_grad()` around the evaluation).
"""

import torch
from gpt_model import build, next_token_loss, options


def evaluate(model, batches) -> float:
    model.eval()
    losses = [next_token_loss(model(tokens), tokens).item() for tokens in batches]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    args = options(__doc__, batch_size=4, iterations=4)
    model, optimizer = build(args)
    for step in range(args.iterations):
        tokens = torch.randint(args.vocab, (args.batch_size, args.seq_len), device=args.device)
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        if step % 2 == 1:
            size = (4 * args.batch_size, args.seq_len)
            batches = [torch.randint(args.vocab, size, device=args.device) for _ in range(2)]
            print(f"step {step} validation loss {evaluate(model, batches):.4f}")


if __name__ == "__main__":
    main()
