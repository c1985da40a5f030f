# ruff: noqa: ANN001, ANN201, ANN204
"""One attention layer of one head, written out, batch 8: attention.py WIDTH LENGTH forward|backward.

Figures: bolongcheng/assignment2-systems, profile/attention_memory.md (max_memory_allocated in MiB on a B200, torch
2.11).
"""

import math
import sys

import torch
from torch import nn


def softmax(x):
    lowered = x - torch.max(x, dim=-1, keepdim=True)[0]  # alive to the end, as in the published script
    powers = torch.exp(lowered)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mask = torch.triu(torch.ones(length, length, device="cuda", dtype=torch.bool))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(self.mix(q, k, v))

    def mix(self, q, k, v):
        scores = torch.einsum("bqd,bkd->bqk", q, k) / math.sqrt(k.shape[-1])
        scores = torch.where(self.mask, scores, float("-inf"))
        weights = softmax(scores)
        return torch.einsum("bqk,bkd->bqd", weights, v)


width, length, backward = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "backward"
layer = Attention(width, length).cuda()
x = torch.randn(8, length, width, device="cuda")


def step():
    y = layer(x)
    if backward:
        y.sum().backward()


for _ in range(3):
    step()
