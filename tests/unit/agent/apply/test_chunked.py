"""Exact micro-batches: gradients of the whole batch, for losses that classical accumulation gets wrong."""

import pytest
import torch
import torch.nn.functional as F
from models import TinyGPT
from torch import nn

from oomscope.agent.apply import apply


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gradients(make, inputs, targets, loss, chunks=None):
    records = []
    fixes = [{"id": "microbatch-exact", "options": {"chunks": chunks}}] if chunks else []
    runtime = apply({"fixes": fixes}, records.append)
    try:
        torch.manual_seed(0)
        net = make()
        loss(net(inputs), targets).backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]), records
    finally:
        runtime.undo()


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def tokens_loss(**options):
    return lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), **options)


def padded(tokens):
    out = tokens.clone()
    for row in range(len(out)):
        out[row, 2 * row + 1 :] = -100
    return out


TOKENS = torch.randint(50, (8, 16), generator=torch.Generator().manual_seed(1))
X = torch.randn(10, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
Y = torch.randn(10, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def gpt():
    return TinyGPT(50)


CASES = {
    "mean": (gpt, TOKENS, TOKENS, tokens_loss()),
    "sum": (gpt, TOKENS, TOKENS, tokens_loss(reduction="sum")),
    "ignore_index": (gpt, TOKENS, padded(TOKENS), tokens_loss()),
    "weighted": (gpt, TOKENS, TOKENS, lambda o, y: tokens_loss(weight=torch.arange(1.0, 51.0))(o, y)),
    "infonce": (
        mlp,
        X,
        Y,
        lambda o, y: F.cross_entropy(
            F.normalize(o, dim=1) @ F.normalize(y, dim=1).T / 0.1, torch.arange(len(o))
        ),
    ),
    "rmse": (mlp, X, Y, lambda o, y: F.mse_loss(o, y).sqrt()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunks", [3, 4])
def test_gradients_equal_those_of_the_whole_batch(name, chunks):
    make, x, y, loss = CASES[name]
    whole, _ = gradients(make, x, y, loss)
    parts, records = gradients(make, x, y, loss, chunks)
    assert records[-1]["state"] == "applied"
    assert float((parts - whole).norm() / whole.norm()) <= 1e-12


def test_classical_accumulation_is_wrong_where_this_is_right():
    """The case that makes the fix worth having: padded tokens, mean over tokens."""
    make, x, y, loss = CASES["ignore_index"]
    whole, _ = gradients(make, x, y, loss)
    torch.manual_seed(0)
    net = make()
    for part in torch.arange(len(x)).tensor_split(4):
        (loss(net(x[part]), y[part]) * len(part) / len(x)).backward()
    classical = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert float((classical - whole).norm() / whole.norm()) > 0.1


class ReturnsLoss(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.net = mlp()
        self.reduction = reduction

    def forward(self, x, y):
        return {"loss": F.mse_loss(self.net(x), y, reduction=self.reduction), "extra": None}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_computed_inside_the_model_is_measured_not_guessed(reduction):
    def run(chunks):
        records = []
        fixes = [{"id": "microbatch-exact", "options": {"chunks": 3}}] if chunks else []
        runtime = apply({"fixes": fixes}, records.append)
        try:
            torch.manual_seed(0)
            net = ReturnsLoss(reduction)
            loss = net(X, Y)["loss"]
            loss.backward()
            return loss.item(), torch.cat([p.grad.flatten() for p in net.parameters()])
        finally:
            runtime.undo()

    plain, parts = run(False), run(True)
    assert parts[0] == pytest.approx(plain[0], rel=1e-12)
    assert float((parts[1] - plain[1]).norm() / plain[1].norm()) <= 1e-12


def test_refused_with_batch_norm():
    make = lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))  # noqa: E731
    whole, _ = gradients(make, X, Y, F.mse_loss)
    parts, records = gradients(make, X, Y, F.mse_loss, 4)
    assert records[-1]["state"] == "refused"
    assert "BatchNorm" in records[-1]["detail"]
    assert torch.equal(whole, parts)


def test_refused_when_an_output_has_no_batch_dimension():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            out = self.net(x)
            return out.T @ out

    whole, _ = gradients(Pair, X, Y, lambda o, y: o.sum())
    parts, records = gradients(Pair, X, Y, lambda o, y: o.sum(), 2)
    assert records[-1]["state"] == "refused"
    assert torch.equal(whole, parts)


def test_refused_with_fsdp():
    class FSDPThing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x)

    _, records = gradients(FSDPThing, X, Y, F.mse_loss, 2)
    assert records[-1]["state"] == "refused"
    assert "FSDP" in records[-1]["detail"]


def test_checkpointing_stays_active_inside_a_chunk():
    calls = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            calls.append(torch.is_grad_enabled())
            return torch.tanh(self.inner(x))

    make = lambda: nn.Sequential(Counting(), Counting(), nn.Linear(16, 4))  # noqa: E731
    runtime = apply(
        {"fixes": [{"id": "ckpt"}, {"id": "microbatch-exact", "options": {"chunks": 2}}]}, lambda r: None
    )
    try:
        F.mse_loss(make()(X), Y).backward()
    finally:
        runtime.undo()
    # Per block: two chunks without a graph, two again with one, and two recomputed by the checkpoint.
    assert len(calls) == 2 * (2 + 2 + 2)
