# ruff: noqa: T201
"""A training script in the style of torchtitan: meta device, tensor and data parallelism, selective checkpointing."""

import functools
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 512, 8, 3, 4096, 512


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention, self.second = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(F.silu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def keep_products(_context, operation, *_args, **_kwargs):
    kept = operation in (
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
    )
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def parallelize(model, mesh):
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    inside = {
        "first": SequenceParallel(),
        "second": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, layer in model.layers.items():
        parallelize_module(layer, mesh["tp"], inside)
        plain = layer.forward
        layer.forward = functools.partial(checkpoint, plain, use_reentrant=False, context_fn=contexts)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=int(name) < LAYERS - 1)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


dist.init_process_group("nccl")
world = dist.get_world_size()
tensor_parallel = int(sys.argv[1])
mesh = init_device_mesh("cuda", (world // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))
with torch.device("meta"):
    model = Model()
parallelize(model, mesh)
model.to_empty(device="cuda")
with torch.no_grad():
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(2):
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), device="cuda")
    logits = model(tokens)
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
whole = sum(each.numel() for each in model.parameters())
local = sum(each.to_local().numel() for each in model.parameters())
print("whole=" + json.dumps(whole))
print("local=" + json.dumps(local))
print("peak=" + json.dumps(torch.cuda.max_memory_allocated()))
