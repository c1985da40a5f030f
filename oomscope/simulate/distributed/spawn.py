"""`torch.multiprocessing.spawn`: the simulated rank runs in this process, the others not at all."""

from __future__ import annotations

import os
from typing import Any

import torch

from .groups import World


def install(world: World) -> None:
    """Replace `spawn` and `start_processes`."""
    multiprocessing = torch.multiprocessing

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False,
              start_method: str = "spawn", **_kwargs: Any) -> Any:  # fmt: skip
        from ..session import current

        session = current()
        world.size = nprocs
        rank = min(int(os.environ.get("RANK", world.rank)), nprocs - 1)
        if session is not None:
            session.resize(nprocs, rank)
        for name, value in {"WORLD_SIZE": nprocs, "RANK": rank, "LOCAL_RANK": rank}.items():
            os.environ.setdefault(name, str(value))
        fn(rank, *args)
        return None if join else _Finished()

    multiprocessing.spawn = multiprocessing.start_processes = spawn
    # The module of that name is replaced by the function above; code that imports from it finds it there.
    import importlib

    module: Any = importlib.import_module("torch.multiprocessing.spawn")
    module.spawn = module.start_processes = spawn
    multiprocessing.spawn = spawn


class _Finished:
    """What `spawn(join=False)` returns."""

    processes: list[Any] = []  # noqa: RUF012  # never filled

    def join(self, *_timeout: Any) -> bool:
        return True
