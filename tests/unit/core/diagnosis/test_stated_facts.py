# ruff: noqa: E501  # texts and tables
"""What people state besides the numbers: each form leads to its cause, and what only looks like it does not."""

import time

import pytest

from oomscope.core.diagnosis import Evidence, diagnose
from oomscope.core.diagnosis.arithmetic import analyse
from oomscope.core.diagnosis.engine import WORDS_ONLY
from oomscope.core.diagnosis.figures import from_figures
from oomscope.core.diagnosis.message import OomMessage
from oomscope.core.diagnosis.model import CONFIDENT, LIKELY
from oomscope.core.diagnosis.words import from_words
from oomscope.units import GIB


def cause(text: str, **numbers: float) -> tuple[str, float]:
    """(cause, confidence) of stated facts and, in GiB, of the numbers of a message."""
    message = None
    if numbers:
        message = OomMessage(
            "cuda_oom", backend="cuda", **{f"{k}_bytes": round(v * GIB) for k, v in numbers.items()}
        )  # type: ignore[arg-type]
    evidence = Evidence(
        signals=from_words(text), message=message, messages=(message,) if message else (),
        arithmetic=analyse(message) if message else None,
    )  # fmt: skip
    best = diagnose(evidence).verdict
    if best is None or best.finding.confidence < LIKELY:
        return "unknown", 0.0
    return best.rule.cause, best.finding.confidence


STATED = [
    ("load_duplicate", "2 GB spare when training from scratch fits"),
    ("load_duplicate", "fixed by map_location='cpu'"),
    ("load_on_cuda0", "fixed by map_location; torchrun with 8 ranks"),
    ("ctx_on_cuda0", "fixed by torch.cuda.set_device(local_rank)"),
    ("ckpt_full_gather", "state_dict_type FULL_STATE_DICT, 8 ranks"),
    ("ckpt_full_gather", "stage3_gather_16bit_weights_on_model_save is on"),
    ("init_before_shard", "fails in FlatParamHandle, handle.shard()"),
    ("init_before_shard", "OOM in Trainer._move_model_to_device"),
    ("nosync_grads", "2 GB of sharded gradients become 30 GB of unsharded gradients"),
    ("shard_ineffective", "no auto_wrap_policy, 4 GPUs"),
    ("shard_ineffective", "only the root module is wrapped"),
    ("fix_ineffective", "checkpointing: 40.1 GB without, 39.9 GB with"),
    ("fix_ineffective", "warning: None of the inputs have requires_grad=True. Gradients will be None"),
    ("framework_leak", "900 -> 1700 tensors after 200 steps"),
    ("benign_plateau", "1200 -> 1950 -> 2010 -> 2010 MB"),
    ("container_accumulation", "each value is a scalar tensor, 512 B each"),
    ("graph_accumulation", "fixed by .item()"),
    ("exception_holds", "first run reaches iteration 30, second run fails at once"),
    ("exception_holds", "sys.last_traceback keeps the frames"),
    ("optimizer_state_lazy", "last frame is zeros_like(p) in _init_group"),
    ("giant_transient", "eager attention scores, shape [B, H, S, S]"),
    ("allocator_spurious", "the same size works with the default allocator"),
    ("other_process", "nvidia-smi shows another process with 20 GB"),
    ("other_process", "a different job; stale process holds the card"),
    ("host_commit", "a larger paging file helps"),
    ("host_offload", "estimate 900 GB of states, node has 512 GB"),
    ("host_offload", "ZeRO-3 run fits without pinned memory, works once pin_memory is off"),
    ("host_per_rank_load", "bloom-7B x 8; low_cpu_mem_usage does not help"),
    ("host_dataloader_cow", "the index is a list of 5M strings"),
    ("host_cgroup", "pod was killed, OOMKilled, limit 64Gi"),
    ("host_cgroup", "slurm oom-kill event, --mem=32G"),
    ("host_per_rank_load", "torch.load on every rank; killed with signal 9 before training"),
    ("host_dataloader_cow", "16 workers, list of tuples of strings"),
    ("host_commit", "increasing the virtual memory fixed it"),
    ("lib_starved", "NCCL WARN Cuda failure 'out of memory'"),
    ("lib_starved", "CUDNN_STATUS_ALLOC_FAILED in the first convolution"),
    ("lib_starved", "CUBLAS_STATUS_NOT_INITIALIZED; torch.cuda.empty_cache() before it helps"),
    ("fragmentation", "max_split_size_mb=128 fixes it"),
    ("fragmentation", "reserved 20 GB while allocated 8 GB, variable sequence lengths"),
    ("graph_accumulation", "total_loss += loss in the loop"),
    ("graph_accumulation", "losses.append(loss)"),
    ("graph_accumulation", "loss.detach() solves it"),
    ("eval_accumulation", "compute_metrics; predictions accumulate on the GPU"),
    ("optimizer_state_lazy", "OOM in the first optimizer.step, Adam"),
    ("optimizer_state_lazy", "exp_avg is allocated at the first step"),
    ("longest_batch", "longest sample has 12k tokens, average 900"),
    ("init_before_shard", "FSDP(model.cuda()) with 13B on 40 GB cards"),
    ("init_before_shard", "model.to(device) before fully_shard"),
    ("fix_ineffective", "checkpoint wraps the whole model"),
    ("fix_ineffective", "gradient checkpointing on: peak 31.2 GB, off: 31.4 GB"),
    ("fix_ineffective", "10.2 GB with AMP, 10.1 GB without"),
    ("fix_ineffective", "expandable_segments:True is set, the hint still suggests it"),
    ("shard_ineffective", "reshard_after_forward=False on all layers"),
    ("other_process", "nvidia-smi lists PID 4411 of a colleague with 30 GB"),
    ("giant_transient", "vocab 128256, seq 8192"),
    ("ckpt_full_gather", "FSDP, fails in save_model"),
    ("ckpt_full_gather", "rank0_only=True and offload_to_cpu=True cure it, FSDP"),
    ("cudnn_workspace", "peak falls to 4 GB with cudnn.benchmark=False"),
    ("framework_leak", "grows 4 MB/iter on 2.0.1, fine on 1.13"),
    ("load_on_cuda0", "each of 4 ranks restores its optimizer; GPU 0 shows 4 processes of 1.3 GB each"),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "text"), STATED)
