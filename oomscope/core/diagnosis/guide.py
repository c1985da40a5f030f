"""What the usual three-question guide says at each node, and where it is wrong.

The guide is a well-known flowchart: first iteration → too large; random iteration → fragmentation; same
iteration → a leak. Its questions stay as headings because people know them; its conclusions are corrected.
Sources: some 140 public reports whose causes were established, and runs of the arithmetic.
"""

from __future__ import annotations

GATE = (
    "The guide starts at the iteration. A third of real cases end before that: another process, a limit, a library "
    "beside torch, or "
    "host memory. So whose memory it is comes first."
)
FIRST = (
    "The guide: model and optimizer do not fit; reduce the model, shard, or buy a bigger GPU. Right only when "
    "parameters, gradients and "
    "optimizer state alone exceed the card. Optimizer state appears in the first step(), so that case may show in "
    "the second "
    "iteration; and most failures of the first one are a load, a resume, one giant tensor or the wrong device."
)
RANDOM = (
    "The guide: fragmentation or variable lengths; set expandable_segments and pad. These are two causes with two "
    "cures: when the peak "
    "follows the batch the longest batch is too large, and no allocator setting helps; only when enough bytes lay "
    "idle is it "
    "fragmentation. Reference cycles, other processes and a card that is simply full look random too."
)
SAME = (
    "The guide: a batch too large or a leak. The same iteration is most often a phase boundary: evaluation, saving, "
    "resuming, a "
    "schedule. A rise that stops is no leak."
)
ACTIVATIONS = (
    "The guide estimates activations as batch × length × hidden × layers × 4 bytes. In half precision a transformer "
    "layer keeps about 34 "
    "bytes per token and hidden unit, plus the attention matrix without a fused kernel, plus the logits: some eight "
    "times more. And "
    "checkpointing does not save 60 % everywhere: nothing where the region is the whole model or static state "
    "dominates."
)
CACHE = (
    "The guide offers empty_cache(). The allocator gives back every releasable block before it reports out of "
    "memory, so this cannot "
    "help a request of the same process; it helps NCCL, cuDNN and other processes, and between phases."
)
SAVE = (
    "The guide saves with a full state dict. That gathers the whole model on each card and is itself the cause of "
    "many failures: "
    "offload to the CPU on rank 0 only, or save sharded."
)
AMP = (
    "The guide halves parameters, gradients and optimizer state under autocast. They stay in fp32, and "
    "half-precision copies of the "
    "weights come on top; only activations shrink."
)
SHARD = (
    "The guide divides everything by the number of GPUs under FSDP. The largest unsharded unit and its prefetched "
    "neighbour, reduce "
    "buffers, and unsharded gradients under no_sync() come on top."
)
BUCKETS = (
    "The guide counts 25 MB for DDP. Its buckets hold a second copy of all gradients unless "
    "gradient_as_bucket_view=True."
)
FIRST_DEVICE = (
    "The guide's DDP example lacks set_device(local_rank): every rank then makes a context on GPU 0."
)
HOST = (
    "The guide has no branch for host memory: loaders, offload, pinned buffers, /dev/shm and cgroup limits."
)
VERIFY = "The guide ends with the advice. A fix counts when the rerun shows it: peak, phase of the new peak, losses."
ENVIRONMENT = (
    "The guide writes two export lines; the second replaces the first. Settings are joined with commas, and "
    "max_split_size_mb makes no "
    "sense beside expandable_segments."
)
