"""Rank 0 of eight: every check builds its own model in the one process group."""

import functools
import os

import torch
import torch.distributed as dist
from checks import run_all
from torch import nn
from torch.nn import functional as F

MIB = 1 << 20
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
WORLD = dist.get_world_size()


class Block(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def model(layers=4):
    return nn.Sequential(*[Block() for _ in range(layers)])


def train(net, steps=2, clip=None):
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(steps):
        net(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        if clip:
            clip()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.memory_allocated()


def start():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


PARAMETERS = 4 * 2 * 1024 * 4096 * 4  # bytes in float32


def check_environment_and_group():
    assert WORLD == 8
    assert dist.get_rank() == 0
    assert dist.get_backend() == "nccl"
    assert torch.cuda.device_count() == 8
    group = dist.new_group([0, 1, 2, 3])
    assert dist.get_world_size(group) == 4
    dist.barrier()


def check_values_as_if_all_ranks_were_alike():
    tensor = torch.tensor(3.0, device="cuda")
    dist.all_reduce(tensor)
    assert tensor.item() == 24.0
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    assert tensor.item() == 24.0
    parts = [torch.empty(2, device="cuda") for _ in range(WORLD)]
    dist.all_gather(parts, torch.tensor([1.0, 2.0], device="cuda"))
    assert parts[7].tolist() == [1.0, 2.0]
    dist.broadcast(tensor, 0)


def check_objects():
    gathered = [None] * WORLD
    dist.all_gather_object(gathered, {"a": 1})
    assert gathered == [{"a": 1}] * WORLD
    assert dist.all_reduce(torch.ones(3, device="cuda"), async_op=True).wait()


def check_distributed_data_parallel():
    before = start()
    net = model().cuda()
    replica = nn.parallel.DistributedDataParallel(net, device_ids=[0])
    buckets = torch.cuda.memory_allocated() - before - PARAMETERS
    assert buckets >= PARAMETERS, buckets / MIB
    after = train(replica)
    assert replica._get_ddp_logging_data() == {}  # Lightning asks for it at the end
    # Parameters, two states, the buckets, two cuBLAS workspaces; zero_grad leaves no gradients.
    assert 3.9 * PARAMETERS < after - before < 4.1 * PARAMETERS + 64 * MIB


def check_data_parallel_gradients_as_bucket_views():
    before = start()
    replica = nn.parallel.DistributedDataParallel(
        model().cuda(), device_ids=[0], gradient_as_bucket_view=True
    )
    train(replica)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 5.6 * PARAMETERS, peak / PARAMETERS


def check_fully_shard():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    before = start()
    mesh = init_device_mesh("cuda", (WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        net = model()
    for block in net:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    net.to_empty(device="cuda")
    shard = torch.cuda.memory_allocated() - before
    assert PARAMETERS // 8 <= shard < PARAMETERS // 8 * 1.02, shard
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0, 0.02)
    after = train(net, clip=lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
    assert after - before < 3 * PARAMETERS / 8 * 1.3 + 64 * MIB + 20 * MIB  # with two cuBLAS workspaces
    assert torch.cuda.max_memory_allocated() - before < 1.6 * PARAMETERS


def _fsdp1(**kwargs):
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    before = start()
    net = FullyShardedDataParallel(
        model(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        device_id=torch.cuda.current_device(),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        **kwargs,
    )
    after = train(net, clip=lambda: net.clip_grad_norm_(1.0))
    return after - before, torch.cuda.max_memory_allocated() - before


def check_fsdp1_full_shard():
    after, _ = _fsdp1()
    assert after < 3 * PARAMETERS / 8 * 1.2 + 20 * MIB, after / PARAMETERS


def check_fsdp1_original_parameters():
    assert _fsdp1(use_orig_params=True)[0] < 3 * PARAMETERS / 8 * 1.5 + 20 * MIB


def check_fsdp1_shard_grad_op_needs_more_than_full_shard():
    from torch.distributed.fsdp import ShardingStrategy

    assert _fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)[1] > _fsdp1()[1]


def check_fsdp1_no_shard():
    from torch.distributed.fsdp import ShardingStrategy

    assert _fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD)[0] > 2.5 * PARAMETERS


def check_fsdp1_cpu_offload():
    from torch.distributed.fsdp import CPUOffload

    assert _fsdp1(cpu_offload=CPUOffload(offload_params=True))[0] < 40 * MIB


def check_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (WORLD,))
    before = start()
    net = model().cuda()
    for block in net:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert torch.cuda.memory_allocated() - before < PARAMETERS / 8 * 1.02
    train(net)


def check_sharded_and_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    net = model().cuda()
    for block in net:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    train(net)


def check_zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = nn.parallel.DistributedDataParallel(model().cuda(), device_ids=[0])
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.AdamW)
    net(torch.randn(8, 1024, device="cuda")).sum().backward()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.memory_allocated() - before < PARAMETERS


run_all(globals())
dist.destroy_process_group()
