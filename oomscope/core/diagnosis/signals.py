# ruff: noqa: E501  # one pattern a line
"""Observations read from a stack: the phase of the failure, the operation, and what the job uses."""

from __future__ import annotations

import re
from collections.abc import Iterable

from oomscope.core.diagnosis.evidence import Signal
from oomscope.core.diagnosis.message import Frame, is_user_file

#: Phases by what stands on the stack, in order of precedence: a save inside an evaluation is a save.
_PHASES: tuple[tuple[str, str], ...] = (
    ("resume", r"load_state_dict|load_checkpoint|resume_from|_load_optimizer|restore_(?:best|checkpoint)|\btorch\.load\(|load_ckpt"),
    ("save", r"save_checkpoint|save_model|save_pretrained|_save\b|\bstate_dict\(|full_state_dict|_unshard_params|torch\.save\(|dcp\.save|_summon_full"),
    ("optimizer", r"[/\\]optim[/\\]\w+\.py|optimizer\.step|_multi_tensor_|_init_group|optimizer_step"),
    ("eval", r"\bevaluat\w*|\bvalidat\w*|validation_step|\bpredict\b|eval_loop|evaluation_loop|\btest_step|\bgenerate\("),
    ("init", r"from_pretrained|_move_model_to_device|FullyShardedDataParallel\(|FSDP\(|deepspeed\.initialize|fully_shard\(|\.shard\(\)|\b_apply\b|model\.to\(|\.cuda\(\)|DistributedDataParallel\("),
    ("backward", r"\.backward\(|_engine_run_backward|run_backward|autograd[/\\]__init__"),
    ("forward", r"\bforward\b|_call_impl|_wrapped_call_impl"),
)  # fmt: skip
_OPERATIONS: tuple[tuple[str, str, str], ...] = (
    ("op:loss", r"cross_entropy|log_softmax|nll_loss|lm_head|logits\.float", "it failed in the loss or the output layer"),
    ("op:attention", r"scaled_dot_product|softmax\(|attn_weights|attention_scores|torch\.(?:bmm|baddbmm|matmul)\(.*(?:key|query)", "it failed in attention"),
    ("op:conv", r"_conv_forward|F\.conv\dd|conv_transpose", "it failed in a convolution"),
    ("op:cat", r"torch\.cat\(", "it failed in torch.cat"),
    ("op:foreach", r"_multi_tensor_|_foreach_", "it failed in a multi-tensor optimizer kernel"),
    ("op:init_state", r"_init_group|zeros_like\(p", "it failed while the optimizer made its state"),
    ("op:deepcopy", r"deepcopy", "it failed in a deepcopy"),
    ("op:shard", r"\.shard\(|_shard_|chunk\.clone|flatten_tensors|flatten_dense_tensors|_flat_param|[/\\]zero[/\\]stage\w*\.py", "it failed while parameters were flattened or sharded"),
    ("op:gather", r"\bgather\b|Gather\.apply|_unshard|all_gather", "it failed while shards or outputs were gathered"),
)  # fmt: skip
_USES: tuple[tuple[str, str, str], ...] = (
    ("uses:fsdp", r"[/\\]fsdp[/\\]|_fully_shard|fully_sharded", "FSDP is on the stack"),
    ("uses:deepspeed", r"[/\\]deepspeed[/\\]", "DeepSpeed is on the stack"),
    ("uses:ddp", r"[/\\]parallel[/\\]distributed\.py", "DistributedDataParallel is on the stack"),
    ("uses:dataparallel", r"[/\\]parallel[/\\](?:data_parallel|scatter_gather|replicate)\.py", "nn.DataParallel is on the stack"),
    ("uses:compile", r"[/\\]_inductor[/\\]|[/\\]_dynamo[/\\]|torch_compile", "torch.compile is on the stack"),
    ("on:checkpointing", r"[/\\]utils[/\\]checkpoint\.py", "activation checkpointing is on the stack"),
)  # fmt: skip


_PACKAGES = re.compile(
    r"[/\\](?:torch|deepspeed|transformers|accelerate|lightning\w*|pytorch_lightning)[/\\]"
)


def _file(frame: Frame) -> str:
    """A library's file says what runs; what a person has called a script says nothing."""
    return frame.file if not is_user_file(frame.file) or _PACKAGES.search(frame.file) else ""


def from_frames(frames: Iterable[Frame], source: str) -> tuple[Signal, ...]:
    """Signals of a stack, in any order of frames."""
    text = "\n".join(f"{_file(frame)} {frame.function} {frame.source}" for frame in frames)
    if not text.strip():
        return ()
    found: list[Signal] = []
    for phase, pattern in _PHASES:
        match = re.search(pattern, text)
        if match:
            found.append(Signal(f"phase:{phase}", f"{match.group().strip()} is on the stack", source, 0.9))
            break
    for name, pattern, sentence in (*_OPERATIONS, *_USES):
        if re.search(pattern, text):
            found.append(Signal(name, sentence, source, 0.9))
    return tuple(found)
