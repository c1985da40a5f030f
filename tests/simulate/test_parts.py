"""Parts of the simulated device that need no card: cards, refusals, the self-test, formulas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomscope.simulate.cards import CARDS, resolve
from oomscope.simulate.selftest import command, judge

GIB = 1 << 30


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("a100-40g", "a100-40g"),
        ("sim:h100-80g", "h100-80g"),
        ("H100", "h100-80g"),
        ("rtx4090", "rtx4090-24g"),
        ("4090", "rtx4090-24g"),
        ("A100_80GB", "a100-80g"),
    ],
)
def test_cards_by_name(spec: str, name: str) -> None:
    assert resolve(spec).name == name


def test_card_by_size() -> None:
    card = resolve("24GiB")
    assert card.usable_bytes == 24 * GIB
    assert card.capacity_bytes() < card.usable_bytes


def test_overrides() -> None:
    card = resolve("h100-80g,context=1GiB,nccl=2GiB,cc=10.0,sms=7,usable=50GiB")
    assert (card.context_bytes, card.compute_capability, card.multiprocessors) == (GIB, (10, 0), 7)
    assert card.capacity_bytes() == 49 * GIB
    assert card.capacity_bytes(world_size=2) == 47 * GIB


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("a100-41g", "Did you mean a100-40g?"),
        ("nonsense", "Cards: t4-16g"),
        ("12MiB", "nothing runs"),
        ("a100-40g,contxt=1", "Did you mean context=?"),
        ("a100-40g,context=much", "not a size"),
        ("", "Cards:"),
    ],
)
def test_wrong_cards_are_refused_with_a_hint(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"no card|bad value") as caught:
        resolve(spec)
    assert said in str(caught.value)


def test_every_card_is_plausible_and_has_a_source() -> None:
    for card in CARDS.values():
        gigabytes = int(card.name.rpartition("-")[2][:-1])
        assert 0.85 * gigabytes * 1e9 < card.usable_bytes <= gigabytes * GIB
        assert card.source
        assert card.multiprocessors > 0
        assert 0 < card.context_bytes < GIB


def test_cards_need_no_torch() -> None:
    code = "import sys, oomscope.simulate.cards; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_self_test_passes_here() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(command(sys.executable), capture_output=True, text=True, timeout=120)
    result = judge(done.returncode, done.stdout)
    assert result["ok"], result
    assert result["torch"].startswith("2.")


def test_self_test_refuses_another_version_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from oomscope.simulate import session

    monkeypatch.setattr(torch, "__version__", "2.1.0")
    reason = session.refusal()
    assert reason is not None
    assert "2.1.0" in reason
    assert "2.13" in reason
    assert "\n" not in reason
    monkeypatch.setattr(session.sys, "platform", "darwin")
    assert "needs Linux" in (session.refusal() or "")


def test_self_test_that_dies_is_a_reason() -> None:
    result = judge(-6, "terminate called\n")
    assert not result["ok"]
    assert "-6" in result["reason"]


def test_self_test_without_torch() -> None:
    code = command(sys.executable)[2].replace("import sys;", "import sys; sys.modules['torch'] = None;")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    result = judge(done.returncode, done.stdout)
    assert not result["ok"]
    assert "cannot import torch" in result["reason"]


def test_composite_operations_with_native_kernels_are_all_known() -> None:
    """Fails with a torch that has a new one: it would be taken apart for CUDA tensors, and memory would be wrong."""
    pytest.importorskip("torch")
    from oomscope.simulate.ops.native import COMPOSITE_WITH_NATIVE_KERNEL, composite_with_native_kernel

    assert composite_with_native_kernel() == sorted(COMPOSITE_WITH_NATIVE_KERNEL)


def test_operations_that_only_a_cuda_build_has_whole_are_all_known() -> None:
    """The same for those without a native kernel on the CPU, from the list of operations that comes with torch."""
    pytest.importorskip("torch")
    torchgen, yaml = pytest.importorskip("torchgen"), pytest.importorskip("yaml")
    from oomscope.simulate.ops.registry import COMPOSITE_EXCEPT_ON_CUDA

    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    found = set()
    for entry in yaml.safe_load(path.read_text()):
        keys = {key.strip() for keys in entry.get("dispatch", ()) for key in keys.split(",")}
        if {"CompositeImplicitAutograd", "CUDA"} <= keys and "CPU" not in keys:
            found.add("aten::" + entry["func"].split("(")[0])
    assert found == set(COMPOSITE_EXCEPT_ON_CUDA)


def test_cublas_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from oomscope.simulate.ops.workspaces import cublas_workspace_bytes

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert cublas_workspace_bytes((8, 0)) == cublas_workspace_bytes((10, 0)) == 8519680
    assert cublas_workspace_bytes((9, 0)) == 32 << 20
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert cublas_workspace_bytes((8, 0)) == 32 << 20
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "nonsense")
    assert cublas_workspace_bytes((8, 0)) == 8519680


def test_embedding_backward_takes_partial_sums(simulate_text: Any) -> None:
    pytest.importorskip("torch")
    text = """
