# ruff: noqa: ANN001, ANN201, ANN204, ANN205
"""A decoder with everything spelled out, as the assignment "systems" of Stanford's CS336 has it (size xl).

    decoder.py forward LENGTH [bf16]     three passes without gradients
    decoder.py checkpoint LENGTH GROUPS  three AdamW steps, layers checkpointed in this many groups

Figures: LINYUNLinYun/CS336-assignment2-systems, cs336_systems/experiments.md (max_memory_allocated in GiB on an RTX PRO
6000, torch 2.11).
"""

import math
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, HIDDEN, LAYERS, HEADS, BATCH = 10000, 2560, 10240, 32, 32, 4
SIZE = WIDTH // HEADS


def softmax(x):
    lowered = x - torch.max(x, dim=-1, keepdim=True)[0]  # alive to the end, as in the published script
    powers = torch.exp(lowered)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def cross_entropy(logits, targets):
    logits = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    losses = -(logits - torch.log(torch.sum(torch.exp(logits), dim=-1, keepdim=True)))
    return torch.mean(torch.gather(losses, -1, targets.unsqueeze(-1)))


class Linear(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner) * 0.02)

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        kind, x = x.dtype, x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * x).to(kind)


class Attention(nn.Module):
    def __init__(self, turns):
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.turns = turns

    def rotate(self, x):
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.turns[:, : x.shape[-2]].unbind(0)
        turned = cos * first - sin * second, sin * first + cos * second
        return torch.cat(turned, -1)

    def forward(self, x):
        length = x.shape[1]
        q, k, v = (w(x) for w in (self.q, self.k, self.v))
        q, k, v = (each.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for each in (q, k, v))
        q, k = self.rotate(q), self.rotate(k)
        positions = torch.arange(length, device=x.device)
        seen = (positions[:, None] >= positions)[None, None]
        return self.out(self.mix(q, k, v, seen).transpose(1, 2).flatten(2).contiguous())

    @staticmethod
    def mix(q, k, v, seen):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(SIZE)
        scores = torch.where(seen, scores, float("-inf"))
        weights = softmax(scores)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.down, self.up = Linear(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH), Linear(WIDTH, HIDDEN)

    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class Layer(nn.Module):
    def __init__(self, turns):
        super().__init__()
        self.norm_1, self.attention = RMSNorm(), Attention(turns)
        self.norm_2, self.feed = RMSNorm(), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.feed(self.norm_2(x))


class Decoder(nn.Module):
    def __init__(self, length):
        super().__init__()
        angles = torch.outer(torch.arange(length).float(), 1e4 ** -(torch.arange(0, SIZE, 2) / SIZE))
        self.words = nn.Parameter(torch.randn(WORDS, WIDTH))
        turns = torch.stack((torch.cos(angles), torch.sin(angles))).cuda()
        self.layers = nn.ModuleList(Layer(turns) for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), Linear(WIDTH, WORDS)

    def forward(self, tokens, groups=0):
        x = _embedded = self.words[tokens]  # kept to the end, as in the published script
        size = LAYERS // groups if groups else 1
        for start in range(0, LAYERS, size):
            part = nn.Sequential(*self.layers[start : start + size])
            x = checkpoint(part, x, use_reentrant=False) if groups else part(x)
        return self.head(self.norm(x))


def forward(length, half=""):
    model = Decoder(length).cuda()
    tokens = torch.randint(WORDS, (BATCH, length), device="cuda")
    for _ in range(3):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
            model(tokens)


def train(length, groups):
    model = Decoder(length).cuda()
    tokens, targets = (torch.randint(WORDS, (BATCH, length), device="cuda") for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens, groups)
        loss = cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()


if sys.argv[1] == "forward":
    forward(int(sys.argv[2]), *sys.argv[3:])
else:
    train(int(sys.argv[2]), int(sys.argv[3]))
