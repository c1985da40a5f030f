"""Small models and a training loop whose every number is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from oomscope.agent.apply import apply


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class TinyGPT(nn.Module):
    def __init__(self, vocabulary: int = 100, width: int = 32, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class TinyConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(*(ConvBlock(8) for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


def next_token_loss(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Run:
    """Everything that a fix must not change."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    evaluation: float = 0.0
    records: list[dict[str, Any]] = field(default_factory=list)

    def state(self, fix: str) -> tuple[str, str] | None:
        found = [(r["state"], r["detail"]) for r in self.records if r["k"] == "fix" and r["id"] == fix]
        return found[-1] if found else None

    def differs_from(self, other: Run) -> float:
        """Largest absolute difference of losses, parameters and buffers."""
        pairs = list(zip(self.losses, other.losses, strict=True))
        worst = max(abs(a - b) for a, b in pairs)
        for mine, theirs in zip(
            (*self.parameters, *self.buffers), (*other.parameters, *other.buffers), strict=True
        ):
            worst = max(worst, float((mine.double() - theirs.double()).abs().max()))
        return max(worst, abs(self.evaluation - other.evaluation))


def train_gpt(
    *fixes,
    steps=4,
    dropout=0.0,
    vocabulary=100,
    compiled=False,
    clip=True,
    zero=True,
    optimizer=None,
    **model,
):
    """Train a tiny GPT with run-time fixes active; the last batch is partial."""
    run = Run()
    runtime = apply(
        {"fixes": [each if isinstance(each, dict) else {"id": each} for each in fixes]}, run.records.append
    )
    try:
        torch.manual_seed(0)
        net = TinyGPT(vocabulary, dropout=dropout, **model)
        called = torch.compile(net, backend="aot_eager") if compiled else net
        make = optimizer or torch.optim.AdamW
        opt = make(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
        for step in range(steps):
            tokens = torch.randint(vocabulary, (8 if step < steps - 1 else 3, 12))
            loss = next_token_loss(called(tokens), tokens)
            opt.zero_grad() if zero else opt.zero_grad(set_to_none=False)
            loss.backward()
            if clip:
                run.norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
            opt.step()
            schedule.step()
            run.losses.append(loss.item())
            run.rates.append(schedule.get_last_lr()[0])
        net.eval()
        with torch.no_grad():
            run.evaluation = float(net(torch.arange(12)[None]).sum())
        run.parameters = [p.detach().clone() for p in net.parameters()]
        return run
    finally:
        runtime.undo()


def train_conv(*fixes, steps=4):
    """Train a convolution net with BatchNorm; its buffers count."""
    run = Run()
    runtime = apply({"fixes": [{"id": each} for each in fixes]}, run.records.append)
    try:
        torch.manual_seed(0)
        net = TinyConvNet()
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            loss = F.cross_entropy(net(torch.randn(6, 3, 8, 8)), torch.randint(4, (6,)))
            opt.zero_grad()
            loss.backward()
            opt.step()
            run.losses.append(loss.item())
        net.eval()
        with torch.no_grad():
            run.evaluation = float(net(torch.ones(2, 3, 8, 8)).sum())
        run.parameters = [p.detach().clone() for p in net.parameters()]
        run.buffers = [b.detach().clone() for b in net.buffers()]
        return run
    finally:
        runtime.undo()
