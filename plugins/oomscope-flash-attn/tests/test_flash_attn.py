"""Scripts that import flash_attn, on a simulated card; torch's own flash kernels are the yardstick."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PLUGIN = Path(__file__).parents[1]
ROOT = PLUGIN.parents[1]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="the real flash_attn is installed"
)


@pytest.fixture
def simulate(tmp_path):
    """Run the text of a script, in an environment in which the plugin is installed."""
    section = (
        (PLUGIN / "pyproject.toml").read_text().split('entry-points."oomscope.simulate"]')[1].split("[")[0]
    )
    info = tmp_path / "oomscope_flash_attn-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oomscope-flash-attn\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[oomscope.simulate]\n" + section.replace('"', ""))

    def run(text, card="a100-40g"):
        script = tmp_path / "script.py"
        script.write_text(text)
        path = os.pathsep.join([str(tmp_path), str(PLUGIN), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "oomscope.simulate", "--card", card, str(script)],
            capture_output=True, text=True, timeout=240, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        values = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        return done, {name: json.loads(value) for name, value in values.items()}

    return run


HEAD = """
import torch
def made(*shape, **kwargs):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True, **kwargs)
def requested(which):
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
def measure(name, function, *inputs):
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    out = function(*inputs)
    print(f"{name}_kept={requested('current') - before}")
    out.backward(torch.ones_like(out))
    print(f"{name}_peak={requested('peak') - before}")
    assert all(each.grad.shape == each.shape for each in inputs if each.requires_grad)
    return out
"""


@pytest.mark.parametrize("key_heads", [16, 4])
def test_the_same_memory_as_torchs_own_flash_kernel(key_heads, simulate):
    text = (
        HEAD
        + f"""
from flash_attn import flash_attn_func
from torch.nn.functional import scaled_dot_product_attention
B, S, H, K, D = 2, 1000, 16, {key_heads}, 64
q, k, v = made(B, S, H, D), made(B, S, K, D), made(B, S, K, D)
out = measure("ours", lambda q, k, v: flash_attn_func(q, k, v, causal=True), q, k, v)
assert out.shape == (B, S, H, D) and out.dtype is torch.bfloat16
q, k, v = made(B, S, H, D), made(B, S, K, D), made(B, S, K, D)
def plain(q, k, v):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=K != H)
measure("torch", plain, q, k, v)
"""
    )
    done, values = simulate(text)
    assert done.returncode == 0, done.stderr
    small = 4096  # states of the generator
    assert abs(values["ours_kept"] - values["torch_kept"]) <= small
    assert abs(values["ours_peak"] - values["torch_peak"]) <= small


def test_every_layout_and_what_it_keeps(simulate):
    text = (
        HEAD
        + """
from flash_attn.flash_attn_interface import (
    flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func,
)
B, S, H, D = 2, 512, 8, 64
boundaries = torch.tensor([0, 300, 1024], dtype=torch.int32, device="cuda")
measure("qkv", flash_attn_qkvpacked_func, made(B, S, 3, H, D))
measure("kv", flash_attn_kvpacked_func, made(B, S, H, D), made(B, S, 2, H, D))
T = B * S
measure("varlen", lambda *qkv: flash_attn_varlen_func(*qkv, boundaries, boundaries, 724, 724, causal=True),
        made(T, H, D), made(T, H, D), made(T, H, D))
measure("varlen_qkv", lambda qkv: flash_attn_varlen_qkvpacked_func(qkv, boundaries, 724), made(T, 3, H, D))
measure("varlen_kv", lambda q, kv: flash_attn_varlen_kvpacked_func(q, kv, boundaries, boundaries, 724, 724),
        made(T, H, D), made(T, 2, H, D))
out, lse, _ = flash_attn_varlen_func(made(T, H, D), made(T, H, D), made(T, H, D), boundaries, boundaries, 724, 724,
                                     return_attn_probs=True)
assert out.shape == (T, H, D) and lse.shape == (H, T) and lse.dtype is torch.float32
"""
    )
    done, values = simulate(text)
    assert done.returncode == 0, done.stderr
    out, lse = 2 * 512 * 8 * 64 * 2, 2 * 512 * 8 * 4
    for layout in ("qkv", "kv", "varlen", "varlen_qkv", "varlen_kv"):
        assert out + lse <= values[f"{layout}_kept"] <= out + lse + 4096
        # dq, dk, dv and the float32 accumulator come on top in the backward pass
        assert values[f"{layout}_peak"] >= values[f"{layout}_kept"] + 3 * out + 2 * out


def test_odd_depths_are_padded_and_inference_keeps_the_output_only(simulate):
    text = (
        HEAD
        + """
from flash_attn import flash_attn_func
q, k, v = (made(2, 128, 4, 60) for _ in range(3))
out = measure("odd", flash_attn_func, q, k, v)
assert out.shape == (2, 128, 4, 60)
with torch.no_grad():
    q, k, v = (made(2, 128, 4, 64) for _ in range(3))
    before = requested("current")
    result = flash_attn_func(q, k, v)
    print(f"kept={requested('current') - before}")
"""
    )
    done, values = simulate(text)
    assert done.returncode == 0, done.stderr
    assert values["odd_kept"] >= 4 * 2 * 128 * 4 * 64 * 2
    assert values["kept"] == 2 * 128 * 4 * 64 * 2


def test_tokens_without_padding(simulate):
    text = (
        HEAD
        + """
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.rotary import apply_rotary_emb
mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], device="cuda")
tokens, indices, boundaries, longest, used = unpad_input(made(2, 4, 8), mask)
assert tokens.shape == (4, 8) and boundaries.tolist() == [0, 3, 4] and longest == 3
assert pad_input(tokens, indices, 2, 4).shape == (2, 4, 8)
x = made(2, 4, 2, 8)
apply_rotary_emb(x, made(4, 4), made(4, 4)).sum().backward()
assert x.grad.shape == x.shape
"""
    )
    done, _ = simulate(text)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("made", "card", "message"),
    [
        ("torch.randn(2, 8, 4, 64, device='cuda')", "a100-40g", "only support fp16 and bf16"),
        ("torch.randn(2, 8, 4, 64, device='cuda').half()", "v100-16g", "only supports Ampere GPUs or newer"),
        ("torch.randn(2, 8, 4, 512, device='cuda').half()", "a100-40g", "head dimension at most 256"),
        ("torch.randn(2, 8, 4, 64).half()", "a100-40g", "must be on CUDA device"),
    ],
)
def test_it_refuses_what_the_package_refuses(made, card, message, simulate):
    done, _ = simulate(f"import torch, flash_attn\nx = {made}\nflash_attn.flash_attn_func(x, x, x)\n", card)
    assert done.returncode == 1
    assert message in done.stderr


def test_libraries_see_a_distribution_of_that_name(simulate):
    text = """
import importlib.util
from importlib import metadata
import torch
assert importlib.util.find_spec("flash_attn") is not None
assert metadata.version("flash_attn") == metadata.version("flash-attn")
assert importlib.util.find_spec("flash_attn.ops") is None
try:
    metadata.version("no-such-package")
except metadata.PackageNotFoundError:
    print("asked=1")
"""
    done, values = simulate(text)
    assert done.returncode == 0, done.stderr
    assert values == {"asked": 1}
    assert '"plugins": ["flash-attn"]' in done.stderr
