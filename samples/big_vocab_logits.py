"""Train a small GPT over the 128,256 words of a large tokenizer.

Defect: the logits of all positions over the whole vocabulary take 3.9 GiB, and the loss keeps them several times.
Card: sim:14GiB.  Rule: oom.giant_transient.  Fix: fused-ce (the loss in chunks, fused with the output layer).
"""

import torch
from gpt_model import build, next_token_loss, options


def main() -> None:
    args = options(__doc__, batch_size=8, layers=4, vocab=128256, iterations=4)
    model, optimizer = build(args)
    for step in range(args.iterations):
        tokens = torch.randint(args.vocab, (args.batch_size, args.seq_len), device=args.device)
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
