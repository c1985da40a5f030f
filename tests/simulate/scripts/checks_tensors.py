# ruff: noqa: PT017, PT018
"""Operations, values and dispatch on simulated tensors."""

import io

import torch
from checks import run_all
from torch import nn
from torch.nn import functional as F


def cuda(*shape, **kwargs):
    return torch.randn(*shape, device="cuda", **kwargs)


def bytes_of(function):
    """(bytes that stay allocated, most bytes allocated on the way) of a call."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    kept = torch.cuda.memory_allocated() - before
    del result
    return kept, torch.cuda.max_memory_allocated() - before


def check_known_values():
    x = torch.tensor([1.5, 2.5], device="cuda")
    assert x[0].item() == 1.5
    assert float(x.sum()) == 4.0
    assert int(x.sum()) == 4
    assert bool((x > 1).all())
    assert not bool((x > 2).all())
    assert f"{x.sum():.2f}" == "4.00"
    assert x.tolist() == [1.5, 2.5]
    assert "1.5" in str(x)
    x.mul_(2)
    assert x.tolist() == [3.0, 5.0]
    view = x[1:]
    view.add_(1)
    assert x.tolist() == [3.0, 6.0]


def check_sums_over_a_dimension_of_a_scalar():
    one = torch.tensor(1.0, device="cuda")
    assert one.sum(0).item() == one.sum(-1).item() == one.sum(dim=(0,)).item() == 1.0
    assert one.sum(()).shape == one.sum([], keepdim=True).shape == ()


def check_unknown_write_forgets_the_value():
    x = torch.tensor([1.0, 2.0], device="cuda")
    x.copy_(cuda(2))
    x.add_(cuda(10_000).sum())
    assert x[1].item() == 1.0


def check_unknown_values_are_assumed():
    x = cuda(500, 500) @ cuda(500, 500)
    assert x.sum().item() == 1.0
    assert x.argmax().item() == 0
    assert not x.isnan().any().item()
    assert torch.isfinite(x).all().item()
    few = torch.randn(4, device="cuda")  # so few that conditions on them are assumed
    assert torch.isfinite(few).all().item()
    assert torch.isfinite(few.sum())
    assert not torch.isfinite(few.amax()).logical_and(torch.isfinite(few.amin())).logical_not()
    assert (few == few).all()
    assert x.cpu().numpy().shape == (500, 500)


def check_large_unknown_copies_take_no_memory():
    host = torch.empty(1 << 30, device="cuda").cpu()
    assert host.device.type == "cpu"
    assert host.numpy().shape == (1 << 30,)


def check_masks_of_known_values():
    x = torch.arange(10, device="cuda")
    assert x[x > 6].tolist() == [7, 8, 9]
    assert (x > 6).nonzero().shape == (3, 1)
    assert torch.masked_select(x, x < 3).tolist() == [0, 1, 2]
    assert torch.unique(x % 3).tolist() == [0, 1, 2]
    assert torch.bincount(x % 3).tolist() == [4, 3, 3]
    assert torch.repeat_interleave(torch.tensor([1, 2], device="cuda")).tolist() == [0, 1, 1]


def check_masks_of_unknown_values_are_full():
    x = cuda(100, 100)
    assert x[x > 0].shape == (10_000,)
    assert (x > 0).nonzero().shape == (10_000, 2)


def check_router_choices_are_balanced():
    tokens, experts, top = 4096, 8, 2
    _, chosen = cuda(tokens, experts).softmax(-1).topk(top, dim=-1)
    mask = F.one_hot(chosen, experts).permute(2, 1, 0)
    counts = [torch.where(mask[expert])[1].numel() for expert in range(experts)]
    assert counts == [tokens * top // experts] * experts, counts


def check_router_choices_beyond_a_million_elements():
    tokens, experts, top = 32_768, 64, 8
    _, chosen = cuda(tokens, experts).topk(top, dim=-1)
    mask = F.one_hot(chosen, experts).permute(2, 1, 0)
    assert mask.numel() > 1 << 23
    count = torch.where(mask[3])[1].numel()
    assert abs(count - tokens * top // experts) <= 1, count


def check_devices_do_not_mix():
    try:
        cuda(3) + torch.ones(3)
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError("no error")
    assert (cuda(3) * torch.tensor(2.0)).is_cuda


def check_numpy_needs_a_copy():
    try:
        cuda(3).numpy()
    except TypeError as error:
        assert "can't convert cuda:0 device type tensor to numpy" in str(error)
    else:
        raise AssertionError("no error")


def check_shapes_of_many_operations():
    x = cuda(8, 8)
    assert x.sort().values.shape == (8, 8)
    assert x.topk(2).values.shape == (8, 2)
    assert torch.einsum("ij,jk->ik", x, x).shape == (8, 8)
    assert torch.fft.fft(x).shape == (8, 8)
    assert torch.linalg.svd(x).S.shape == (8,)
    assert torch.linalg.inv(x).shape == x.cumsum(0).shape == (8, 8)
    assert x.scatter(0, torch.zeros(1, 8, dtype=torch.long, device="cuda"), 1.0).is_cuda


def check_shape_errors_are_torchs_own():
    try:
        cuda(3, 4) @ cuda(3, 4)
    except RuntimeError as error:
        assert "3, 4" in str(error), error
    else:
        raise AssertionError("no error")


def check_autocast():
    layer = nn.Linear(64, 64).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(cuda(2, 64)).dtype is torch.bfloat16
        assert layer(cuda(2, 64)).softmax(-1).dtype is torch.float32
        with torch.autocast("cuda", enabled=False):
            assert layer(cuda(2, 64)).dtype is torch.float32
    assert cuda(4).to(torch.float8_e4m3fn).dtype is torch.float8_e4m3fn


def check_inference_and_no_grad():
    layer = nn.Linear(4, 4).cuda()
    with torch.inference_mode():
        assert layer(cuda(2, 4)).is_inference()
    with torch.no_grad():
        assert not layer(cuda(2, 4)).requires_grad


def check_flash_attention_keeps_no_scores():
    q = cuda(2, 8, 2048, 64, dtype=torch.bfloat16)
    _kept, peak = bytes_of(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert peak < 2 * q.numel() * 2, peak


def check_attention_in_float32_is_memory_efficient():
    q = cuda(2, 8, 2048, 64)
    assert bytes_of(lambda: F.scaled_dot_product_attention(q, q, q))[1] < 2 * q.numel() * 4


def check_attention_backend_can_be_chosen():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = cuda(2, 8, 1024, 64, dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):
        assert bytes_of(lambda: F.scaled_dot_product_attention(q, q, q))[1] > 2 * 8 * 1024 * 1024 * 2


def check_silu_backward_is_one_kernel():
    x = cuda(1024, 1024, requires_grad=True)
    y = F.silu(x)
    gradient = torch.ones_like(y)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(gradient)
    assert torch.cuda.max_memory_allocated() - before == 4 << 20, torch.cuda.max_memory_allocated() - before


def check_gradients_are_added_in_place():
    x = cuda(1024, 1024, requires_grad=True)
    y = x * 1.0
    parts = [y.sin(), y.cos(), y.exp()]
    loss = sum(part.sum() for part in parts)
    del parts
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    # At most: the sum, one new part, and a factor of its formula.
    assert torch.cuda.max_memory_allocated() - before <= 3 * (4 << 20) + 4096


def check_checkpoint_both_kinds():
    from torch.utils.checkpoint import checkpoint

    block = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256)).cuda()
    x = cuda(512, 256, requires_grad=True)

    def kept(run):
        before = torch.cuda.memory_allocated()
        out = run()
        size = torch.cuda.memory_allocated() - before
        out.sum().backward()
        return size

    plain = kept(lambda: block(x))
    for reentrant in (True, False):
        assert kept(lambda r=reentrant: checkpoint(block, x, use_reentrant=r)) < plain / 4


def check_compile_runs_eagerly():
    function = torch.compile(lambda x: x.sin() + 1)
    assert function(cuda(3)).shape == (3,)
    layer = nn.Linear(3, 3).cuda()
    layer.compile()
    assert torch.compile(layer)(cuda(2, 3)).shape == (2, 3)


def check_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    q = cuda(1, 2, 128, 64, requires_grad=True)
    flex_attention(q, q, q).sum().backward()
    assert q.grad.shape == q.shape


def check_nested_tensor():
    nested = torch.nested.nested_tensor([cuda(3, 4), cuda(5, 4)], layout=torch.jagged)
    assert nested.shape[0] == 2
    assert (nested * 2).is_cuda


def check_functional_transforms():
    gradient = torch.func.vmap(torch.func.grad(lambda w: (w**2).sum()))(cuda(5, 3))
    assert gradient.shape == (5, 3)
    assert gradient.is_cuda


def check_scripted_function():
    @torch.jit.script
    def double(x: torch.Tensor):
        return x * 2 + 1

    assert double(cuda(3)).is_cuda


def check_double_backward():
    x = cuda(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert x.grad.shape == (3,)


def check_custom_operation_with_a_fake_kernel():
    @torch.library.custom_op("checks::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the real kernel needs a real card")

    @twice.register_fake
    def _(x):
        return torch.empty_like(x)

    assert twice(cuda(1000)).shape == (1000,)
    assert bytes_of(lambda: twice(cuda(1 << 20)))[0] == 4 << 20


def check_custom_operation_without_a_fake_kernel():
    library = torch.library.Library("checks", "FRAGMENT")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x, "CPU")
    try:
        torch.ops.checks.mystery(cuda(3))
    except NotImplementedError as error:
        text = str(error)
        assert "checks.mystery" in text and "register_fake" in text and "checks_tensors.py:" in text, text
        assert "\n" not in text
    else:
        raise AssertionError("no error")


def check_operations_that_torch_cannot_fake():
    assert torch.unique_consecutive(torch.tensor([1, 1, 2], device="cuda")).tolist() == [1, 2]
    assert torch.allclose(torch.ones(2, device="cuda"), torch.ones(2, device="cuda"))
    assert torch.linalg.lstsq(cuda(4, 4), cuda(4, 2)).solution.is_cuda
    packed = nn.utils.rnn.pack_padded_sequence(cuda(3, 5, 8), torch.tensor([5, 4, 2]), batch_first=True)
    assert packed.data.shape == (11, 8) and packed.data.is_cuda


def check_conditions_on_unknown_values_are_consistent():
    tokens = cuda(2, 100).argmax(
        -1
    )  # as a sampling loop sees them: no end token comes, the length limit counts
    finished = torch.zeros(2, dtype=torch.bool, device="cuda")
    for length in range(1, 100):
        finished = finished | (tokens == 50) | torch.full((2,), length >= 5, device="cuda")
        if finished.all():
            break
    assert length == 5
    assert cuda(100)[cuda(100) > 0].shape == (100,)


def check_triangular_masks_stay_known():
    mask = torch.tril(torch.ones(2048, 2048, dtype=torch.bool, device="cuda"))
    assert mask.sum().item() == 2048 * 2049 // 2


def check_save_and_load():
    layer = nn.Linear(4, 4).cuda()
    file = io.BytesIO()
    torch.save({"model": layer.state_dict(), "step": 3}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cuda")
    assert loaded["step"] == 3
    assert loaded["model"]["weight"].is_cuda
    layer.load_state_dict(loaded["model"])
    file.seek(0)
    host = nn.Linear(4, 4)
    host.load_state_dict(torch.load(file, map_location="cpu")["model"])
    assert host.weight.device.type == "cpu"


run_all(globals())
