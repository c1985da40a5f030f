# ruff: noqa: T201
"""A LightningModule under Lightning's Trainer."""

import pytorch_lightning as pl
import torch
from torch import nn


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 512)), batch_size=8)
trainer = pl.Trainer(
    max_steps=3, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Module(), data)
print(f"steps={trainer.global_step}")
print(f"peak={torch.cuda.max_memory_allocated()}")
