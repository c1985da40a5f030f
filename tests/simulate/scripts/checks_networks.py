"""Recurrent networks through cuDNN, and the losses that go with them."""

import torch
from checks import run_all
from torch import nn
from torch.nn import functional as F

#: Reserve spaces that cuDNN 7 printed on a P100: pytorch/pytorch#2895.
PRINTED = {nn.LSTM: 736_000_000, nn.GRU: 864_000_000}


def cuda(*shape, **kwargs):
    return torch.randn(*shape, device="cuda", **kwargs)


def kept_by(network, *inputs):
    before = torch.cuda.memory_allocated()
    out = network(*inputs)
    return torch.cuda.memory_allocated() - before, out


def check_reserve_space_is_what_cudnn_printed():
    for kind, printed in PRINTED.items():
        network = kind(123, 320, 4).cuda()
        kept, out = kept_by(network, cuda(250, 100, 123))
        rest = sum(each.numel() * 4 for each in (out[0], *(out[1] if kind is nn.LSTM else out[1:])))
        state = 4 * 100 * 320 * 4 * (2 if kind is nn.LSTM else 1)  # the first states, which the network makes
        assert abs(kept - rest - state - printed) < 512 << 10, (kind, kept - rest - state)


def check_cells_one_by_one_without_cudnn():
    network, source = nn.LSTM(64, 64).cuda(), cuda(50, 8, 64)
    whole, _ = kept_by(network, source)
    torch.backends.cudnn.enabled = False
    try:
        one_by_one, _ = kept_by(network, source)
    finally:
        torch.backends.cudnn.enabled = True
    assert one_by_one > whole


def check_shapes_and_gradients():
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for options in ({}, {"bidirectional": True, "batch_first": True, "dropout": 0.1}, {"bias": False}):
            network = kind(8, 16, 2, **options).cuda()
            source = cuda(5, 3, 8, requires_grad=True)
            out, last = network(source)
            both = 2 if options.get("bidirectional") else 1
            assert out.shape == (5, 3, 16 * both)
            assert (last[0] if kind is nn.LSTM else last).shape == (2 * both, 5 if both == 2 else 3, 16)
            out.sum().backward()
            assert source.grad.shape == source.shape
            assert all(each.grad.shape == each.shape for each in network.parameters())


def check_projections():
    network = nn.LSTM(8, 16, 2, proj_size=4).cuda()
    out, (hidden, cell) = network(cuda(5, 3, 8))
    assert (out.shape, hidden.shape, cell.shape) == ((5, 3, 4), (2, 3, 4), (2, 3, 16))
    out.sum().backward()


def check_packed_sequences():
    source = cuda(6, 3, 8, requires_grad=True)
    for lengths in (torch.tensor([6, 4, 1]), [6, 4, 1]):
        packed = nn.utils.rnn.pack_padded_sequence(source, lengths)
        out, _ = nn.GRU(8, 16).cuda()(packed)
        assert out.data.shape == (11, 16)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out)
        assert padded.shape == (6, 3, 16)
        padded.sum().backward()


def check_autocast_takes_half():
    network = nn.LSTM(8, 16, 2).cuda()
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            out, _ = network(cuda(5, 3, 8))
        assert out.dtype is torch.float16
        out.float().sum().backward()
        assert all(each.grad.dtype is torch.float32 for each in network.parameters())


def check_inference_keeps_nothing():
    network = nn.LSTM(64, 64).cuda().eval()
    with torch.no_grad():
        kept, out = kept_by(network, cuda(50, 8, 64))
    assert kept <= sum(each.numel() * 4 + 512 for each in (out[0], *out[1])) + 2 * (8 * 64 * 4)


def check_ctc_lengths_may_be_anywhere():
    scores = cuda(50, 4, 20, requires_grad=True).log_softmax(2)
    for lengths_on in ("cpu", "cuda", None):
        for targets_on in ("cpu", "cuda"):
            targets = torch.randint(1, 20, (4, 10), device=targets_on)
            lengths = [torch.tensor([50] * 4), torch.tensor([10, 9, 8, 7])]
            lengths = [each.to(lengths_on) if lengths_on else tuple(each.tolist()) for each in lengths]
            loss = F.ctc_loss(scores, targets, *lengths, zero_infinity=True)
            assert loss.device.type == "cuda"
            loss.backward(retain_graph=True)


def check_ctc_keeps_every_prefix():
    scores = cuda(50, 4, 20, requires_grad=True).log_softmax(2)
    targets, lengths = torch.randint(1, 20, (4, 10)), torch.tensor([10] * 4)
    kept, _ = kept_by(lambda: F.ctc_loss(scores, targets, torch.tensor([50] * 4), lengths, reduction="sum"))
    assert kept >= 4 * 50 * (2 * 10 + 1) * 4  # alpha: [batch, time, 2 * longest target + 1]


def check_boxes_that_overlap():
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", lambda boxes, scores, threshold: torch.tensor([1]), "CPU")
        check_boxes_that_overlap.library = library
    boxes = torch.tensor([[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 10.0, 10.0]]).cuda()
    assert torch.ops.torchvision.nms(boxes, torch.tensor([0.1, 0.9]).cuda(), 0.5).tolist() == [1]
    assert torch.ops.torchvision.nms(cuda(7, 4), cuda(7), 0.5).tolist() == list(range(7))


run_all(globals())