def test_a_stated_fact_leads_to_its_cause_and_never_makes_it_certain(expected, text):
    found, confidence = cause(text)
    assert found == expected
    assert confidence <= WORDS_ONLY < CONFIDENT


NEAR_MISSES = [
    ("load_duplicate", "a model trained from scratch OOMs in backward"),
    ("load_duplicate", "map_location='cpu' does not help"),
    ("load_on_cuda0", "map_location is cpu already, 8 ranks"),
    ("ctx_on_cuda0", "set_device is called first, 4 ranks"),
    ("ckpt_full_gather", "set_model_state_dict at start"),
    ("init_before_shard", "the whole model is checkpointed"),
    ("nosync_grads", "no unsharded gradients are left"),
    ("nosync_grads", "ZeRO-1 with unsharded gradients"),
    ("shard_ineffective", "auto_wrap_policy wraps each block"),
    ("shard_ineffective", "one FSDP unit per block is saved, phase: saving the model"),
    ("fix_ineffective", "checkpointing: 40.1 GB without, 22.0 GB with"),
    ("fix_ineffective", "checkpointing at step 100 without, 100 with"),
    ("framework_leak", "900 -> 900 tensors after 200 steps"),
    ("framework_leak", "1700 -> 900 tensors after 200 steps"),
    ("benign_plateau", "1200 -> 1950 -> 2010 -> 2010 MB, then OOM"),
    ("benign_plateau", "1200 -> 1950 -> 2900 -> 3800 MB"),
    ("container_accumulation", "sizes are rounded up to 512 B"),
    ("container_accumulation", "the storage list is never cleared"),
    ("graph_accumulation", "loss.item() is used for logging"),
    ("exception_holds", "the second run uses another seed"),
    ("optimizer_state_lazy", "zeros_like(p) while loading optimizer.load_state_dict"),
    ("giant_transient", "flash attention, seq 4096"),
    ("allocator_spurious", "the default allocator is used"),
    ("other_process", "nvidia-smi shows no other process"),
    ("other_process", "another user reports 5.4 -> 7.0 GB"),
    ("host_commit", "a larger paging file does not help"),
    ("host_offload", "estimate 200 GB of states, node has 512 GB"),
    ("host_offload", "pin_memory=True in the DataLoader"),
    ("host_per_rank_load", "images of 512x512, low_cpu_mem_usage=True"),
    ("host_dataloader_cow", "we keep a list of objects with grad_fn"),
    ("host_cgroup", "trained on a TPU pod, memory was fine"),
    ("ref_cycle", "gc.collect() does not help"),
    ("cudnn_workspace", "cudnn.benchmark = False"),
    ("exception_holds", "the same allocation succeeds on retry"),
    ("fragmentation", "max_split_size_mb=128 does not help"),
    ("fix_ineffective", "expandable_segments does not help"),
    ("fix_ineffective", "AMP with batch 4: 20 GB, with batch 8: 20 GB"),
    ("fix_ineffective", "gradient checkpointing on: peak 12.2 GB, off: 31.4 GB"),
    ("graph_accumulation", "total_loss += loss.item()"),
    ("graph_accumulation", "losses.append(loss.item())"),
    ("ckpt_full_gather", "a checkpoint is saved every 1000 steps"),
    ("ckpt_full_gather", "saving is disabled"),
    ("eval_accumulation", "evaluation is off, outputs are kept"),
    ("giant_transient", "cross-entropy loss, vocab 32000"),
    ("longest_batch", "resumes at the longest sample"),
    ("other_process", "code by another team"),
    ("shard_ineffective", "reshard_after_forward=True on all layers"),
    ("framework_leak", "steady on 2.0.1, fine on 1.13"),
    ("lib_starved", "torch.cuda.empty_cache() does not help"),
    ("init_before_shard", "fully_shard before model.to_empty(device)"),
]  # fmt: skip


