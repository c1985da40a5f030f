"""Every source patch trains as its run-time twin does."""

import pytest
import torch

from oomscope.agent.apply import apply
from oomscope.core.fixes.patches import patch

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def evaluate(model):
    model.eval()
    out = model(torch.arange(8)[None])
    model.train()
    return out


torch.manual_seed(0)
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses, kept = [], []
for step in range(4):
    tokens = torch.randint(50, (6, 8))
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    opt.zero_grad(set_to_none=False)
    loss.backward()
    opt.step()
    kept.append(loss)
    losses.append(loss.item())
evaluation = evaluate(model)
"""


def run(code, *fixes):
    runtime = apply({"fixes": [{"id": each} for each in fixes]}, lambda record: None)
    try:
        space = {"__name__": "__main__"}
        exec(compile(code, "train.py", "exec"), space)
        return space
    finally:
        runtime.undo()


@pytest.mark.parametrize(
    "fix",
    [
        "ckpt",
        "ckpt-selective",
        "ckpt-half",
        "offload-activations",
        "zero-none",
        "optim-fused",
        "eval-no-grad",
    ],
)
def test_the_same_numbers_bit_for_bit(fix):
    twin, patched = run(SCRIPT, fix), run(patch(fix, SCRIPT).code)
    assert patched["losses"] == twin["losses"]
    assert torch.equal(patched["evaluation"], twin["evaluation"])
    assert patched["evaluation"].requires_grad is twin["evaluation"].requires_grad
    assert patched["evaluation"].requires_grad is (fix != "eval-no-grad")


def test_micro_batches_add_in_another_order_only():
    torch.set_default_dtype(torch.float64)
    try:
        plain, twin = run(SCRIPT), run(SCRIPT, "microbatch-exact")
        patched = run(patch("microbatch-exact", SCRIPT).code)
    finally:
        torch.set_default_dtype(torch.float32)
    assert patched["losses"] == pytest.approx(twin["losses"], rel=1e-12)
    assert patched["losses"] == pytest.approx(plain["losses"], rel=1e-12)


FUSED = (
    SCRIPT.replace("nn.Linear(16, 50)", "nn.Linear(16, 5000)")
    .replace("forward(self, x):\n        x = self.embed(x)", "forward(self, tokens):\n        x = self.embed(tokens)")
    .replace(
        "        return self.head(x)\n",
        "        logits = self.head(x)\n"
        "        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=7)\n",
    )
    .replace("    logits = model(tokens)\n", "")
    .replace("F.cross_entropy(logits.flatten(0, 1), tokens.flatten())\n", "model(tokens)\n")
)  # fmt: skip


def test_the_fused_head_of_the_patch_is_that_of_the_job():
    patched = patch("fused-ce", FUSED).code
    assert "oomscope" not in patched
    plain, twin, fixed = run(FUSED), run(FUSED, "fused-ce"), run(patched)
    assert fixed["losses"] == pytest.approx(twin["losses"], rel=1e-5)
    assert fixed["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_selective_checkpoints_keep_what_their_run_time_twin_keeps():
    from oomscope.agent.apply.checkpointing import expensive_operators

    space = run(patch("ckpt-selective", SCRIPT).code)
    assert space["_keep_products"].__module__ == "__main__"
    kept = []
    space["create_selective_checkpoint_contexts"] = kept.extend
    space["_keep_products"].__globals__["create_selective_checkpoint_contexts"] = kept.extend
    space["_keep_products"]()
    assert kept == expensive_operators()


def test_autocast_differs_in_rounding_only():
    """The patch takes the loss into autocast, the twin gives it float32 outputs."""
    twin, patched = run(SCRIPT, "amp-bf16"), run(patch("amp-bf16", SCRIPT).code)
    assert patched["losses"] == pytest.approx(twin["losses"], rel=1e-2)
    assert patched["losses"] != run(SCRIPT)["losses"]


def test_a_detached_loss_trains_the_same_and_holds_no_graph():
    plain, patched = run(SCRIPT), run(patch("leak-detach", SCRIPT).code)
    assert patched["losses"] == plain["losses"]
    assert all(each.grad_fn is not None for each in plain["kept"])
    assert all(each.grad_fn is None for each in patched["kept"])
