"""Distributed training with one process: every process group is torch's fake one, and one rank is simulated.

Collectives move no data. Known values are treated as if every rank had the same; objects travel between
simulated ranks through a folder, when there is one.
"""

from __future__ import annotations

from typing import Any

from . import checkpoints, collectives, groups, objects, parallel, spawn
from .groups import World as World


def install(mode: Any, world: groups.World, exchange: str | None, ranks: list[int] | None) -> None:
    """Patch torch.distributed; `exchange` is a folder that all simulated ranks of the job share.

    `ranks` are the simulated ones, None where nobody has chosen.
    """
    groups.install(world)
    collectives.install(mode)
    objects.install(exchange, [world.rank] if ranks is None else ranks)
    parallel.install()
    checkpoints.install()
    spawn.install(ranks)
