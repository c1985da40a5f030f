"""Source patches: minimal, in the file's own format, taken by `git apply`, and equal to their run-time twins."""

import subprocess
import textwrap

import pytest

from oomscope.core.fixes.patches import PATCHES, patch
from oomscope.core.fixes.patches.text import unified_diff
from oomscope.errors import PatchDoesNotApply

SCRIPT = '''\
"""A training script."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:  # the body
            x = block(x)
        return x


class Attention(nn.Module):
    def forward(self, q, k, v, mask):
        weights = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5  # scores
        weights = weights.masked_fill(mask == 0, float("-inf"))
        weights = weights.softmax(dim=-1)
        return (weights @ v).transpose(1, 2)


def evaluate(model, loader):
    total = 0.0
    for x, y in loader:
        total += model(x).sum().item()
    return total


def main(loader, rank):
    model = Net().to(rank)
    model = DDP(model, device_ids=[rank])
    opt = torch.optim.AdamW(
        model.parameters(),
        lr=1e-3,  # warm
    )
    losses = []
    running = 0
    history = {}
    for x, y in loader:
        x = x.to(rank)
        out = model(x)
        loss = nn.functional.mse_loss(out, y)
        opt.zero_grad(set_to_none=False)
        loss.backward()
        opt.step()
        losses.append(loss)  # keep
        running += loss
        history["last"] = loss
        print(loss.item())
    torch.save(model.module.state_dict(), "x.pt")


def resume(model, opt, path):
    state = torch.load(path)  # from the last run
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
'''

#: A language model whose output layer and loss stand in one function.
HEAD = """

class LanguageModel(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)

    def loss(self, x, tokens):
        logits = self.head(self.norm(x))
        # next token
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), tokens[:, 1:].flatten(), ignore_index=0)
"""


#: On one GPU.
PLAIN = "".join(line for line in SCRIPT.splitlines(keepends=True) if "DDP" not in line)


def source_of(fix):
    """`SCRIPT` in the form that the patch of `fix` needs."""
    if fix == "microbatch-exact":
        return PLAIN
    return SCRIPT + HEAD if fix == "fused-ce" else SCRIPT


EXPECTED = {
    "leak-detach": [
        "losses.append(loss.detach())  # keep",
        "running += loss.detach()",
        'history["last"] = loss.detach()',
    ],
    "load-cpu": ['state = torch.load(path, map_location="cpu")  # from the last run'],
    "zero-none": ["opt.zero_grad()"],
    "eval-no-grad": ["@torch.no_grad()"],
    "bucket-view": ["DDP(model, device_ids=[rank], gradient_as_bucket_view=True)"],
    "optim-fused": ["        fused=True,"],
    "amp-bf16": [
        "        with torch.autocast(x.device.type, dtype=torch.bfloat16):",
        "            out = model(x)",
        "            loss = nn.functional.mse_loss(out, y)",
    ],
    "sdpa": [
        "        # scores",
        "        return torch.nn.functional.scaled_dot_product_attention(",
        "            q, k, v,",
        "            attn_mask=mask != 0,",
        "        ).transpose(1, 2)",
    ],
    "ckpt": [
        "from torch.utils.checkpoint import checkpoint",
        "x = checkpoint(block, x, use_reentrant=False)",
    ],
    "ckpt-selective": [
        "from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts",
        "def _keep_products():",
        "x = checkpoint(block, x, use_reentrant=False, context_fn=_keep_products)",
    ],
    "ckpt-half": [
        "for index, block in enumerate(self.blocks):  # the body",
        "x = checkpoint(block, x, use_reentrant=False) if index % 2 == 0 else block(x)",
    ],
    "offload-activations": [
        "for block in self.blocks:  # the body",
        "            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):",
        "                x = block(x)",
    ],
    "microbatch-exact": [
        "out = torch.cat([checkpoint(model, part, use_reentrant=False) for part in x.chunk(4)])",
        "total += model(x).sum().item()",
    ],
    "fused-ce": [
        "def _head_cross_entropy(hidden, head, target, ignore_index=-100):",
        "        hidden = self.norm(x)",
        "        # next token",
        "        return _head_cross_entropy("
        "hidden[:, :-1].flatten(0, -2), self.head, tokens[:, 1:].flatten(), ignore_index=0)",
    ],
    "zero1": ["ZeroRedundancyOptimizer(", "optimizer_class=torch.optim.AdamW,"],
    "fsdp2": [
        "for block in model.blocks:",
        "model = fully_shard(model)",
        'torch.save(model.state_dict(), "x.pt")',
    ],
}


