"""Whole pieces of training scripts."""

import copy

import torch
from checks import run_all
from torch import nn
from torch.nn import functional as F


def cuda(*shape, **kwargs):
    return torch.randn(*shape, device="cuda", **kwargs)


def check_parameters_keep_their_identity():
    model = nn.Module()
    model.a, model.b = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
    model.b.weight = model.a.weight
    model.a.weight.note = "kept"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = torch.cuda.memory_allocated()
    model.cuda()
    assert torch.cuda.memory_allocated() - before == 512 * 512 * 4
    assert model.a.weight is model.b.weight
    assert optimizer.param_groups[0]["params"][0] is model.a.weight
    assert isinstance(model.a.weight, nn.Parameter)
    assert model.a.weight.note == "kept"
    model.cpu()
    assert model.a.weight.device.type == "cpu"
    assert torch.cuda.memory_allocated() == before


def check_gradients_move_along():
    layer = nn.Linear(300, 300).cuda()
    layer(cuda(2, 300)).sum().backward()
    layer.cpu()
    assert layer.weight.device.type == layer.weight.grad.device.type == "cpu"
    layer.cuda()
    assert layer.weight.grad.is_cuda
    layer.half()
    assert layer.weight.grad.dtype is torch.float16


def check_large_models_on_the_host_take_no_memory():
    model = nn.Sequential(*[nn.Linear(1 << 16, 1 << 16, bias=False) for _ in range(8)])  # 128 GiB
    assert sum(p.numel() for p in model.parameters()) == 8 << 32
    half = model.half()
    assert half[0].weight.dtype is torch.float16


def check_copies_of_modules():
    layer = nn.Linear(64, 64).cuda()
    other = copy.deepcopy(layer)
    assert other.weight.is_cuda
    assert other.weight is not layer.weight
    other.load_state_dict(layer.state_dict())
    assert other.to(torch.bfloat16).weight.dtype is torch.bfloat16


def check_data_assignment_across_devices():
    parameter = nn.Parameter(torch.ones(300, 300))
    parameter.data = parameter.data.cuda()
    assert parameter.is_cuda
    assert parameter.requires_grad
    parameter.data = parameter.data.to("cpu")
    assert parameter.device.type == "cpu"


