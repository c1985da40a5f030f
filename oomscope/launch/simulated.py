"""A job of many ranks on simulated cards.

One plain process stands for each chosen rank, and torchrun is not needed. Unless the user chose, the first rank
and the last are run: between them they show what differs along the ranks (rank 0's own buffers, uneven shards,
the ends of a pipeline). A rank that waits for a message of another one asks for it, and it is started then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomscope.errors import UsageError
from oomscope.launch.command import TORCHRUN_MODULE, torchrun_option, torchrun_script
from oomscope.protocol import layout
from oomscope.simulate.cards import Card


@dataclass(frozen=True)
class SimulatedRanks:
    """The ranks of a simulated torchrun job: one plain process stands for each chosen one."""

    world_size: int
    local_world_size: int
    chosen: tuple[int, ...]

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would have set.

        Source: torch.distributed.elastic LocalElasticAgent._start_workers.
        """
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.local_world_size),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(rank // self.local_world_size),
            "GROUP_WORLD_SIZE": str(self.world_size // self.local_world_size),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "simulated",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }


def simulated_ranks(command: Sequence[str], chosen: Sequence[int] | None) -> SimulatedRanks | None:
    """The ranks to simulate, or None when the command starts its own processes."""
    if TORCHRUN_MODULE not in command:
        return None
    local = _count(torchrun_option(command, "--nproc-per-node") or "1", "--nproc-per-node")
    nodes = _count((torchrun_option(command, "--nnodes") or "1").rpartition(":")[2], "--nnodes")
    world = local * nodes
    chosen = tuple(sorted({0, world - 1})) if chosen is None else chosen
    wrong = [rank for rank in chosen if not 0 <= rank < world]
    if wrong or not chosen:
        raise UsageError(
            f"no rank {wrong[0] if wrong else '?'} in a job of {world}", hint=f"ranks are 0 to {world - 1}"
        )
    return SimulatedRanks(world, local, tuple(chosen))


def _count(text: str, option: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise UsageError(
            f"{option} {text}: a simulated device needs a number", hint=f"for example {option} 8"
        )
    return value


def without_torchrun(command: Sequence[str]) -> tuple[str, ...]:
    """The command of one rank.

    The interpreter of the torchrun command and what torchrun would have started.
    """
    return (command[0], *torchrun_script(command))


def wanted_ranks(attempt_dir: Path) -> Iterator[int]:
    """The ranks for whose messages a simulated rank of this attempt waits or has waited."""
    for path in (attempt_dir / layout.EXCHANGE_DIR).glob(f"{layout.WANTED_PREFIX}*"):
        number = path.name[len(layout.WANTED_PREFIX) :]
        if number.isdigit():
            yield int(number)


def describe(card: Card, world_size: int, capacity_bytes: int | None = None) -> dict[str, Any]:
    """`card` as agent.json gives it to the simulated device; `capacity_bytes` replaces the card's own."""
    return {
        "spec": card.spec or card.name,
        "name": card.product,
        "capacity_bytes": card.capacity_bytes(world_size) if capacity_bytes is None else capacity_bytes,
        "total_bytes": card.usable_bytes,
        "compute_capability": list(card.compute_capability),
        "multiprocessors": card.multiprocessors,
        "context_bytes": card.context_bytes,
        "nccl_bytes": card.nccl_bytes,
        "source": card.source,
        "count": card.count,
    }
