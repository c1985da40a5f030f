# ruff: noqa: ANN001, ANN201, ANN204
"""GPT-2 in plain torch.

Width, layers and heads on the command line; two AdamW steps at batch 8 × 1024 in float32.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS = (int(word) for word in sys.argv[1:4])
WORDS, BATCH, LENGTH = 50257, 8, 1024


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).split(WIDTH, 2)
        q, k, v = (each.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.ln = nn.Sequential(*[Block() for _ in range(LAYERS)]), nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(LENGTH, device=tokens.device))
        return F.linear(self.ln(self.blocks(x)), self.wte.weight)


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    tokens = torch.randint(WORDS, (BATCH, LENGTH)).cuda()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
