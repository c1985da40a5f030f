"""Distributed training with one process: every process group is torch's fake one, and one rank is simulated.

Collectives move no data. Known values are treated as if every rank had the same; objects travel between
simulated ranks through a folder, when there is one.
"""

from __future__ import annotations

from typing import Any

from . import collectives, groups, objects, parallel, spawn


def install(mode: Any, world_size: int, rank: int, exchange: str | None, ranks: list[int]) -> None:
    """Patch torch.distributed; `exchange` is a folder that `ranks`, all simulated ranks of the job, share."""
    world = groups.World(world_size, rank)
    groups.install(world)
    collectives.install(mode)
    objects.install(exchange, ranks)
    parallel.install()
    spawn.install(world)
