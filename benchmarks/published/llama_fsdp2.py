# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN204
"""Llama 3.1 8B, FSDP2 on 8 or 128 ranks, selective checkpointing by operation, eager.

Configuration: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: batch 2, sequence
8192, AdamW, bfloat16 parameters and float32 reduction, every second matrix product kept. With the argument 70b the
shape of Llama 3.1 70B, for the benchmark's cost.
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SHAPES = {"8b": (4096, 32, 32, 14336), "70b": (8192, 80, 64, 28672)}
WIDTH, LAYERS, HEADS, HIDDEN = SHAPES[sys.argv[1] if len(sys.argv) > 1 else "8b"]
GROUPS, WORDS = 8, 128256
BATCH, LENGTH = 2, 8192


def rotations(length, size, theta=500000.0):
    angles = torch.outer(
        torch.arange(length).float(), 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    )
    return torch.polar(torch.ones_like(angles), angles)


def rotate(q, k, turns):
    turns = turns.view(1, q.shape[1], 1, -1)
    pairs = [torch.view_as_complex(each.float().reshape(*each.shape[:-1], -1, 2)) for each in (q, k)]
    turned = [torch.view_as_real(each * turns).flatten(3) for each in pairs]
    return turned[0].type_as(q), turned[1].type_as(k)


class RMSNorm(nn.Module):
    """As in torch 2.6, of which the figures are; later it is one kernel."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(1e-5))
        return (wide * factor * self.weight).type_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, HEADS * self.size, bias=False)
        self.wk = nn.Linear(WIDTH, GROUPS * self.size, bias=False)
        self.wv = nn.Linear(WIDTH, GROUPS * self.size, bias=False)
        self.wo = nn.Linear(HEADS * self.size, WIDTH, bias=False)

    def forward(self, x, turns):
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.size) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, k, turns)
        k, v = (
            each[:, :, :, None, :]
            .expand(batch, length, GROUPS, HEADS // GROUPS, self.size)
            .reshape(batch, length, HEADS, self.size)
            for each in (k, v)
        )
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        return self.wo(out.view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x, turns):
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("turns", rotations(LENGTH, WIDTH // HEADS), persistent=False)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return self.output(self.norm(h))


SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def keep_every_second_product():
    counts = {"forward": 0, "recompute": 0}

    def policy(context, func, *args, **kwargs):
        mode = "recompute" if context.is_recompute else "forward"
        if func is torch.ops.aten.mm.default:
            counts[mode] += 1
        save = func in SAVED and not (func is torch.ops.aten.mm.default and counts[mode] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device("meta"):
        model = Llama()
    for name, block in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(
            block, context_fn=partial(keep_every_second_product), preserve_rng_state=False
        )
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, block in enumerate(model.layers.values()):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=number < LAYERS - 1)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0, 0.02)
        model.turns = rotations(LENGTH, WIDTH // HEADS).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(2):
        tokens = torch.randint(WORDS, (BATCH, LENGTH)).cuda()
        labels = torch.randint(WORDS, (BATCH, LENGTH)).cuda()
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


main()