@pytest.mark.parametrize(("never", "text"), NEAR_MISSES)
def test_what_only_looks_like_it_is_not_taken_for_it(never, text):
    assert cause(text)[0] != never


NOTHING = ["A100/V100", "torch 2.10", "UNet", "lightning 2.3", "T5-3B bf16", "8 ranks, DDP", "70B, 4xA100", "Ubuntu only",
           "shapes printed per step", "loop over encoder layers", "512x512 images", "worked last week", "8 workers, pin_memory=True", "batch size 1 fits, 2 OOMs", "validation runs every epoch",
           "loss is logged every 10 steps with loss.item()", "no FSDP, no AMP"]  # fmt: skip


AMBIENT = """\
we already call optimizer.zero_grad(set_to_none=True)
torch.no_grad() is used in validation
outputs are moved to CPU in validation
gradient_as_bucket_view=True is set
model.eval() and torch.inference_mode() everywhere
autocast dtype bf16
FSDP auto_wrap_policy with transformer blocks, FULL_SHARD
DeepSpeed ZeRO-3 with offload disabled
offload_optimizer device none
cudnn.benchmark is False
set_per_process_memory_fraction is not used
map_location='cpu' in torch.load
checkpoint is loaded on cpu
loss.item() is used everywhere
hidden state is detached
retain_graph=False
no hooks registered
persistent_workers=True
num_workers=8, prefetch_factor=4
list of numbers
vocabulary 50257
B=8, S=1024, V=50257
logits are float16
EMA of the weights is kept
train 10 epochs, 1000 batches per epoch
22.1 GB after step 1, 22.1 GB after step 100
loss goes from 2.1 to 0.3 over 5 epochs
accuracy increases
learning rate increases in warm-up
batch size grows from 8 to 64
dataset grows every day
sequence length rises from 512 to 4096
memory is released after the run
allocated 10.1 -> 10.1 GB
10 GB with AMP, 18 GB without
GPU 0 is an A100, GPU 1 a V100
on cuda:0 only
single process on cuda:0
second epoch is faster
random seed 42
the first forward takes 4 s
torch 2.1.0 fails, 2.0.1 not tried
fails on Linux and on Windows
WSL2, driver 537
Docker with --gpus all
SLURM, 1 node, 8 GPUs
job limit 24 hours
Kubernetes cluster with 8 A100
the code comes from another process of ours
uses torch.compile(dynamic=True)
compile is off
saves a checkpoint at the end
no checkpoint saved
logging to tensorboard
uses tqdm and wandb
data is loaded from disk
weights loaded from the hub
BERT large from scratch
same batch size on every GPU
trainer calls evaluate at the end
fits on A100 80GB
needs 38 GB by the estimate, card has 40 GB
node has 1 TB RAM
swap is off
GPU driver crashed once
Tried to allocate 20 MiB
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
PYTORCH_CUDA_ALLOC_CONF is not set
max_split_size_mb=512
garbage_collection_threshold:0.8
gradient accumulation 8
gradient checkpointing every second layer
3 forward passes per iteration
GAN with two optimizers
reinforcement learning with 64 environments
graph neural network, 2M nodes
U-Net 3D, 128x128x128 patches
stable diffusion LoRA
retrieval with a memory bank
contrastive loss, 65536 negatives
nn.Embedding with 30M rows
Adam with weight decay
SGD momentum
optimizer is Adafactor
8-bit Adam
model parallel, 2 stages
tensor parallel 4
accelerate config with fsdp
unsloth 4bit
gradients are clipped
teacher and student models
freeze of the first 10 layers
OOM during evaluation, batch 1
memory 12 GB before eval, 18 GB after
peak 8 GB in forward, 14 GB in backward
OOM on the 3rd epoch
killed after loading
out of memory on rank 3 only
nvidia-smi shows 2 processes
four processes per GPU
model 13B in fp16, 26 GB
allocated 5 GB, reserved 20 GB
num_alloc_retries 14
inactive_split 6 GB
worked with torch 1.13
max_memory_allocated 30.1 GB
first epoch ok
dynamic padding
uses flash_attn_varlen_func
uses Lightning 2.0 with ddp
loss includes an auxiliary term
gradients are None for some layers
requires_grad False for the embeddings
weights are tied
8 samples of the validation set
activation memory is 20 GB
optimizer states take 12 GB
params 2 GB, grads 2 GB, Adam 8 GB
memory fraction of activations 60 %
memory returns to 3 GB after each step
steady at 15 GB
0.5 GB free
context takes 600 MB
OOM with 3 nodes but not with 2
only with batch norm
images are padded to 1024
the log shows 20 warnings
we clear the cache every 100 steps
empty_cache after each epoch
gc is disabled
gc.freeze() is called at the start
subprocess workers are forked
pickle of the dataset is 2 GB
numpy array of 10M ints
dict of parameters
list of layers
mmap'ed dataset
two losses are summed
state dict is 14 GB
state_dict keys match
inference server shares nothing
A100 MIG disabled
one process per GPU
pinned memory 2 GB
swap file 8 GB
buckets of 25 MB
shared memory 64 GB
RAM 512 GB
1 -> 2 GPUs
4 GB -> 8 GB card
loaded twice for A/B comparison
twice the batch
scalar losses
graphs of the training loss are attached
all tensors are contiguous
stream of tokens
KV cache grows with the sequence
memory grows with batch size
leaky ReLU
profiler trace attached
batches of different lengths
increase of batch from 4 to 8
"""  # what a job is and has: settings in force, names, shapes, habits


