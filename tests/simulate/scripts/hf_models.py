# ruff: noqa: T201, C408
"""Models of transformers from a configuration, two AdamW steps each; prints the peak of each in bytes."""

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
)

SMALL = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000
)
MODELS = {
    "gpt2": lambda: AutoModelForCausalLM.from_config(
        GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=1000)
    ),
    "llama": lambda: AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, num_key_value_heads=2)),
    "mixtral": lambda: AutoModelForCausalLM.from_config(MixtralConfig(**SMALL, num_key_value_heads=2)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=256, d_ff=512, num_layers=2, num_heads=4, d_kv=64, decoder_start_token_id=0)
    ),
}
for name, make in MODELS.items():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = make().to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        ids = torch.randint(1000, (4, 128), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{name}={torch.cuda.max_memory_allocated()}")
    del model, optimizer, loss
