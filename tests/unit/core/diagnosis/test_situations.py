# ruff: noqa: E501  # texts and tables
"""Situations in the words in which people report them: each leads to its cause, and what only resembles it does not.

Written from experience with such failures and from the kinds of things that public threads state, in words of our own.
"""

import pytest

from oomscope.core.diagnosis import diagnose
from oomscope.core.diagnosis.engine import WORDS_ONLY
from oomscope.core.diagnosis.log import scan_text
from oomscope.core.diagnosis.words import from_words
from tests.unit.core.diagnosis.test_reports import BENCHMARK


def cause(text: str, **numbers: float) -> tuple[str, float]:
    """(cause, confidence) of stated facts and, in GiB under the names of the collection, of a message's numbers."""
    row = {"facts": text, "oom_fields": numbers}
    found: tuple[str, float] = BENCHMARK.verdict_of(diagnose(BENCHMARK.evidence_of(row, everything=False)))
    return found


#: Cause, what is stated, and the numbers of the message in GiB.
SITUATIONS: list[tuple[str, str, dict[str, float]]] = [
    ("load_duplicate", "torch.load(path, map_location='cuda'); the variable `ckpt` is still referenced after load_state_dict", {}),
    ("ctx_on_cuda0", "7 extra processes on GPU 0 with about 530 MB each; 8-GPU DDP", {}),
    ("load_on_cuda0", "nvidia-smi: ranks 1 to 3 each own 1.4 GB on GPU 0 besides 2.9 GB on their own card", {}),
    ("capacity_activations", "batch size 4 works, 8 does not", {"tried": 0.0723, "total": 11.91, "alloc": 10.79, "free": 0.0126, "reserved": 11.21}),
    ("other_process", "the GPU also drives a desktop", {"tried": 0.0011, "total": 22.37, "alloc": 15.87, "free": 0.0035, "reserved": 16.64}),
    ("other_process", "", {"tried": 0.039, "total": 5.8, "alloc": 3.63, "free": 0.0164, "reserved": 3.71}),
    ("fragmentation", "", {"tried": 2.87, "total": 14.76, "alloc": 8.77, "free": 0.0193, "reserved": 13.71}),
    ("fragmentation", "only in the test script", {"tried": 1.65, "total": 7.79, "alloc": 3.53, "free": 1.4, "reserved": 5.28}),
    ("graph_accumulation", "running_loss is the sum of non-detached tensors", {}),
    ("graph_accumulation", "gradient penalty with create_graph=True; x.grad is never zeroed", {}),
    ("host_dataloader_cow", "annotations are a list[dict] with 3M entries, num_workers=32", {}),
    ("host_per_rank_load", "each of the 8 processes reads the 26 GB checkpoint into RAM; the node has 128 GB", {}),
    ("host_shm", "docker run without --shm-size; Bus error in a worker", {}),
    ("compile_graphs", "graph capture for 35 batch sizes takes 2.3 GB in a private pool", {}),
    ("eval_accumulation", "the prediction loop concatenates the logits of 40k samples on the device before the metrics are computed", {}),
    ("eval_no_nograd", "the validation loop calls model.eval() but not torch.no_grad()", {}),
    ("optimizer_state_lazy", "dies where AdamW allocates exp_avg_sq", {}),
    ("optimizer_transient", "innermost frame: torch._foreach_sqrt(exp_avg_sqs) in _multi_tensor_adamw", {}),
    ("cudnn_workspace", "turning torch.backends.cudnn.benchmark off lowers the peak from 11 to 6 GB", {}),
    ("ref_cycle", "memory only falls when gc.collect() is called by hand", {}),
    ("exception_holds", "batch size finder: after the first OOM even batch size 1 fails", {}),
    ("stream_held", "disappears when the rate limiter of FSDP (limit_all_gathers=True) is on", {}),
    ("init_before_shard", "FSDP(model.to(rank)), 30B parameters, dies in the constructor", {}),
    ("shard_ineffective", "FSDP without auto_wrap_policy has the same peak as DDP", {}),
    ("fix_ineffective", "gradient_checkpointing_enable(): 21.3 GB before, 21.2 GB after", {}),
    ("nosync_grads", "model.no_sync() around 7 of 8 micro-batches, FSDP, memory doubles", {}),
    ("ddp_buckets", "gradient_as_bucket_view is False; the reducer's buckets are as large as the 6 GB of gradients", {}),
    ("user_limit", "torch.cuda.set_per_process_memory_fraction(0.5) is called at start", {}),
    ("lib_starved", "Failed to CUDA calloc 6291456 bytes; torch has reserved 78 of 80 GB", {}),
    ("masked_oom", "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED", {}),
    ("longest_batch", "lengths from 40 to 3100 tokens; it fails at the batch that holds the sample of 3100", {}),
    ("giant_transient", "the logits are 16 x 4096 x 152064 in fp32, 37 GB", {}),
    ("framework_leak", "appears after upgrading to 2.1.0; with 2.0.1 the same script is stable", {}),
    ("benign_plateau", "1.9, 2.6, 2.7, 2.7, 2.7 GB after epochs 1 to 5", {}),
    ("host_offload", "optimizer offloaded to the CPU, 30B model, node with 256 GB RAM, killed with -9", {}),
    ("host_cgroup", "pod limit 48Gi, Reason: OOMKilled, exit code 137", {}),
    ("container_accumulation", "self.history.append(out.detach()) in every step", {}),
    ("third_party_hook", "a register_forward_hook of the profiling package stores the activations in a dict at each step", {}),
    ("autocast_cache", "the whole generation loop stands inside one torch.autocast block; memory returns when the block is left", {}),
    ("host_commit", "OSError [WinError 1455] the paging file is too small", {}),
    ("dataparallel_gather", "nn.DataParallel on 4 cards: 14 GB on the first, 6 GB on the others", {}),
    ("ckpt_full_gather", "FSDP.state_dict_type with FULL_STATE_DICT and without rank0_only", {}),
    ("limit_or_driver", "", {"tried": 1.0, "total": 79.1, "alloc": 20.0, "free": 57.3, "unalloc": 0.5}),
    ("absurd_size", "", {"tried": 1200000000.0, "total": 23.6}),
    ("giant_transient", "attention without a fused kernel, 32 heads, 32k tokens", {"tried": 64.0, "total": 79.1, "alloc": 12.0, "free": 60.1, "unalloc": 0.5}),
    ("framework_leak", "the number of live tensors goes from 1100 to 2900 between steps 100 and 400, memory stays flat", {}),
    ("unknown", "RTX 3090, batch size 2", {}),
    ("unknown", "happens on both of my machines", {}),
    ("unknown", "transformers 4.38, bf16, LoRA rank 16", {}),
    ("unknown", "training takes three days", {}),
    ("load_duplicate", "checkpoint = torch.load(...) stays in scope; starting fresh needs 3 GB less", {}),
    ("load_duplicate", "only when --resume is passed; a new run with the same settings fits", {}),
    ("ctx_on_cuda0", "in nvidia-smi every python process also appears on device 0 using 417MiB", {}),
    ("load_on_cuda0", "torch.load without map_location in each of 4 ranks", {}),
    ("capacity_activations", "OOM in the backward of the third encoder block at batch 32, fits at batch 24", {"tried": 0.75, "total": 39.4, "alloc": 37.0, "free": 0.31, "reserved": 38.2}),
    ("other_process", "a notebook kernel on the same card still has its model loaded", {}),
    ("other_process", "", {"tried": 0.5, "total": 79.1, "alloc": 30.2, "free": 0.2, "unalloc": 1.1}),
    ("fragmentation", "inputs are padded to the longest in the batch", {"tried": 1.2, "total": 23.6, "alloc": 13.9, "free": 0.4, "unalloc": 7.8}),
    ("fragmentation", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes the error go away", {}),
    ("graph_accumulation", "epoch_loss = epoch_loss + loss, printed at the end of the epoch", {}),
    ("graph_accumulation", "the LSTM state of the last batch is passed on to the next one", {}),
    ("host_dataloader_cow", "dataset keeps 12 million file names as python strings; RSS of the 24 workers climbs", {}),
    ("host_per_rank_load", "AutoModel.from_pretrained runs on all 8 ranks before the FSDP wrap, 70B, host memory 1 TB is full", {}),
    ("host_shm", "unable to write to file </torch_1234_5>", {}),
    ("compile_graphs", "mode='reduce-overhead' with many different input sizes, OOM after a few hundred steps", {}),
    ("eval_accumulation", "all validation logits are collected with torch.cat on the GPU", {}),
    ("eval_no_nograd", "forgot with torch.no_grad() around the test loop", {}),
    ("optimizer_state_lazy", "the first optimizer.step() raises it; forward and backward are fine", {}),
    ("optimizer_transient", "passing foreach=False to Adam lowers the peak by the size of the parameters", {}),
    ("cudnn_workspace", "the peak in the first iteration is 10 GB, from the second on 3 GB; torch.backends.cudnn.benchmark = True", {}),
    ("ref_cycle", "objects refer to each other; del does not free them, gc.collect() does", {}),
    ("exception_holds", "except RuntimeError as e: smaller batch is tried, fails too although it fits in a fresh process", {}),
    ("stream_held", "tensor.record_stream(side_stream) on each transferred batch", {}),
    ("init_before_shard", "deepspeed zero-3 without zero.Init: every GPU first gets the full 13B model", {}),
    ("shard_ineffective", "fully_shard(model) is called on the root only", {}),
    ("fix_ineffective", "peak is 18.4 GB with bf16 autocast and 18.1 GB without", {}),
    ("nosync_grads", "require_backward_grad_sync=False for accumulation under FSDP", {}),
    ("ddp_buckets", "DDP wrapper adds exactly the size of the gradients", {}),
    ("user_limit", "16.00 GiB allowed", {"tried": 0.2, "total": 79.1, "alloc": 15.7, "free": 60.0, "reserved": 15.9}),
    ("lib_starved", "ncclInternalError: Cuda failure 2 'out of memory', memory_reserved is 79.2 of 80 GB", {}),
    ("masked_oom", "INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp, nvmlDeviceGetMemoryInfo", {}),
    ("longest_batch", "one document of 32k tokens among documents of about 2k, it dies at that one", {}),
    ("giant_transient", "torch.cdist of 200k x 200k points", {"tried": 149.0, "total": 79.1, "alloc": 2.0, "free": 76.0, "unalloc": 0.1}),
    ("giant_transient", "logits.float() of a 262144-token vocabulary at 8k context", {}),
    ("framework_leak", "8 MB per call stay with torch 2.3 on ROCm, none with torch 2.2", {}),
    ("benign_plateau", "climbs for the first 30 iterations, then constant for two days", {}),
    ("host_offload", "DeepSpeed offload_param to cpu, 65B, the machine has 512 GB, process gets SIGKILL", {}),
    ("host_cgroup", "slurmstepd: error: Detected 1 oom-kill event(s)", {}),
    ("container_accumulation", "torchmetrics object is updated each step, compute() and reset() are never called", {}),
    ("third_party_hook", "captum attaches hooks and never removes them, memory grows", {}),
    ("autocast_cache", "cache_enabled=False in autocast cures it", {}),
    ("host_commit", "Windows 11, raising the page file from 8 to 64 GB solved it", {}),
    ("dataparallel_gather", "DataParallel: 23 GB on the first card, 9 GB on the other three", {}),
    ("ckpt_full_gather", "get_state_dict with full_state_dict=True at step 1000 on 16 GPUs", {}),
    ("limit_or_driver", "vGPU profile of 8 GB", {"tried": 0.5, "total": 40.0, "alloc": 3.1, "free": 30.0, "unalloc": 0.2}),
    ("allocator_spurious", "calling the same op again right after the error works", {}),
    ("unknown", "ViT-L/14, 336 px", {}),
    ("unknown", "the server was rebooted twice", {}),
    ("unknown", "batch size 16 per GPU, 4 GPUs, bf16", {}),
    ("unknown", "we use AdamW and a cosine schedule", {}),
    ("load_duplicate", "optimizer state is restored to the GPU and the loaded dict lives on; about 2x Adam state on the card", {}),
    ("ctx_on_cuda0", "nvidia-smi shows 8 PIDs on GPU0 and one PID on each of the others, the 7 extra ones have 311 MiB", {}),
    ("capacity_activations", "", {"tried": 0.5, "total": 47.5, "alloc": 44.9, "free": 0.2, "unalloc": 0.9}),
    ("other_process", "Process 91822 has 31 GiB memory in use, not mine", {"tried": 0.25, "total": 79.1, "alloc": 45.0, "free": 0.1, "unalloc": 0.8}),
    ("fragmentation", "dynamic batch shapes", {"tried": 0.9, "total": 31.7, "alloc": 19.0, "free": 0.3, "unalloc": 10.8}),
    ("graph_accumulation", "replay memory stores the Q-values together with their history", {}),
    ("graph_accumulation", "RAM of the CPU-only run climbs; train_loss is summed as a tensor and divided at the end", {}),
    ("host_dataloader_cow", "num_workers=0 is flat, num_workers=12 climbs through the epoch; the samples sit in a python dict", {}),
    ("host_per_rank_load", "4 ranks x 52 GB state dict, 192 GB node, killed before step 0", {}),
    ("host_shm", "OSError: No space left on device: '/dev/shm/torch_77'", {}),
    ("compile_graphs", "cudagraph trees record a new graph per sequence length", {}),
    ("eval_accumulation", "eval_preds list holds a GPU tensor per batch", {}),
    ("eval_no_nograd", "the evaluation function builds an autograd graph", {}),
    ("optimizer_state_lazy", "memory is 14 GB before the first optimizer step and 26 GB needed in it", {}),
    ("optimizer_transient", "weight update in step 12 fails in _foreach_mul", {}),
    ("cudnn_workspace", "conv3d; with cudnn.benchmark it asks for 11 GB of workspace, deterministic mode fits", {}),
    ("ref_cycle", "sawtooth: climbs for about 60 iterations, then falls back when the garbage collector runs", {}),
    ("exception_holds", "the traceback object of the caught OutOfMemoryError keeps all local tensors", {}),
    ("stream_held", "all-gather buffers are freed on the communication stream only later; TORCH_NCCL_AVOID_RECORD_STREAMS=1 helps", {}),
    ("init_before_shard", "model = build().cuda(); model = FSDP(model): 7B fp32 on 24 GB", {}),
    ("shard_ineffective", "ZeRO-2 does not lower the peak compared with DDP; activations dominate", {}),
    ("fix_ineffective", "use_reentrant=False checkpoint around the entire encoder, peak is the same", {}),
    ("nosync_grads", "FSDP, no_sync in all but the last micro step", {}),
    ("user_limit", "memory fraction is 0.4 per worker", {}),
    ("lib_starved", "cublasCreate fails with CUBLAS_STATUS_ALLOC_FAILED, 300 MB free, torch reserves 39 of 40 GB", {}),
    ("longest_batch", "sequence length varies from 12 to 9000, OOM is random", {"tried": 1.1, "total": 79.1, "alloc": 76.0, "free": 0.4, "unalloc": 1.2}),
    ("framework_leak", "leaks 3 MB per iteration under torch 2.0.0, upgrade to 2.0.1 cures it", {}),
    ("benign_plateau", "allocated flat at 9 GB, reserved goes 11 -> 13 -> 14 -> 14 GB", {}),
    ("host_offload", "offload_optimizer: cpu with pin_memory, 13B on 128 GB host, exit code -9", {}),
    ("host_cgroup", "docker run -m 32g, container is killed although the machine has 200 GB free", {}),
    ("container_accumulation", "confusion matrix inputs are kept for all steps (list states), no graph", {}),
    ("dataparallel_gather", "outputs of all replicas are gathered on device 0", {}),
    ("ckpt_full_gather", "FSDP, rank 0 collects the full model for torch.save", {}),
    ("absurd_size", "", {"tried": 16777216.0, "total": 24}),
    ("unknown", "EfficientNet-B4, 380 px", {}),
    ("unknown", "conda environment, driver 535", {}),
    ("unknown", "seq 2048, micro batch 2, 16 accumulation steps", {}),
    ("unknown", "first seen last Tuesday", {}),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "text", "numbers"), SITUATIONS)
