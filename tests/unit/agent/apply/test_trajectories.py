"""Fixes that promise equal numbers keep them: losses, gradient norms, learning rates, parameters, buffers."""

import pytest
import torch
from models import train_conv, train_gpt

from oomscope.agent.apply import apply


@pytest.mark.parametrize(
    "fixes",
    [
        ("ckpt",),
        ("ckpt-selective",),
        ("ckpt-half",),
        ("offload-activations",),
        ("zero-none",),
        ("optim-in-bwd",),
    ],
)
def test_exact_fixes_reproduce_the_run_bit_for_bit(fixes):
    clip = fixes != ("optim-in-bwd",)
    plain = train_gpt(zero=False, clip=clip)
    fixed = train_gpt(*fixes, zero=False, clip=clip)
    assert fixed.state(fixes[0])[0] == "applied"
    assert fixed.differs_from(plain) == 0
    assert fixed.norms == plain.norms
    assert fixed.rates == plain.rates


def test_checkpointing_recomputes_the_same_dropout_masks():
    assert train_gpt("ckpt", dropout=0.3).differs_from(train_gpt(dropout=0.3)) == 0


def test_checkpointing_leaves_batch_norm_statistics_as_they_are():
    plain, fixed = train_conv(), train_conv("ckpt")
    assert fixed.state("ckpt") == ("applied", "3 × ConvBlock in layers")
    assert fixed.differs_from(plain) == 0


def test_checkpointing_under_torch_compile():
    plain, fixed = train_gpt(compiled=True), train_gpt("ckpt", compiled=True)
    assert fixed.state("ckpt")[0] == "applied"
    assert fixed.differs_from(plain) == 0


@pytest.mark.parametrize("fix", ["optim-fused", "fused-ce"])
def test_rounding_fixes_stay_within_1e_5(fix):
    plain, fixed = train_gpt(vocabulary=5000), train_gpt(fix, vocabulary=5000)
    assert fixed.state(fix)[0] == "applied"
    assert max(abs(a - b) for a, b in zip(plain.losses, fixed.losses, strict=True)) <= 1e-5


def test_autocast_is_what_a_prepared_loop_does():
    from models import TinyGPT, next_token_loss

    fixed = train_gpt("amp-bf16")
    torch.manual_seed(0)
    net = TinyGPT()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)
    losses = []
    for step in range(4):
        tokens = torch.randint(100, (8 if step < 3 else 3, 12))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(tokens)
        loss = next_token_loss(logits.float(), tokens)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        schedule.step()
        losses.append(loss.item())
    assert fixed.losses == losses
    assert fixed.state("amp-bf16")[0] == "applied"


def test_float16_with_a_scaler_follows_the_plain_run_and_keeps_the_norms():
    plain, fixed = (
        train_gpt(),
        train_gpt({"id": "amp-fp16", "options": {"device": "cpu", "init_scale": 1024.0}}),
    )
    assert fixed.state("amp-fp16")[0] == "applied"
    assert max(abs(a - b) for a, b in zip(plain.losses, fixed.losses, strict=True)) < 5e-3
    assert fixed.norms == pytest.approx(plain.norms, rel=2e-2)


def test_a_step_with_infinite_gradients_is_skipped():
    overflowing = {"id": "amp-fp16", "options": {"device": "cpu", "init_scale": 2.0**120}}
    fixed = train_gpt(overflowing, steps=2)
    plain = train_gpt(steps=0)
    assert all(torch.equal(a, b) for a, b in zip(fixed.parameters, plain.parameters, strict=True))


def test_two_fixes_together():
    plain, fixed = train_gpt("amp-bf16"), train_gpt("ckpt", "amp-bf16")
    assert fixed.differs_from(plain) == 0


def test_eight_bit_without_a_library_is_refused_and_the_run_goes_on():
    pytest.importorskip("torch")
    fixed = train_gpt("optim-8bit")
    state, detail = fixed.state("optim-8bit")
    if "neither" in detail:
        assert state == "refused"
        assert fixed.differs_from(train_gpt()) == 0
    else:
        assert state == "applied"
        assert fixed.losses == pytest.approx(train_gpt().losses, rel=1e-3)


@pytest.mark.parametrize("closed", [False, True])
def test_a_step_inside_backward_is_a_step_to_those_who_count(closed):
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from oomscope.agent.apply import apply

    seen = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    runtime = apply({"fixes": [{"id": "optim-in-bwd"}]}, lambda record: None)
    try:
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        before = net.weight.detach().clone()

        def closure():
            loss = net(torch.ones(1, 2)).sum()
            loss.backward()
            return loss

        if closed:
            assert optimizer.step(closure).requires_grad
        else:
            closure()
            optimizer.step()
    finally:
        runtime.undo()
        for hook in hooks:
            hook.remove()
    assert seen == ["before", "after"]
    assert not torch.equal(net.weight, before)
    assert net.weight.grad is None


def test_steps_of_optimizers_with_arguments_of_their_own_still_work():
    class Own(torch.optim.SGD):
        def step(self, closure=None, *, scale=1.0):
            self.seen = scale
            return super().step(closure)

    runtime = apply(
        {"fixes": [{"id": "amp-fp16", "options": {"device": "cpu", "init_scale": 8.0}}]}, [].append
    )
    try:
        model = torch.nn.Linear(4, 4)
        optimizer = Own(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step(scale=2.0)
        assert optimizer.seen == 2.0
    finally:
        runtime.undo()
