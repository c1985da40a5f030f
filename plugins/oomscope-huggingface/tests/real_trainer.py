"""Trains a tiny GPT-2 by the real Trainer on the CPU, with one fix (or none) of the plugin or built in; prints JSON.

usage: python real_trainer.py [FIX-ID] [--seq2seq]
"""

import dataclasses
import json
import os
import sys
import tempfile

from oomscope_huggingface import FIXES

from oomscope.agent.apply import apply
from oomscope.core.fixes import CATALOGUE, JobFacts

JOB = JobFacts(frameworks=frozenset({"transformers", "accelerate"}), compute_capability=(8, 0))


def main() -> None:
    wanted = [word for word in sys.argv[1:] if not word.startswith("--")]
    records = []
    for fix in (*FIXES, *CATALOGUE):
        if fix.id in wanted:
            plan = fix.plan(JOB)
            os.environ.update(plan.env)
            apply(
                {"fixes": [{"id": each, "options": dict(given)} for each, given in plan.runtime.items()]},
                records.append,
            )
    sys.stdout.write(json.dumps({**train(), "records": records}) + "\n")


def train() -> dict:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainingArguments, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = GPT2LMHeadModel(config)
    rows = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    kind = Seq2SeqTrainingArguments if "--seq2seq" in sys.argv else TrainingArguments
    with tempfile.TemporaryDirectory() as folder:
        args = kind(
            folder, per_device_train_batch_size=8, max_steps=4, logging_steps=1, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, seed=3,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.train()
    optimizer = trainer.optimizer
    return {
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "batch": args.per_device_train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "bf16": bool(args.bf16),
        "precision": trainer.accelerator.mixed_precision,
        "checkpointing": model.is_gradient_checkpointing,
        "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "optim": str(dataclasses.asdict(args)["optim"]),
    }


if __name__ == "__main__":
    main()
