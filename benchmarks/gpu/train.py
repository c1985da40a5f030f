"""Three real training steps of one configuration on the GPU; prints peaks as JSON, and writes a snapshot on request.

It is an ordinary script: the same file runs on the GPU and on the simulated device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "samples"))

from gpt_model import GPT, GPTConfig, next_token_loss

#: name -> options. Shapes are exact, so that measured and simulated bytes can be compared to the byte.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt-small-fp32-adamw": {},
    "gpt-small-bf16-autocast": {"autocast": True},
    "gpt-small-checkpointed": {"checkpoint": True},
    "gpt-small-sgd": {"optimizer": "sgd"},
    "gpt-small-adamw-fused": {"optimizer": "fused"},
    "gpt-medium-fp32-adamw": {"layers": 24, "heads": 16, "width": 1024, "batch": 4},
    "gpt-medium-bf16-weights": {"layers": 24, "heads": 16, "width": 1024, "batch": 4, "weights": "bfloat16"},
    "gpt-small-long": {"length": 4096, "batch": 1, "autocast": True},
    "mlp-dropout": {"model": "mlp"},
    "convnet": {"model": "conv"},
}


class Checkpointed(nn.Module):
    """A block that recomputes itself in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def make_model(options: dict[str, Any]) -> nn.Module:
    kind = options.get("model", "gpt")
    if kind == "mlp":
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [nn.Linear(4096, 4096), nn.GELU(), nn.Dropout(0.1)]
        return nn.Sequential(*layers)
    if kind == "conv":
        widths = [3, 64, 128, 256, 512]
        layers = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    model = GPT(
        GPTConfig(
            n_layer=options.get("layers", 12),
            n_head=options.get("heads", 12),
            n_embd=options.get("width", 768),
            block_size=options.get("length", 1024),
        )
    )
    if options.get("checkpoint"):
        model.blocks = nn.ModuleList(Checkpointed(each) for each in model.blocks)
    return model


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=name == "fused")


def loss_of(model: nn.Module, options: dict[str, Any]) -> torch.Tensor:
    kind = options.get("model", "gpt")
    if kind == "mlp":
        return model(torch.randn(4096, 4096, device="cuda")).square().mean()
    if kind == "conv":
        images = torch.randn(64, 3, 224, 224, device="cuda")
        return F.cross_entropy(model(images), torch.randint(1000, (64,), device="cuda"))
    tokens = torch.randint(50304, (options.get("batch", 8), options.get("length", 1024)), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=bool(options.get("autocast"))):
        return next_token_loss(model(tokens), tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", choices=CONFIGURATIONS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--snapshot", help="record history and write a snapshot of the last step here")
    args = parser.parse_args()
    options = CONFIGURATIONS[args.configuration]
    torch.manual_seed(0)
    if args.snapshot:
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    model = make_model(options).to("cuda", getattr(torch, options.get("weights", "float32")))
    optimizer = make_optimizer(model, options.get("optimizer", "adamw"))
    for _ in range(args.steps):
        loss = loss_of(model, options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    if args.snapshot:
        torch.cuda.memory._dump_snapshot(args.snapshot)
    peaks = {
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "total_bytes": torch.cuda.get_device_properties(0).total_memory,
        "capability": list(torch.cuda.get_device_capability()),
    }
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
