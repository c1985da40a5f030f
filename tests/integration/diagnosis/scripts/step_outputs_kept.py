# ruff: noqa: T201
"""A small trainer keeps what each step returns until the epoch ends, a large tensor among it."""

import torch
from torch import nn


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2048, 2048)

    def training_step(self, x: torch.Tensor) -> dict:
        loss = self.layer(x).square().mean()
        return {"loss": loss, "big": torch.randn(4096, 2048, device="cuda")}


class Trainer:
    def fit(self, module: Module, steps: int) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        outputs = []
        for _ in range(steps):
            result = module.training_step(torch.randn(256, 2048, device="cuda"))
            result["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append({name: value.detach() for name, value in result.items()})
        self.epoch_end(outputs)

    def epoch_end(self, outputs: list) -> None:
        print(len(outputs))


Trainer().fit(Module().to("cuda"), 300)