def test_a_situation_leads_to_its_cause(expected, text, numbers):
    found, confidence = cause(text, **numbers)
    assert found == expected
    assert (
        confidence <= WORDS_ONLY or numbers or scan_text(text).messages
    )  # words alone never make it certain


RESEMBLE = [
    ("load_duplicate", "the checkpoint is written every epoch"),
    ("load_duplicate", "a new run starts every night"),
    ("ctx_on_cuda0", "every process uses its own GPU"),
    ("ctx_on_cuda0", "each of the other ranks holds 725 MiB on GPU 0"),
    ("host_per_rank_load", "11 GB per process on each GPU"),
    ("host_per_rank_load", "2 GB of RAM per worker, 8 workers"),
    ("graph_accumulation", "detached losses are written to a file"),
    ("graph_accumulation", "loss = loss_a + loss_b"),
    ("graph_accumulation", "the state of the last batch is detached before the next one"),
    ("container_accumulation", "skips.append(x) in the encoder of a U-Net"),
    ("container_accumulation", "metrics are reset after each epoch"),
    ("third_party_hook", "register_forward_hook is not used"),
    ("framework_leak", "torch 2.1 and torch 2.2 behave the same"),
    ("framework_leak", "only on Ubuntu"),
    ("compile_graphs", "no graph is captured"),
    ("compile_graphs", "the computation graph is small"),
    ("longest_batch", "lengths from 500 to 512 tokens, it fails"),
    ("longest_batch", "one sample of 32 is logged"),
    ("benign_plateau", "1.9, 2.6, 3.7, 4.7 GB after epochs 1 to 4"),
    ("benign_plateau", "1.9, 2.6, 2.7, 2.7 GB, then OOM"),
    ("autocast_cache", "one loss outside autocast"),
    ("eval_no_nograd", "evaluation runs under torch.no_grad() and not in train mode"),
    ("other_process", "a fused kernel of another kind"),
    ("fix_ineffective", "18.4 GB with bf16 autocast and 24.1 GB without"),
    ("fragmentation", "expandable_segments:True makes no difference"),
    ("shard_ineffective", "fully_shard(block) for each block, then the root"),
    ("host_dataloader_cow", "List[str] of metric names"),
    ("host_per_rank_load", "4 ranks x 52 GB state dict, node with 512 GB"),
    ("dataparallel_gather", "replicas of the service are restarted"),
    ("user_limit", "memory fraction of the activations is 60 %"),
    ("host_cgroup", "the run was killed by us"),
    ("eval_no_nograd", "validation draws graphs of the loss"),
    ("graph_accumulation", "samples with their labels are kept"),
    ("optimizer_state_lazy", "each optimizer step takes 2 s"),
]


@pytest.mark.parametrize(("never", "text"), RESEMBLE)
def test_what_resembles_a_situation_is_not_taken_for_it(never, text):
    assert cause(text)[0] != never


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("each holds 1.4 GB on GPU 0", "says:more_than_context", True),
        ("725 MiB each on GPU 0", "says:more_than_context", False),
        ("725 MiB each on GPU 0", "says:large_context", True),
        ("420 MiB each on GPU 0", "says:large_context", False),
        ("32 GB per process", "says:host_each", True),
        ("32 GB of VRAM, 8 GB per process", "says:host_each", False),
        ("tensors go from 900 to 1700", "says:objects", True),
        ("tensors go from 1700 to 900", "says:objects", False),
        ("from 900 to 1700 live objects", "says:growing", True),
        ("1.0, 2.0, 3.0 GB", "says:growing", True),
        ("3.0, 2.0, 4.0 GB", "says:growing", False),
        ("between 100 and 5000 points", "says:wide_range", True),
        ("frames from 100 to 200", "says:wide_range", False),
    ],
)
def test_relations_between_figures(text, name, expected):
    assert (name in {signal.name for signal in from_words(text)}) is expected
