"""Train a GPT-2 small with `retain_graph=True`, and keep every loss in a list.

Defect: `retain_graph=True` keeps the saved activations after backward, and the list keeps each step's graph.
Card: sim:a100-40g.  Rule: oom.graph_accumulation at the `losses.append(loss)` line.  Fix: a source patch,
`losses.append(loss.detach())`.
"""

import torch
from gpt_model import build, next_token_loss, options


def main() -> None:
    args = options(__doc__, batch_size=2, iterations=60)
    model, optimizer = build(args)
    losses = []
    for step in range(args.iterations):
        tokens = torch.randint(args.vocab, (args.batch_size, args.seq_len), device=args.device)
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        losses.append(loss)
        if step % 10 == 9:
            print(f"step {step} mean loss of the last ten {torch.stack(losses[-10:]).mean().item():.4f}")


if __name__ == "__main__":
    main()