def git(folder, *words):
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("fix", PATCHES)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_patch_is_minimal_and_git_takes_it_and_takes_it_back(fix, ending, tmp_path):
    before = source_of(fix).replace("\n", ending)
    result = patch(fix, before)
    after = result.code
    for line in EXPECTED[fix]:
        assert line in after.replace("\r\n", "\n")
    compile(after, "train.py", "exec")
    assert result.changes
    removed = set(before.splitlines()) - set(after.splitlines())
    assert len(removed) <= 6, "only what has to change changes"
    assert ending == "\n" or "\n" not in after.replace("\r\n", "")

    path = tmp_path / "train.py"
    path.write_bytes(before.encode())
    git(tmp_path, "init", "-q")
    (tmp_path / "f.diff").write_bytes(unified_diff("train.py", before, after).encode())
    check = git(tmp_path, "apply", "--check", "f.diff")
    assert check.returncode == 0, check.stderr
    assert git(tmp_path, "apply", "f.diff").returncode == 0
    assert path.read_bytes() == after.encode()
    assert git(tmp_path, "apply", "-R", "f.diff").returncode == 0
    assert path.read_bytes() == before.encode()


@pytest.mark.parametrize("fix", sorted(set(PATCHES) - {"eval-no-grad"}))
def test_a_patched_file_is_refused_the_second_time(fix):
    once = patch(fix, source_of(fix)).code
    with pytest.raises(PatchDoesNotApply):
        patch(fix, once)


@pytest.mark.parametrize("fix", PATCHES)
def test_what_is_not_understood_is_refused(fix):
    with pytest.raises(PatchDoesNotApply):
        patch(fix, "print('hello')\n")
    with pytest.raises(PatchDoesNotApply, match="not valid Python"):
        patch(fix, "def broken(:\n")


@pytest.mark.parametrize(
    ("fix", "source", "why"),
    [
        ("microbatch-exact", SCRIPT, "DistributedDataParallel"),
        ("microbatch-exact", PLAIN.replace("nn.Linear", "nn.BatchNorm1d"), "BatchNorm"),
        ("microbatch-exact", PLAIN.replace("out = model(x)", "out, _ = model(x)"), "no `output"),
        ("microbatch-exact", PLAIN.replace("model(x)", "model(**x)"), "no `output"),
        ("fused-ce", SCRIPT + HEAD.replace("# next token", "print(logits)"), "logits is used for more"),
        ("fused-ce", SCRIPT + HEAD.replace("ignore_index=0", "label_smoothing=0.1"), "plan file"),
        ("fused-ce", SCRIPT + HEAD.replace("logits[:, :-1]", "logits[:, :, :-1]"), "plan file"),
        ("fused-ce", SCRIPT + HEAD.replace("reshape(-1,", "view(2,"), "plan file"),
        ("ckpt-half", SCRIPT.replace("x = block(x)", "x = x + block(x) + block(x)"), "no loop"),
        ("ckpt-half", SCRIPT.replace("in self.blocks:", "in enumerate(self.blocks, 1):"), "no loop"),
        ("offload-activations", SCRIPT.replace("block(x)", "checkpoint(block, x, use_reentrant=True)"), "calls"),
    ],
)  # fmt: skip
def test_a_form_that_would_compute_something_else_is_refused(fix, source, why):
    assert source != SCRIPT or fix == "microbatch-exact"
    with pytest.raises(PatchDoesNotApply, match=why):
        patch(fix, source)


def test_parts_inside_an_expression_get_a_line_of_their_own():
    source = PLAIN.replace("out = model(x)\n        ", "").replace(
        "mse_loss(out, y)", "mse_loss(model(x), y)  # L2"
    )
    code = patch("microbatch-exact", source).code
    assert (
        "        outputs = torch.cat([checkpoint(model, part, use_reentrant=False) for part in x.chunk(4)])\n"
        in code
    )
    assert "        loss = nn.functional.mse_loss(outputs, y)  # L2\n" in code


def test_parts_do_not_overwrite_a_variable_of_the_script():
    source = (
        PLAIN.replace("out = model(x)\n        ", "")
        .replace("mse_loss(out, y)", "mse_loss(model(x), y)")
        .replace("    losses = []\n", "    losses = []\n    outputs = []\n")
    )
    code = patch("microbatch-exact", source).code
    assert "    outputs = []\n" in code
    assert "        outputs_2 = torch.cat(" in code
    assert "        loss = nn.functional.mse_loss(outputs_2, y)\n" in code


