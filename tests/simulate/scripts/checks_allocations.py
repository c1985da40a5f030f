"""What single operations allocate, in order, as recorded on real cards with torch 2.6 to 2.11."""

import torch
from checks import run_all
from torch import nn
from torch.nn import functional as F

KIB, MIB = 1 << 10, 1 << 20


def cuda(*shape, **kwargs):
    return torch.randn(*shape, device="cuda", **kwargs)


def events_of(function, least=64 * KIB):
    """[bytes requested, negative for a free] of a call, without the small ones."""
    torch.cuda.memory._record_memory_history(max_entries=10000)
    function()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    found = [signs.get(event["action"], 0) * event["size"] for event in events]
    return [size for size in found if abs(size) >= least]


def warm_up():
    """The workspaces of both threads exist."""
    weight = cuda(8, 8, requires_grad=True)
    F.linear(cuda(8, 8), weight, cuda(8)).sum().backward()


def check_gradients_that_are_views_meet_out_of_place():
    # A linear layer without bias flattens its input: its gradient is a view and shares its memory.
    first, second = (nn.Linear(512, 512, bias=False).cuda() for _ in range(2))
    x = cuda(2, 256, 512, requires_grad=True)
    shared = x * 1.0
    y = first(shared) + second(shared)
    gradient = cuda(2, 256, 512)
    warm_up()
    events = events_of(lambda: y.backward(gradient))
    # gradients of weight and input of each layer, their sum, the product with 1.0
    assert sum(size > 0 for size in events) == 6, events


def check_gradients_that_own_their_memory_meet_in_place():
    x = cuda(512, 512, requires_grad=True)
    shared = x * 1.0
    y = shared.sin() + shared.cos()
    gradient = cuda(512, 512)
    events = events_of(lambda: y.backward(gradient))
    # cos and product, sin, negative and product, the product with 1.0
    assert sum(size > 0 for size in events) == 6, events


def check_gather_writes_its_gradient_in_place():
    logits = cuda(512, 1024, requires_grad=True)
    index = torch.zeros(512, 1, dtype=torch.int64, device="cuda")
    loss = logits.gather(1, index).sum()
    assert events_of(loss.backward) == [2 * MIB]


def check_max_writes_its_gradient_in_place():
    scores = cuda(512, 1024, requires_grad=True)
    loss = scores.max(1).values.sum()
    assert events_of(loss.backward) == [2 * MIB]


def check_indexing_writes_its_gradient_in_place():
    table = cuda(1024, 512, requires_grad=True)
    index = torch.zeros(4, 128, dtype=torch.int64, device="cuda")
    loss = table[index].sum()
    # zeros; the expanded gradient is made contiguous for sorting
    assert events_of(loss.backward) == [2 * MIB, MIB, -MIB]


def check_masked_select_writes_its_gradient_in_place():
    x = cuda(512, 1024, requires_grad=True)
    loss = x[torch.ones(512, 1024, dtype=torch.bool, device="cuda")].sum()
    assert max(events_of(loss.backward)) <= 4 * MIB


def check_written_index_is_out_of_place():
    x = cuda(512, 512, requires_grad=True)
    index = (torch.zeros(4, dtype=torch.int64, device="cuda"),)
    y = x.index_put(index, cuda(4, 512))
    gradient = cuda(512, 512)
    assert events_of(lambda: y.backward(gradient)) == [MIB]


def check_products_copy_operands_that_blas_cannot_read():
    warm_up()
    weight = cuda(512, 512)
    expanded = cuda(1, 1).expand(512, 512)
    assert events_of(lambda: expanded @ weight) == [MIB, MIB, -MIB, -MIB]
    assert events_of(lambda: weight.t() @ weight) == [MIB, -MIB]
    batch = cuda(1, 1, 1).expand(4, 512, 512)
    assert events_of(lambda: torch.bmm(batch, batch)) == [4 * MIB] * 3 + [-4 * MIB] * 3


def check_gradients_of_norm_weights_take_partial_sums():
    # The simulated card is an H100; recorded there for a norm over 4 × 512 rows of 1024.
    weight = torch.ones(1024, device="cuda", requires_grad=True)
    x, gradient = cuda(4, 512, 1024), cuda(4, 512, 1024)
    y = weight * x
    events = events_of(lambda: y.backward(gradient))
    assert events == [8 * MIB, 16 * MIB, -16 * MIB, -8 * MIB], events


def check_rms_norm_is_one_kernel():
    norm, x = nn.RMSNorm(512, device="cuda"), cuda(512, 512)
    assert events_of(lambda: norm(x)) == [MIB, -MIB]
    x.requires_grad_()
    y, gradient = norm(x), cuda(512, 512)
    assert events_of(lambda: y.backward(gradient)) == [MIB]


def check_plain_attention_adds_its_mask_in_place():
    q = cuda(1, 4, 512, 64)
    mask = cuda(512, 512)
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        events = events_of(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask), 4 * MIB)
    # scores, softmax and what is chosen from it; nothing for the masked scores
    assert sum(size > 0 for size in events) == 3, events


def check_causal_attention_over_a_cache_is_not_flash():
    q, k = cuda(1, 4, 128, 64, dtype=torch.bfloat16), cuda(1, 4, 512, 64, dtype=torch.bfloat16)
    choose = torch._fused_sdp_choice
    assert choose(q, k, k, None, 0.0, True) == 2
    assert choose(q, k, k, None, 0.0, False) == 1
    assert choose(k, k, k, None, 0.0, True) == 1


if __name__ == "__main__":
    run_all(globals())
