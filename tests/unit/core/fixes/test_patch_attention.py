"""Fused attention: the forms that people write, each with the same outputs and gradients as before."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from oomscope.core.fixes.patches import patch
from oomscope.errors import PatchDoesNotApply

torch = pytest.importorskip("torch")

#: Bodies of `forward(self, q, k, v, mask=None)`; self.scale, self.bias (causal), self.drop, self.softmax exist.
FORMS = {
    "plain": """
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att, dim=-1)
        return att @ v
    """,
    "causal": """
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        # only the past
        att = att.masked_fill(self.bias[:, :, : q.size(2), : q.size(2)] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.drop(att)
        y = att @ v
        return y.transpose(1, 2).contiguous()
    """,
    "scaled query": """
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.drop(attn)
        x = (attn @ v).transpose(1, 2).flatten(2)
        return x
    """,
    "several names": """
        scores = torch.matmul(q, k.transpose(2, 3)) / self.head ** 0.5
        if mask is not None:
            scores = scores + mask
        weights = F.softmax(scores.float(), dim=-1).type_as(q)
        output = torch.matmul(weights, v)
        return output
    """,
    "in place": """
        dots = torch.matmul(q, k.mT)
        dots *= self.scale
        dots.masked_fill_(~(self.bias[:, :, : q.size(2), : q.size(2)] > 0), -1e9)
        out = torch.matmul(self.softmax(dots), v)
        return out
    """,
    "one expression a step": """
        att = self.drop(F.softmax(q @ k.transpose(-1, -2) * self.scale, dim=-1))
        return torch.einsum("bhtd->bthd", att @ v)
    """,
    "functional dropout": """
        att = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * self.scale, dim=-1, dtype=torch.float32)
        att = F.dropout(att.to(q.dtype), p=0.5, training=self.training)
        return att.matmul(v)
    """,
    "three dimensions": """
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        att = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.head)
        att = att.softmax(-1)
        return torch.bmm(att, v)
    """,
}

MODULE = """\
import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head
        self.scale = head ** -0.5
        self.drop = nn.Dropout(0.1)
        self.softmax = nn.Softmax(dim=-1)
        self.temperature = nn.Parameter(torch.ones(1))
        self.logit = nn.Parameter(torch.zeros(1))
        self.register_buffer("divisor", torch.tensor(2.0))
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, q, k, v, mask=None):
{body}
"""


def source_of(body: str) -> str:
    return MODULE.format(body=textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8))


def run(source: str, *, with_mask: bool) -> list[Any]:
    names: dict[str, Any] = {}
    exec(compile(source, "attention.py", "exec"), names)  # a module of this test
    torch.manual_seed(0)
    module = names["Attention"](8).eval()
    q, k, v = (torch.randn(2, 3, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.randn(6, 6, dtype=torch.float64) if with_mask else None
    out = module.double()(q, k, v, mask)
    return [out, *torch.autograd.grad(out.square().sum(), [q, k, v])]


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_outputs_and_gradients_stay(name: str, with_mask: bool) -> None:
    before = source_of(FORMS[name])
    after = patch("sdpa", before).code
    assert "scaled_dot_product_attention(" in after
    assert "softmax(" not in after.partition("def forward")[2]
    # Scores that the user made float are float32 there, and float64 in the fused kernel.
    close = 1e-6 if "float" in FORMS[name].replace('float("-inf")', "") else 1e-12
    for a, b in zip(run(before, with_mask=with_mask), run(after, with_mask=with_mask), strict=True):
        torch.testing.assert_close(b, a, rtol=close, atol=close)


def test_dropout_and_comments_are_kept() -> None:
    after = patch("sdpa", source_of(FORMS["causal"])).code
    assert "dropout_p=self.drop.p if self.training else 0.0" in after
    assert "# only the past" in after
    assert max(map(len, after.splitlines())) <= 100


def test_a_mask_brings_the_hint_that_a_causal_one_is_not_needed() -> None:
    assert patch("sdpa", source_of(FORMS["causal"])).notes
    assert not patch("sdpa", source_of(FORMS["plain"])).notes


REFUSED = {
    "weights are returned": """
        att = (q @ k.transpose(-2, -1)) * self.scale
        att = att.softmax(-1)
        return att @ v, att
    """,
    "weights are stored": """
        att = (q @ k.transpose(-2, -1)) * self.scale
        att = att.softmax(-1)
        self.last = att
        return att @ v
    """,
    "scores are read under their first name": """
        scores = (q @ k.transpose(-2, -1)) * self.scale
        att = scores.softmax(-1)
        return (att @ v) + scores.mean()
    """,
    "scores are read earlier": """
        scores = (q @ k.transpose(-2, -1)) * self.scale
        print(scores.shape)
        att = scores.softmax(-1)
        return att @ v
    """,
    "another dimension": """
        att = (q @ k.transpose(-2, -1)) * self.scale
        att = att.softmax(-2)
        return att @ v
    """,
    "no softmax": """
        att = (q @ k.transpose(-2, -1)) * self.scale
        return att @ v
    """,
    "the query changes in between": """
        att = (q @ k.transpose(-2, -1)) * self.scale
        q = q + 1
        att = att.softmax(-1)
        return att @ v + q
    """,
    "masked by a finite number": """
        att = (q @ k.transpose(-2, -1)) * self.scale
        att = att.masked_fill(self.bias[:, :, : q.size(2), : q.size(2)] == 0, -1.0)
        att = att.softmax(-1)
        return att @ v
    """,
    "masked twice": """
        att = (q @ k.transpose(-2, -1)) * self.scale
        att = att + mask
        att = att.masked_fill(mask == 0, float("-inf"))
        att = att.softmax(-1)
        return att @ v
    """,
    "scaled after the mask": """
        att = q @ k.transpose(-2, -1) + mask
        att = (att * self.scale).softmax(-1)
        return att @ v
    """,
    "a learned scale": """
        att = (q @ k.transpose(-2, -1)) * self.temperature
        return att.softmax(-1) @ v
    """,
    "a scale that is computed from a learned one": """
        att = (q @ k.transpose(-2, -1)) * torch.exp(self.logit)
        return att.softmax(-1) @ v
    """,
    "a scale in a buffer": """
        att = (q @ k.transpose(-2, -1)) / self.divisor
        return att.softmax(-1) @ v
    """,
    "positive infinity": """
        att = (q @ k.transpose(-2, -1)) * self.scale
        att = att.masked_fill(mask == 0, float("inf"))
        return att.softmax(-1) @ v
    """,
    "a layer that is no dropout": """
        att = ((q @ k.transpose(-2, -1)) * self.scale).softmax(-1)
        att = self.talking_heads(att)
        return att @ v
    """,
    "talking heads after a product of two weights": """
        att = ((q @ k.transpose(-2, -1)) * self.scale).softmax(-1)
        return (att @ att) @ v
    """,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_weights_is_refused(name: str) -> None:
    with pytest.raises(PatchDoesNotApply):
        patch("sdpa", source_of(REFUSED[name]))


def test_a_file_that_has_it_already_is_refused() -> None:
    with pytest.raises(PatchDoesNotApply, match="already"):
        patch("sdpa", patch("sdpa", source_of(FORMS["plain"])).code)


def test_torch_is_imported_where_only_names_of_it_were() -> None:
    source = "from torch import nn\n" + textwrap.dedent("""
        class Attention(nn.Module):
            def forward(self, q, k, v):
                return ((q @ k.transpose(-2, -1)) / 8).softmax(-1) @ v
        """)
    after = patch("sdpa", source).code
    assert "import torch\n" in after
    assert "torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0 / 8)" in after


LAYERS = """\
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        {line}
        return y
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("y, _ = self.attn(x, x, x)", "y, _ = self.attn(x, x, x, need_weights=False)"),
        ("y, weights = self.attn(x, x, x)", "y, weights = self.attn(x, x, x, need_weights=False)"),
        ("y = x + self.attn(x, x, x)[0]", "y = x + self.attn(x, x, x, need_weights=False)[0]"),
    ],
)
def test_weights_of_a_layer_that_nobody_reads_are_not_asked_for(line: str, expected: str) -> None:
    assert expected in patch("sdpa", LAYERS.format(line=line)).code


@pytest.mark.parametrize(
    "line",
    [
        "y, w = self.attn(x, x, x); self.seen = w",
        "y, _ = self.attn(x, x, x, need_weights=True)",
        "y, _ = self.other(x, x, x)",
    ],
)
def test_layers_whose_weights_are_wanted_stay(line: str) -> None:
    with pytest.raises(PatchDoesNotApply):
        patch("sdpa", LAYERS.format(line=line))


def test_a_model_told_to_be_eager_is_fused() -> None:
    line = 'model = AutoModel.from_pretrained(name, attn_implementation="eager")\n'
    assert 'attn_implementation="sdpa"' in patch("sdpa", line).code
