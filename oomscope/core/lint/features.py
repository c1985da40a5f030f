# ruff: noqa: E501  # one pattern a line
"""What a script uses, read from its source: sharding, launchers, autocast, checkpointing.

Names are those of `Signal`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FEATURES: tuple[tuple[str, str, str], ...] = (
    ("uses:fsdp", r"\bFullyShardedDataParallel\b|\bFSDP\(|\bfully_shard\(", "uses FSDP"),
    ("uses:deepspeed", r"\bdeepspeed\b|\bDeepSpeedConfig\b", "uses DeepSpeed"),
    ("uses:ddp", r"\bDistributedDataParallel\b|\bDDP\(", "uses DistributedDataParallel"),
    ("uses:dataparallel", r"\bnn\.DataParallel\(|(?<![A-Za-z])DataParallel\(", "uses nn.DataParallel"),
    ("uses:device_map", r"\bdevice_map\s*=", "spreads layers by device_map"),
    ("uses:autocast", r"\bautocast\(|\bGradScaler\(|mixed_precision\s*=", "uses autocast"),
    ("on:checkpointing", r"checkpoint\.checkpoint\(|gradient_checkpointing_enable\(|checkpoint_wrapper\(|checkpoint_sequential\(", "activation checkpointing is on"),
    ("on:expandable", r"environ\b.*ALLOC_CONF.*expandable_segments:True", "the script itself sets expandable_segments"),
    ("on:fused_optimizer", r"\bfused\s*=\s*True|adamw?_torch_fused", "the optimizer is fused"),
    ("on:8bit_optimizer", r"\bAdamW?8bit\b|\bbnb\.optim\.|adamw(?:_bnb)?_8bit|paged_adamw", "optimizer state is in 8 bits"),
    ("on:optimizer_in_backward", r"register_post_accumulate_grad_hook\(|_apply_optimizer_in_backward\(", "the optimizer runs in backward"),
    ("on:bucket_view", r"gradient_as_bucket_view\s*=\s*True", "gradients are views of DDP's buckets"),
    ("on:fused_loss", r"fused_linear_cross_entropy|LigerFusedLinear|cut_cross_entropy|linear_cross_entropy\(", "logits and loss are fused"),
    ("on:sdpa", r"scaled_dot_product_attention\(|flash_attn_\w*func\(|attn_implementation\s*=\s*[\"'](?:sdpa|flash_attention_2)", "attention is fused"),
    ("on:offload_activations", r"\bsave_on_cpu\(|offload_wrapper\(", "saved activations are kept on the host"),
    ("uses:compile", r"\btorch\.compile\(|\.compile\(", "uses torch.compile"),
    ("uses:cuda_graph", r"\bCUDAGraph\(|make_graphed_callables|mode=[\"'](?:reduce-overhead|max-autotune)[\"']", "uses CUDA graphs"),
    ("uses:mem_pool", r"\buse_mem_pool\(|\bMemPool\(", "uses a memory pool of its own"),
    ("uses:offload", r"offload_optimizer|offload_param|CPUOffload\(|cpu_offload\s*=\s*True|save_on_cpu\(", "offloads state to host memory"),
    ("uses:cudnn_benchmark", r"cudnn\.benchmark\s*=\s*True", "sets cudnn.benchmark"),
    ("uses:memory_fraction", r"set_per_process_memory_fraction\(", "limits its share of the device"),
    ("uses:workers", r"num_workers\s*=\s*[1-9]", "uses loader workers"),
)  # fmt: skip
_PATTERNS = tuple((name, re.compile(pattern), text) for name, pattern, text in _FEATURES)


@dataclass(frozen=True)
class Feature:
    """Something that the source shows, with its first line."""

    name: str
    text: str
    line: int


def features(source: str) -> list[Feature]:
    """The features of a script. Comments count too: whoever comments a line out may have run with it."""
    found = []
    for name, pattern, text in _PATTERNS:
        match = pattern.search(source)
        if match:
            found.append(Feature(name, text, source.count("\n", 0, match.start()) + 1))
    return found
