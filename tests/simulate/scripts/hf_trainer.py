# ruff: noqa: T201
"""The Trainer of transformers on GPT-2 from a configuration; `hf_trainer.py [fp16] [checkpointing]`."""

import json
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(1000, (256,))
        return {"input_ids": ids, "labels": ids}


model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=3, per_device_train_batch_size=8, report_to="none", save_strategy="no",
        fp16="fp16" in sys.argv, gradient_checkpointing="checkpointing" in sys.argv, dataloader_num_workers=2,
        disable_tqdm=True,
    )  # fmt: skip
    result = Trainer(model=model, args=arguments, train_dataset=Rows()).train()
print(f"device={json.dumps(str(next(model.parameters()).device))}")
print(f"steps={result.global_step}")
print(f"peak={torch.cuda.max_memory_allocated()}")
