# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN204
"""bert-large with the Trainer of transformers at sequence length 512.

Configuration: Hugging Face documentation, "Efficient training on a single GPU" (2022, V100, nvidia-smi with
a context of 1343 MiB). It ran torch 1.10, whose `zero_grad()` kept the gradients and whose softmax kept its
input for the backward pass; both are put back here, as today's torch does neither.
"""

import sys
import tempfile

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

OPTIONS = dict(word.split("=") for word in sys.argv[1:])
LENGTH, ROWS = 512, 64
plain_softmax = F.softmax


def softmax_that_keeps_its_input(x, *args, **kwargs):
    if torch.is_autocast_enabled("cuda"):
        x = x.float()
    out = plain_softmax(x, *args, **kwargs)
    if out.grad_fn is not None:
        out.grad_fn.metadata["input"] = x.detach()
    return out


def zero_grad_that_keeps_gradients(self, set_to_none=False):
    groups = self.param_groups if hasattr(self, "param_groups") else [{"params": list(self.parameters())}]
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()


F.softmax = torch.nn.functional.softmax = softmax_that_keeps_its_input
torch.nn.Module.zero_grad = torch.optim.Optimizer.zero_grad = zero_grad_that_keeps_gradients


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"input_ids": torch.randint(100, 30000, (LENGTH,)), "labels": 0}


config = BertConfig(
    vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
    attn_implementation="eager",
)  # fmt: skip
model = BertForSequenceClassification(config).to("cuda")
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=1, max_steps=3, log_level="error", report_to="none", save_strategy="no",
        per_device_train_batch_size=int(OPTIONS.get("bs", 4)), optim=OPTIONS.get("optim", "adamw_torch"),
        gradient_accumulation_steps=int(OPTIONS.get("ga", 1)), gradient_checkpointing="gc" in OPTIONS,
        fp16="fp16" in OPTIONS, gradient_checkpointing_kwargs={"use_reentrant": True},
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    make = trainer.create_optimizer

    def without_multi_tensor_form():
        optimizer = make()
        for group in optimizer.param_groups:
            group["foreach"] = False
        return optimizer

    trainer.create_optimizer = without_multi_tensor_form
    trainer.train()
