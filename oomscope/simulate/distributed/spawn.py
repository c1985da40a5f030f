"""Ranks that a script starts itself with `torch.multiprocessing.spawn`: the chosen ones run, each in its process.

As for torchrun, those are the ranks that the user named, else the first and the last. The parent tells each child
by an environment variable which rank of how many it is, because its device starts before the script says so.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def install(ranks: list[int] | None) -> None:
    """Replace `spawn` and `start_processes`; `ranks` are those that the user chose."""
    multiprocessing = torch.multiprocessing
    # `torch.multiprocessing.spawn` is the function; code that imports from the module finds the replacement there.
    module: Any = importlib.import_module("torch.multiprocessing.spawn")
    plain = module.start_processes

    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False,
                        start_method: str = "spawn", **kwargs: Any) -> Any:  # fmt: skip
        chosen = [rank for rank in ranks or () if rank < nprocs] or sorted({0, nprocs - 1})
        worker = Worker(fn, chosen, nprocs)
        return plain(worker, args, len(chosen), join, daemon, start_method, **kwargs)

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False,
              start_method: str = "spawn") -> Any:  # fmt: skip
        return start_processes(fn, args, nprocs, join, daemon, "spawn")

    for place in (module, multiprocessing):
        place.spawn, place.start_processes = spawn, start_processes


class Worker:
    """The function of the script, called with the rank that the n-th simulated process stands for."""

    def __init__(self, function: Any, ranks: list[int], world_size: int) -> None:
        self.function = function
        self.ranks = ranks
        self.world_size = world_size

    def __call__(self, index: int, *args: Any) -> Any:
        from ..session import current

        session = current()
        if session is not None:
            session.resize(self.world_size, self.ranks[index])
        return self.function(self.ranks[index], *args)

    def mark(self, index: int) -> str:
        """What the process of number `index` reads with `protocol.env.simulated_rank`."""
        return f"{self.ranks[index]}/{self.world_size}"
