"""Train a GPT-2 small with a main and an auxiliary loss, and keep every loss in a list.

Defect: `retain_graph=True` keeps the saved activations after backward, and the list keeps each step's graph.
Card: sim:a100-40g.  Rule: oom.graph_accumulation at the `losses.append(loss)` line.  Fix: a source patch,
`losses.append(loss.detach())`.
"""

import torch
from gpt_model import build, next_token_loss, options


def main() -> None:
    args = options(__doc__, batch_size=4, seq_len=512, iterations=60)
    model, optimizer = build(args)
    losses = []
    for step in range(args.iterations):
        tokens = torch.randint(args.vocab, (args.batch_size, args.seq_len), device=args.device)
        logits = model(tokens)
        loss = next_token_loss(logits, tokens)
        confidence = logits.logsumexp(dim=-1).square().mean() * 1e-4
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        confidence.backward()
        optimizer.step()
        losses.append(loss)
        print(f"step {step} mean loss {sum(each.item() for each in losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