def check_optimizers():
    makers = [
        lambda p: torch.optim.AdamW(p, fused=True),
        torch.optim.AdamW,
        lambda p: torch.optim.Adam(p, capturable=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        torch.optim.Adafactor,
        torch.optim.RMSprop,
        lambda p: torch.optim.AdamW(p, foreach=False),
        torch.optim.Adagrad,
        torch.optim.NAdam,
    ]
    for make in makers:
        layer = nn.Linear(128, 128).cuda()
        optimizer = make(layer.parameters())
        for _ in range(2):
            layer(cuda(2, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def check_adam_states_take_twice_the_parameters():
    layer = nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(cuda(2, 1024)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    before = torch.cuda.memory_allocated()
    optimizer.step()
    states = torch.cuda.memory_allocated() - before
    assert 2 * (4 << 20) <= states <= 2 * (4 << 20) + 1024, states


def check_foreach_is_the_default():
    layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(2):
        layers(cuda(2, 512)).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before >= 4 << 20  # one temporary as large as all parameters


def check_gradient_scaler():
    layer, scaler = nn.Linear(64, 64).cuda(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = layer(cuda(8, 64)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 65536.0
    assert optimizer.state[layer.weight]["step"].item() == 3


def check_data_loader_workers():
    data = torch.utils.data.TensorDataset(torch.arange(64).float().view(-1, 1))
    loader = torch.utils.data.DataLoader(data, 8, num_workers=2, pin_memory=True)
    total = 0.0
    for (batch,) in loader:
        assert not batch.is_cuda
        total += batch.cuda(non_blocking=True).sum().item()
    assert total == 63 * 64 / 2


def check_transformer_encoder():
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).cuda()
    model(cuda(2, 10, 64)).sum().backward()
    model.eval()
    with torch.no_grad():
        assert model(cuda(2, 10, 64)).shape == (2, 10, 64)


def check_recurrent_networks():
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        kind(8, 16, 2).cuda()(cuda(5, 3, 8))[0].sum().backward()


def check_convolutions():
    model = (
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(8, 4, 2),
            nn.GroupNorm(2, 4),
            nn.AdaptiveAvgPool2d(1),
        )
        .cuda()
        .to(memory_format=torch.channels_last)
    )
    model(cuda(2, 3, 32, 32).to(memory_format=torch.channels_last)).sum().backward()


def check_embeddings():
    bag = nn.EmbeddingBag(100, 8).cuda()
    bag(torch.randint(0, 100, (4, 5)).cuda()).sum().backward()
    sparse = nn.Embedding(100, 8, sparse=True).cuda()
    sparse(torch.randint(0, 100, (4, 5)).cuda()).sum().backward()
    assert sparse.weight.grad.is_sparse


def check_data_parallel():
    model = nn.DataParallel(nn.Linear(8, 8).cuda())
    model(cuda(4, 8)).sum().backward()


def check_moving_average_model():
    model = nn.Linear(64, 64).cuda()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert average(cuda(2, 64)).shape == (2, 64)


def check_garbage_collected_tensors_are_freed():
    import gc

    class Node:
        pass

    before = torch.cuda.memory_allocated()
    for _ in range(3000):
        node = Node()
        node.me, node.tensor = node, torch.empty(100, 100, device="cuda")
    del node
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    held = [b for s in torch.cuda.memory_snapshot() for b in s["blocks"] if b["state"] == "active_allocated"]
    assert sum(b["size"] for b in held) == before


def check_activations_on_the_host():
    def kept(context):
        x = cuda(1000, 1000, requires_grad=True)
        before = torch.cuda.memory_allocated()
        with context:
            y = (x * x).sin().exp()
        size = torch.cuda.memory_allocated() - before
        y.sum().backward()
        return size

    import contextlib

    plain = kept(contextlib.nullcontext())
    assert kept(torch.autograd.graph.save_on_cpu(pin_memory=True)) <= plain - 4_000_000


def check_pinned_buffers():
    buffer = torch.empty(100, 100, pin_memory=True)
    assert buffer.is_pinned()
    buffer.copy_(cuda(100, 100), non_blocking=True)
    assert not cuda(2).is_pinned()


def check_compiler_is_loaded_when_asked_for():
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.reset()
    assert torch.compile(lambda x: x + 1)(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]


def check_retained_graph_is_freed():
    layer = nn.Linear(512, 512).cuda()
    before = torch.cuda.memory_allocated()
    losses = [layer(cuda(512, 512)).relu().sum() for _ in range(3)]
    held = torch.cuda.memory_allocated() - before
    del losses
    assert held > 3 << 20
    assert torch.cuda.memory_allocated() == before


def check_learning_rate_schedule_and_clipping():
    layer = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(3):
        F.mse_loss(layer(cuda(2, 8)), cuda(2, 8)).backward()
        norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        assert norm.item() == 1.0
        assert not norm.isnan()
        optimizer.step()
        schedule.step()


def check_modules_are_saved_and_loaded_whole():
    import io
    import warnings

    model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400)).cuda()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"model": model}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)["model"]
    assert {each.device.type for each in loaded.state_dict().values()} == {"cuda"}
    loaded(cuda(4, 300)).sum().backward()
    assert loaded[0].weight.grad is not None
    assert copy.copy(model[0].weight).device.type == "cuda"


def check_triton_kernels_are_not_launched():
    import triton
    import triton.language as tl

    @triton.jit
    def add(x, y, out, count, block: tl.constexpr):
        offsets = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(out + offsets, tl.load(x + offsets) + tl.load(y + offsets), mask=offsets < count)

    x, out = cuda(1000), torch.zeros(1000, dtype=torch.int32, device="cuda")
    before = torch.cuda.memory_allocated()
    add[lambda meta: (triton.cdiv(1000, meta["block"]),)](x, x, out, 1000, block=triton.next_power_of_2(100))
    assert torch.cuda.memory_allocated() == before
    assert triton.cdiv(1000, 128) == 8
    assert triton.next_power_of_2(100) == 128


def check_distributions_take_unknown_values_for_valid():
    policy = nn.Linear(4, 6).cuda()
    optimizer = torch.optim.Adam(policy.parameters())
    out = policy(cuda(2000, 4))
    choice = torch.distributions.Categorical(logits=out[:, :2])
    action = choice.sample()
    normal = torch.distributions.Normal(out[:, 2:4], out[:, 4:].exp())
    loss = (
        -(choice.log_prob(action).mean() + normal.log_prob(normal.rsample()).mean()) - choice.entropy().mean()
    )
    loss.backward()
    optimizer.step()
    assert action[0].item() in (0, 1)
    try:
        torch.distributions.Normal(torch.zeros(2, device="cuda"), -torch.ones(2, device="cuda"))
    except ValueError:
        pass
    else:
        raise AssertionError("a known scale below zero is an error")


run_all(globals())