@pytest.mark.parametrize("text", [*NOTHING, *AMBIENT.splitlines()])
def test_names_and_shapes_decide_nothing(text):
    assert cause(text)[0] == "unknown"


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("8x2080Ti", "uses:ranks", True),
        ("2 nodes of 8xA100", "uses:ranks", True),
        ("4x24 GB", "uses:ranks", True),
        ("x is 10240x24000", "uses:ranks", False),
        ("a 3x3 convolution on 224x224", "uses:ranks", False),
        ("+120 MB per epoch", "says:growing", True),
        ("2 GB RAM every epoch", "says:growing", True),
        ("4096 tokens per step", "says:growing", False),
        ("there is no leak", "says:growing", False),
        ("fp32 without AMP", "uses:autocast", False),
        ("works without AMP", "uses:autocast", True),
        ("without AMP it fits", "uses:autocast", True),
        ("not using FSDP", "uses:fsdp", False),
        ("no nested wrapping with FSDP", "uses:fsdp", True),
    ],
)
def test_denials_shapes_and_rates(text, name, expected):
    assert (name in {signal.name for signal in from_words(text)}) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500 -> 620 MB over 100 steps", {"says:growing"}),
        ("500 -> 620 MB with AMP", set()),
        ("0.5 GB -> 2.5 GB -> 4.5 GB", {"says:growing"}),
        ("500 MB -> 2 GB after 10 steps", set()),
        ("step 10 -> 200", set()),
        ("10 GB off, 9.9 GB on", {"says:no_effect"}),
        ("10 GB off, 9.9 MB on", set()),
        ("needs 2 TB, host has 900 GB", {"says:host", "says:host_needs_more"}),
        ("needs 80 GB, card has 40 GB", set()),
        ("", set()),
    ],
)
def test_figures(text, expected):
    assert {name for name, _ in from_figures(text)} == expected


@pytest.mark.parametrize(
    "unit", ["a", "1", "1 -> ", "loss ", "with 1 ", " x 8", "no ", "(", "1.", "\n", "GPU 0 "]
)
def test_long_texts_take_no_long_time(unit):
    start = time.process_time()
    from_words(unit * (4000 // len(unit)))
    assert time.process_time() - start < 2


FULL = {"tried": 1, "capacity": 40, "free": 0.2, "allocated": 38, "reserved": 38.5}


def test_a_full_card_alone_is_activations_as_often_as_not():
    assert cause("", **FULL) == ("capacity_activations", 0.5)
    assert cause("the same with batch size 1", **FULL)[0] == "unknown"


def test_an_incomplete_message_that_refuses_free_memory():
    short = {"tried": 0.02, "capacity": 8, "free": 5, "allocated": 0.5}
    assert cause("", **short)[0] == "host_commit"
    assert cause("on a MIG slice", **short)[0] != "host_commit"
    assert cause("", **{**short, "capacity": 80, "free": 60})[0] == "limit_or_driver"
    assert cause("", **{**short, "tried": 3})[0] == "limit_or_driver"
    assert cause("", **{**short, "free": 0.01})[0] == "unknown"
