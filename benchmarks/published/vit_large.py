# ruff: noqa: ANN001, ANN201, ANN202, ANN204
"""ViT-L/16 as in torchvision: fp32 Adam at batch 64; bfloat16 SGD in micro-batches; one image at a time.

Configurations: rasbt/pytorch-memory-optim, logs.md (max_memory_reserved); PyTorch tutorial "How to save
memory by fusing the optimizer step into the backward pass".
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, HIDDEN = 1024, 24, 16, 4096


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.dropout = nn.Dropout(0.0)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.0), nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.0)
        )

    def forward(self, given):
        x = self.ln_1(given)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x)
        x = x + given
        y = self.ln_2(x)
        y = self.mlp(y)
        return x + y


class Vision(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, WIDTH, 16, 16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.empty(1, 197, WIDTH))
        self.layers = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.dropout, self.ln = nn.Dropout(0.0), nn.LayerNorm(WIDTH, eps=1e-6)
        self.heads = nn.Linear(WIDTH, classes)

    def encode(self, x):
        x = x + self.positions
        return self.ln(self.layers(self.dropout(x)))

    def forward(self, images):
        x = self.conv_proj(images)
        x = x.reshape(len(images), WIDTH, 196)
        x = x.permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), x], 1)
        x = self.encode(x)
        x = x[:, 0]
        return self.heads(x)


def large_batch():
    model = Vision(10).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    for _ in range(3):
        images, labels = torch.empty(64, 3, 224, 224).cuda(), torch.randint(10, (64,)).cuda()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def micro_batches():
    model = Vision(10).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        images = torch.empty(4, 3, 224, 224).to("cuda", torch.bfloat16)
        labels = torch.randint(10, (4,)).cuda()
        loss = F.cross_entropy(model(images), labels) / 4
        loss.backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def one_image(in_backward):
    model = Vision(1000).cuda()
    if in_backward:
        optimizers = {
            parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()
        }

        def step_now(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_now)
    else:
        optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.rand(1, 3, 224, 224).cuda()).sum().backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()


{
    "batch64": large_batch,
    "micro4": micro_batches,
    "one": lambda: one_image(False),
    "one-in-backward": lambda: one_image(True),
}[sys.argv[1]]()