def test_the_fused_head_does_not_overwrite_a_variable_of_the_function():
    source = (
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(8, 100)\n\n"
        "    def forward(self, x, hidden, tokens):\n        logits = self.head(x)\n"
        "        loss = F.cross_entropy(logits, tokens)\n        return loss, hidden\n"
    )
    code = patch("fused-ce", source).code
    assert "        hidden_2 = x\n" in code
    assert "_head_cross_entropy(hidden_2, self.head, tokens)" in code
    assert "return loss, hidden\n" in code


def test_every_second_does_not_overwrite_a_parameter_of_the_function():
    source = (
        "class Net:\n    def forward(self, x, index):\n        for block in self.blocks:\n"
        "            x = block(x)\n        return x[index]\n"
    )
    code = patch("ckpt-half", source).code
    assert "for index_2, block in enumerate(self.blocks):" in code
    assert "if index_2 % 2 == 0 else block(x)" in code


def test_every_second_of_nested_loops_counts_each_with_a_name_of_its_own():
    source = (
        "class Net:\n    def forward(self, x):\n        for stage in self.stages:\n"
        "            for block in self.blocks:\n                x = block(x)\n            x = stage(x)\n"
        "        return x\n"
    )
    code = patch("ckpt-half", source).code
    assert "for index_2, stage in enumerate(self.stages):" in code
    assert "for index, block in enumerate(self.blocks):" in code


def test_a_leak_is_patched_on_the_reported_line_only():
    line = next(i for i, text in enumerate(SCRIPT.splitlines(), 1) if "losses.append" in text)
    code = patch("leak-detach", SCRIPT, {"line": line}).code
    assert "losses.append(loss.detach())" in code
    assert "running += loss\n" in code
    with pytest.raises(PatchDoesNotApply, match="on line 3"):
        patch("leak-detach", SCRIPT, {"line": 3})


def test_a_file_without_a_newline_at_its_end_keeps_it_so():
    source = "opt.zero_grad(set_to_none=False)"
    after = patch("zero-none", source).code
    assert after == "opt.zero_grad()"
    assert unified_diff("a.py", source, after).count("\\ No newline at end of file") == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("net.load_state_dict(torch.load(p))", 'net.load_state_dict(torch.load(p, map_location="cpu"))'),
        ("s = torch.load(p, 'cuda')\nm.load_state_dict(s)", 's = torch.load(p, "cpu")\nm.load_state_dict(s)'),
        (
            "s = torch.load(p, map_location=device)\nm.load_state_dict(s['m'])",
            "s = torch.load(p, map_location=\"cpu\")\nm.load_state_dict(s['m'])",
        ),
        (
            "nets[0].load_state_dict(torch.load(p, weights_only=True))",
            'nets[0].load_state_dict(torch.load(p, weights_only=True, map_location="cpu"))',
        ),
    ],
)
def test_a_load_goes_to_host_memory_however_it_is_written(before, after):
    assert patch("load-cpu", before).code == after


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x = torch.load(p)\ny = x + 1", "none whose result goes into load_state_dict"),
        ("s = torch.load(p, map_location='cpu')\nm.load_state_dict(s)", "already"),
        ("s = torch.load(p, torch.device('cpu'))\nm.load_state_dict(s)", "already"),
        ("m.load_state_dict(load(p))", "none whose result"),
    ],
)
def test_a_load_that_is_used_where_it_lies_is_left_alone(source, why):
    with pytest.raises(PatchDoesNotApply, match=why):
        patch("load-cpu", source)


def test_tabs_stay_tabs():
    loop = "for x in data:\n\tout = model(x)\n\tloss = out.sum()\n\tloss.backward()\n"
    source = f"import torch\n{loop}\nopt = torch.optim.SGD(model.parameters(), lr=1)\n"
    code = patch("amp-bf16", source).code
    assert "\twith torch.autocast(" in code
    assert "\t\tout = model(x)" in code
    assert "    " not in code


def test_saving_and_accumulation_are_named_as_work_left_to_do():
    notes = patch("fsdp2", SCRIPT).notes
    assert any("get_model_state_dict" in note for note in notes)
    assert any("consolidate_state_dict" in note for note in patch("zero1", SCRIPT).notes)


def test_code_that_only_looks_like_it_is_left_alone():
    source = textwrap.dedent(
        """
        names = []
        names.append(name)
        for item in self.things:
            item.run()
        queue.put(loss_name)
        """
    )
    for fix in ("leak-detach", "ckpt"):
        with pytest.raises(PatchDoesNotApply):
            patch(fix, source)
