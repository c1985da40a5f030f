"""What distributed scripts do beside the plain loop: strategies, hooks, contexts, checkpoints."""

import contextlib
import functools
import tempfile

import torch
import torch.distributed as dist
from checks import run_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")


def layers():
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(3)]
    )


def step(model, optimizer=None, count=2):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(count):
        loss = model(torch.randn(8, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def check_fsdp1_every_strategy():
    mesh = init_device_mesh("cuda", (2, 4))
    for strategy in ShardingStrategy:
        hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
        wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential})
        model = FullyShardedDataParallel(
            layers(), sharding_strategy=strategy, auto_wrap_policy=wrap, device_id=torch.cuda.current_device(),
            use_orig_params=True, **({"device_mesh": mesh} if hybrid else {}),
        )  # fmt: skip
        step(model)


def check_fsdp1_offload_precision_and_state():
    for original in (False, True):
        model = FullyShardedDataParallel(
            layers(), cpu_offload=CPUOffload(offload_params=True), device_id=torch.cuda.current_device(),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32), use_orig_params=original,
        )  # fmt: skip
        step(model)
        assert all(each.device.type == "cpu" for each in model.parameters())
    model = FullyShardedDataParallel(layers().cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    model.clip_grad_norm_(1.0)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        assert model.state_dict()["0.0.weight"].shape == (512, 256)
    with FullyShardedDataParallel.summon_full_params(model):
        pass
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.state_dict()
    FullyShardedDataParallel.optim_state_dict(model, optimizer)


def check_fsdp1_accumulates_without_sync():
    model = FullyShardedDataParallel(layers().cuda())
    with model.no_sync():
        model(torch.randn(8, 256, device="cuda")).sum().backward()
    step(model)


def check_fsdp2_offload_precision_hybrid():
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    for options in (
        {"offload_policy": CPUOffloadPolicy()},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"mesh": mesh},
        {"reshard_after_forward": False},
    ):
        model = layers() if "offload_policy" in options else layers().cuda()
        for layer in model:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        model.set_requires_gradient_sync(False)
        model(torch.randn(8, 256, device="cuda")).sum().backward()
        model.set_requires_gradient_sync(True)
        step(model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def check_distributed_checkpoints():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    model = layers().cuda()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=f"{folder}/a")
        dcp.load(state, checkpoint_id=f"{folder}/a")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        dcp.async_save(state, checkpoint_id=f"{folder}/b").result()
    whole, _ = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert whole["0.0.weight"].shape == (512, 256)
    step(model, optimizer)


def check_ddp_options():
    for options in (
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1, "broadcast_buffers": False},
        {"device_ids": [torch.cuda.current_device()], "output_device": torch.cuda.current_device()},
    ):
        step(DistributedDataParallel(layers().cuda(), **options))


def check_ddp_no_sync_and_join():
    model = DistributedDataParallel(layers().cuda())
    with model.no_sync():
        model(torch.randn(8, 256, device="cuda")).sum().backward()
    with model.join():
        step(model)


def check_ddp_communication_hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    for hook in (
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        default_hooks.allreduce_hook,
    ):
        model = DistributedDataParallel(layers().cuda())
        model.register_comm_hook(None, hook)
        step(model)
    model = DistributedDataParallel(layers().cuda())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    step(model, count=4)


def check_zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(layers().cuda())
    step(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))


def check_synchronised_batch_norm():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    ).cuda()
    model = DistributedDataParallel(model)
    model(torch.randn(4, 3, 16, 16, device="cuda")).sum().backward()


def check_checkpointing_in_ddp():
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers()

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    step(DistributedDataParallel(Model().cuda(), static_graph=True))


def check_every_collective():
    world, rank = dist.get_world_size(), dist.get_rank()
    one = torch.ones(4, device="cuda")
    many = [torch.empty(4, device="cuda") for _ in range(world)]
    dist.all_gather(many, one)
    dist.all_gather_into_tensor(torch.empty(4 * world, device="cuda"), one)
    dist.reduce_scatter(torch.empty(4, device="cuda"), many)
    dist.reduce_scatter_tensor(torch.empty(4, device="cuda"), torch.ones(4 * world, device="cuda"))
    dist.all_to_all(many, [one.clone() for _ in range(world)])
    dist.all_to_all_single(torch.empty(world, device="cuda"), torch.ones(world, device="cuda"))
    dist.broadcast(one, 0)
    dist.reduce(one, 0)
    dist.gather(one, many if rank == 0 else None)
    dist.scatter(one, many if rank == 0 else None)
    dist.barrier()
    dist.all_reduce(one, dist.ReduceOp.MAX, async_op=True).wait()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, one, (rank + 1) % world), dist.P2POp(dist.irecv, one, (rank - 1) % world)]
    ):
        work.wait()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    dist.broadcast_object_list(objects)
    with contextlib.suppress(AttributeError):
        dist.monitored_barrier()


def check_samplers_and_loaders():
    data = torch.utils.data.TensorDataset(torch.randn(64, 256))
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, 4, sampler=sampler, num_workers=2, pin_memory=True)
    sampler.set_epoch(1)
    model = DistributedDataParallel(layers().cuda())
    for (batch,) in loader:
        model(batch.cuda(non_blocking=True)).sum().backward()


run_all(globals())
