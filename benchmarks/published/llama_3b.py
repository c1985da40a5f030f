# ruff: noqa: ANN001, ANN201, ANN204
"""Llama 3.2 3B, full fine-tuning in bfloat16 on one card: batch 2, packed sequences of 4096, AdamW.

Configuration: torchtune README (revision 1814feb17), memory table of Llama 3.2 3B, first row: no
checkpointing, no compilation, logits in float32. Packed sequences go through compiled flex attention there;
the causal flash kernel keeps the same tensors for the backward pass.
"""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, GROUPS, HIDDEN, WORDS = 3072, 28, 24, 8, 8192, 128256
BATCH, LENGTH, SIZE = 2, 4096, 128


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        angles = torch.outer(
            torch.arange(LENGTH).float(), 1.0 / 500000.0 ** (torch.arange(0, SIZE, 2).float() / SIZE)
        )
        self.register_buffer("cache", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def forward(self, x, positions):
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        turns = self.cache[positions].view(-1, pairs.size(1), 1, pairs.size(3), 2)
        turned = torch.stack(
            [
                pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1],
                pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1],
            ],
            -1,
        )
        return turned.flatten(3).type_as(x)


class Layer(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.sa_norm, self.mlp_norm, self.rotary = RMSNorm(), RMSNorm(), rotary
        self.q, self.out = (
            nn.Linear(WIDTH, HEADS * SIZE, bias=False),
            nn.Linear(HEADS * SIZE, WIDTH, bias=False),
        )
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * SIZE, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def attention(self, x, positions):
        batch, length, _ = x.shape
        q = self.rotary(self.q(x).view(batch, length, HEADS, SIZE), positions).transpose(1, 2)
        k = self.rotary(self.k(x).view(batch, length, -1, SIZE), positions).transpose(1, 2)
        v = self.v(x).view(batch, length, -1, SIZE).transpose(1, 2)
        shape = (batch, GROUPS, HEADS // GROUPS, length, SIZE)
        k, v = (each.unsqueeze(2).expand(shape).flatten(1, 2) for each in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).contiguous().view(batch, length, -1))

    def forward(self, x, positions):
        h = self.attention(self.sa_norm(x), positions) + x
        normed = self.mlp_norm(h)
        return h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        rotary = Rotary()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(rotary) for _ in range(LAYERS))
        self.norm = RMSNorm()

    def forward(self, tokens, positions):
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h, positions)
        return F.linear(self.norm(h), self.embed.weight).float()


torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = Model()
torch.set_default_dtype(torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
for _ in range(2):
    tokens = torch.randint(WORDS, (BATCH, LENGTH)).cuda()
    labels = torch.randint(WORDS, (BATCH, LENGTH)).cuda()
    positions = torch.arange(LENGTH).expand(BATCH, -1).contiguous().cuda()
    logits = model(tokens, positions)
    labels = torch.hstack((labels[..., 1:], torch.full((BATCH, 1), -100, device="cuda")))
    loss = F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))
    del logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
