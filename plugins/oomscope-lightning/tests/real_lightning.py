"""Trains a tiny model by the real Lightning Trainer on the CPU, with one fix or none, of the plugin or built in.

It prints one JSON object.
usage: python real_lightning.py [FIX-ID]
"""

import json
import sys
import tempfile

from oomscope_lightning import FIXES

from oomscope.agent.apply import apply
from oomscope.core.fixes import CATALOGUE, JobFacts

JOB = JobFacts(frameworks=frozenset({"lightning"}), world_size=2, compute_capability=(8, 0))


def main() -> None:
    records = []
    for fix in (*FIXES, *CATALOGUE):
        if fix.id in sys.argv[1:]:
            runtime = fix.plan(JOB).runtime
            apply(
                {"fixes": [{"id": each, "options": dict(given)} for each, given in runtime.items()]},
                records.append,
            )
    sys.stdout.write(json.dumps({**train(), "records": records}) + "\n")


def train() -> dict:
    import torch

    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)
            )
            self.losses = []
            self.types = set()

        def training_step(self, batch, index):
            out = self.layers(batch[0])
            self.types.add(str(out.dtype))
            loss = torch.nn.functional.cross_entropy(out, batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    net = Net()
    data = torch.utils.data.TensorDataset(torch.randn(32, 16), torch.randint(4, (32,)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            default_root_dir=folder, max_steps=4, accelerator="cpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=8))
    return {"losses": net.losses, "types": sorted(net.types), "precision": str(trainer.precision)}


if __name__ == "__main__":
    main()
