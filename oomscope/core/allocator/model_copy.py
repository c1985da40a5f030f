"""A copy of an allocator that can go its own way: to try something and come back.

Standard library only, Python 3.9, as the other parts of the model.
"""

from __future__ import annotations

import copy
from typing import TypeVar

from .model_blocks import Block, FreeList, Pool, Reservation
from .model_state import AllocatorState

_Allocator = TypeVar("_Allocator", bound=AllocatorState)


def copy_allocator(allocator: _Allocator) -> _Allocator:
    """An independent copy with its own blocks, lists and driver. Takes time linear in the blocks.

    Events of pending frees and statistics are not copied: this is for replays, which keep neither.
    """
    twin = copy.copy(allocator)
    twin.driver = copy.copy(allocator.driver)
    lists: dict[int, FreeList] = {}
    twin.pools = {pool_id: _copy_pool(pool, lists) for pool_id, pool in allocator.pools.items()}
    reservations = {
        id(each): Reservation(each.base, each.size, each.granule) for each in allocator.reservations
    }
    twin.reservations = list(reservations.values())
    old = [*allocator.live.values(), *allocator.free_blocks.values(), *allocator.unmapped_blocks.values()]
    blocks = {id(block): Block(block.address, block.size, lists[id(block.owner)], block.tie) for block in old}
    for block in old:
        new = blocks[id(block)]
        new.requested, new.born, new.key = block.requested, block.born, block.key
        new.allocated, new.pending, new.mapped = block.allocated, block.pending, block.mapped
        new.context, new.segment_context = block.context, block.segment_context
        new.prev = None if block.prev is None else blocks[id(block.prev)]
        new.next = None if block.next is None else blocks[id(block.next)]
        new.reservation = None if block.reservation is None else reservations[id(block.reservation)]
    twin.live = {address: blocks[id(block)] for address, block in allocator.live.items()}
    twin.free_blocks = {address: blocks[id(block)] for address, block in allocator.free_blocks.items()}
    twin.unmapped_blocks = {
        address: blocks[id(block)] for address, block in allocator.unmapped_blocks.items()
    }
    return twin


def _copy_pool(pool: Pool, lists: dict[int, FreeList]) -> Pool:
    twin = Pool(pool.id)
    twin.users = pool.users
    twin.no_split, twin.use_on_oom = pool.no_split, pool.use_on_oom
    twin.custom_allocator = pool.custom_allocator
    for small in (True, False):
        for old in pool.lists(small):
            new = twin.free_list(small, old.stream)
            new.keys, new.unmapped = old.keys[:], old.unmapped[:]
            lists[id(old)] = new
    return twin
