# ruff: noqa: T201
"""Small models of four families, trained for two steps; prints the highest live bytes.

`families.py NAME cpu` really trains and takes the allocation events of torch's profiler; `families.py NAME cuda` runs
on the simulated device. There is no dropout (its mask is a float on the CPU and a bool on CUDA), attention is spelled
out (the fused kernels differ) and experts are chosen by token number, so that both do the same.
"""

import json
import math
import os
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads, groups=None):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups or heads, width // heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * self.groups * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x, causal):
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        if self.groups != self.heads:
            k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.size)
        if causal:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~mask, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Gelu(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, tokens):
        return self.down(F.gelu(self.up(x)))


class SwiGlu(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x, tokens):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self, width, count=4):
        super().__init__()
        self.experts = nn.ModuleList(SwiGlu(width) for _ in range(count))

    def forward(self, x, tokens):
        flat = x.reshape(-1, x.shape[-1])
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(tokens.flatten() % len(self.experts) == number)
            out = out.index_add(0, rows, expert(flat[rows], None))
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, width, heads, norm, feed, groups=None):
        super().__init__()
        self.norm1, self.attention = norm(width), Attention(width, heads, groups)
        self.norm2, self.feed = norm(width), feed(width)

    def forward(self, x, tokens, causal):
        x = x + self.attention(self.norm1(x), causal)
        return x + self.feed(self.norm2(x), tokens)


class Decoder(nn.Module):
    def __init__(self, norm, feed, groups=None, width=256, layers=3, words=2000):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, 8, norm, feed, groups) for _ in range(layers))
        self.norm, self.head = norm(width), nn.Linear(width, words, bias=False)

    def loss(self, tokens, _images):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, tokens, True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Written(nn.Module):
    """Everything spelled out: an embedding by indexing, layers without bias, softmax and loss with max and gather."""

    def __init__(self, width=256, layers=3, words=2000):
        super().__init__()
        self.words = nn.Parameter(torch.randn(words, width))
        self.layers = nn.ModuleList(WrittenLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def loss(self, tokens, _images):
        x = self.words[tokens]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        logits = logits - logits.max(-1, keepdim=True).values
        return (logits.exp().sum(-1).log() - logits.gather(-1, tokens[..., None])[..., 0]).mean()


class WrittenLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-2, -1)
        scores = (scores - scores.max(-1, keepdim=True).values).exp()
        return x + self.out(scores / scores.sum(-1, keepdim=True) @ v)


class Vision(nn.Module):
    def __init__(self, width=256, layers=3, classes=1000):
        super().__init__()
        self.patch = nn.Linear(16 * 16 * 3, width)
        self.position = nn.Parameter(torch.zeros(1, 197, width))
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.layers = nn.ModuleList(Layer(width, 8, nn.LayerNorm, Gelu) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def loss(self, tokens, images):
        patches = (
            images.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        )
        x = torch.cat([self.token.expand(len(images), -1, -1), self.patch(patches)], 1) + self.position
        for layer in self.layers:
            x = layer(x, None, False)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), tokens[:, 0] % 1000)


FAMILIES = {
    "gpt": lambda: Decoder(nn.LayerNorm, Gelu),
    "llama": lambda: Decoder(RMSNorm, SwiGlu, groups=2),
    "vit": Vision,
    "moe": lambda: Decoder(RMSNorm, Experts),
    "written": Written,
}


def train(model, device):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        tokens = (torch.arange(8 * 200) * 7 % 2000).view(8, 200).to(device, copy=True)
        images = torch.zeros(8, 3, 224, 224).to(device, copy=True)
        model.loss(tokens, images).backward()
        optimizer.step()
        optimizer.zero_grad()


def peak_on_cpu(model):
    """Highest live bytes from the profiler's allocation events, and the parameters that were there before."""
    parameters = sum(each.numel() * each.element_size() for each in model.parameters())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        train(model, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path) as file:
            events = [each for each in json.load(file)["traceEvents"] if each.get("name") == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda each: each["ts"]):
        live += event["args"]["Bytes"]
        highest = max(highest, live)
    return parameters + highest


if __name__ == "__main__":
    name, device = sys.argv[1:3]
    torch.manual_seed(0)
    model = FAMILIES[name]()
    if device == "cpu":
        print(f"peak={peak_on_cpu(model)}")
    else:
        from oomscope.simulate.ops import reductions

        reductions.partial_sums = lambda *_: 0  # blocks of a card share the outputs of a sum
        train(model.to("cuda"), "cuda")
        print(f"peak={torch.cuda.memory_stats()['requested_bytes.all.peak']}")