import torch
table = torch.nn.Embedding(50000, 768).cuda()
out = table(torch.randint(50000, (8, 1024), device="cuda"))
gradient = torch.ones_like(out)
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
out.backward(gradient)
print(f"extra={torch.cuda.max_memory_allocated() - before}")
"""
    rows, count, width = 50000, 8192, 768
    gradient = rows * width * 4
    partial = (count // 10 + min(count, rows)) * width * 4
    extra = simulate_text(text).value("extra")
    assert gradient + partial <= extra <= gradient + partial + count * 50


def test_plugins_register_kernels_and_stay_alone(simulate_text: Any, tmp_path: Any) -> None:
    pytest.importorskip("torch")
    (tmp_path / "their_plugin.py").write_text(
        """
import torch
library = torch.library.Library("theirs", "DEF")
library.define("twice(Tensor x) -> Tensor")

def register(registry):
    torch.library.register_fake("theirs::twice", torch.empty_like)
    registry.workspace("theirs::twice")(lambda mode, func, args, kwargs, outs: [5 << 20])
"""
    )
    info = tmp_path / "their_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[oomscope.simulate]\nbroken = no_such_module:register\ntheirs = their_plugin:register\n"
    )
    text = """
import torch
x = torch.ones(1 << 20, device="cuda")
before = torch.cuda.memory_allocated()
y = torch.ops.theirs.twice(x)
print(f"kept={torch.cuda.memory_allocated() - before}")
print(f"peak={torch.cuda.max_memory_allocated() - before}")
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    run = simulate_text(text, env={"PYTHONPATH": path})
    assert run.exit_code == 0, run.stderr
    assert run.value("kept") == 4 << 20
    assert run.value("peak") == 9 << 20
    assert run.simulated["plugins"] == ["theirs"]
    assert "no_such_module" in run.records["agent_error"]["error"]


@pytest.mark.parametrize(
    ("rows", "columns", "card", "partial"),
    [
        (2048, 1024, "h100-80g", 16 << 20),  # recorded, torch 2.11
        (1280, 1024, "h100-80g", 10 << 20),  # recorded, torch 2.6
        (512, 2560, "h100-80g", 0),  # recorded, torch 2.6
        (128, 1024, "a100-80g", 0),
        (8192, 4096, "a100-80g", 4 * 4096 * 54 * 128),
        (8192, 50257, "a100-80g", 0),
    ],
)
def test_sums_over_rows_keep_partial_sums(rows: int, columns: int, card: str, partial: int) -> None:
    pytest.importorskip("torch")
    from oomscope.simulate.ops.reductions import partial_sums

    assert partial_sums(rows, columns, resolve(card)) == partial


def test_the_current_device_is_that_of_torchs_core(simulate_text: Any) -> None:
    text = """
import threading
import torch
assert torch.cuda.device_count() == 4 and not torch.cuda.is_initialized()
torch.cuda.set_device(3)
assert torch.cuda.is_initialized() and torch.cuda.current_device() == 3
seen = [torch.ones(2).cuda(), torch.ones(2).to("cuda"), torch.empty(2, device="cuda"), torch.tensor([1], device="cuda")]
seen += [torch.empty_like(torch.empty(2, device="meta"), device="cuda"), torch.nn.Linear(2, 2).cuda().weight]
assert {each.device.index for each in seen} == {3}, seen
with torch.cuda.device(1):
    assert torch.empty(2, device="cuda").device.index == torch.ones(2).cuda().device.index == 1
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        assert torch.ones(2).cuda().device.index == torch.empty(2, device="cuda").device.index == 2
        return gradient * 2
Double.apply(torch.ones(2, device="cuda:2", requires_grad=True)).sum().backward()
other = []
thread = threading.Thread(target=lambda: other.append(torch.ones(2, device="cuda").device.index))
thread.start()
thread.join()
assert other == [0]  # a new thread begins with the first device
"""
    run = simulate_text(text, card="24GiB,count=4")
    assert run.exit_code == 0, run.stderr


def test_real_cards_are_hidden_and_the_script_does_not_see_it(simulate_text: Any) -> None:
    text = """
import ctypes, os
import torch
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
assert getenv(b"CUDA_VISIBLE_DEVICES") == b""
print("seen=" + os.environ["CUDA_VISIBLE_DEVICES"])
"""
    run = simulate_text(text, env={"CUDA_VISIBLE_DEVICES": "1"})
    assert run.value("seen") == 1
