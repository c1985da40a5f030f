"""Process groups: any backend that is asked for becomes the fake one, and says that it is NCCL."""

from __future__ import annotations

import os
from typing import Any

import torch

from ...protocol.env import simulated_rank
from .replace import replace


class World:
    """How many ranks the job has, and which one this process stands for."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank

    def publish(self) -> None:
        """Set the variables that torchrun sets, where they are missing."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or min(self.size, 8))
        for name, value in {
            "WORLD_SIZE": self.size,
            "RANK": self.rank,
            "LOCAL_RANK": self.rank % local,
            "LOCAL_WORLD_SIZE": local,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": 29500,
        }.items():
            os.environ.setdefault(name, str(value))


def install(world: World) -> None:
    """Replace the functions that make and describe process groups."""
    if world.size > 1 and simulated_rank(os.environ) is None:
        world.publish()
    c10d = torch.distributed.distributed_c10d
    plain_init, plain_group, plain_backend = c10d.init_process_group, c10d.new_group, c10d.get_backend

    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: Any = None,
        **_kwargs: Any,
    ) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = int(os.environ.get("WORLD_SIZE", world.size)) if world_size in (-1, None) else world_size
        mine = int(os.environ.get("RANK", world.rank)) if rank in (-1, None) else rank
        plain_init("fake", rank=mine, world_size=size, store=FakeStore())

    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: Any = None,
        device_id: Any = None,
        **_kwargs: Any,
    ) -> Any:
        return plain_group(ranks=ranks, backend="fake" if backend else None, group_desc=group_desc)

    def get_backend(group: Any = None) -> str:
        return "nccl" if plain_backend(group) == "fake" else plain_backend(group)

    replace(
        {
            "init_process_group": init_process_group,
            "new_group": new_group,
            "get_backend": get_backend,
            "is_nccl_available": lambda: True,
            "_set_pg_timeout": lambda *_args, **_kwargs: None,
            "monitored_barrier": lambda *_args, **_kwargs: None,
        }
    )
    c10d._NCCL_AVAILABLE = True
    if not hasattr(c10d, "ProcessGroupNCCL"):
        c10d.ProcessGroupNCCL = torch.distributed.ProcessGroupNCCL = _ProcessGroupNCCL


class _ProcessGroupNCCL:
    """Only its options are used, by code that sets priorities and timeouts."""

    class Options:
        """Takes any setting."""

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            self.config = _Settings()


class _Settings:
    """NCCL's own settings; they change nothing here."""
