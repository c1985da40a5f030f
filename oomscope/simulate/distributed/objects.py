"""Python objects between ranks: through a folder between simulated ranks, else each rank keeps its own.

Pipeline stages learn the shapes of their inputs by such messages, so the neighbours of a simulated stage
must be simulated as well: a rank that waits for one that does not run asks the launcher for it.
"""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from ...protocol import layout
from .replace import replace

_PATIENCE_S = 120.0
_POLL_S = 0.01


class Mailbox:
    """Numbered messages between ranks, one file each."""

    def __init__(self, folder: str | None, ranks: list[int]) -> None:
        self.folder = folder
        self.ranks = ranks
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[tuple[int, int], int] = {}

    def send(self, objects: Any, source: int, target: int) -> None:
        if self.folder is None:
            return
        os.makedirs(self.folder, exist_ok=True)
        number = self._sent[source, target] = self._sent.get((source, target), 0) + 1
        path = self._path(source, target, number)
        with open(path + ".part", "wb") as file:
            pickle.dump(tree_map(_as_shape, objects), file)
        os.rename(path + ".part", path)

    def receive(self, source: int, target: int) -> Any:
        """The next message; waits for it.

        Raises:
            RuntimeError: the sender cannot be simulated, or is silent.
        """
        number = self._received[source, target] = self._received.get((source, target), 0) + 1
        end = time.monotonic() + _PATIENCE_S
        if self.folder is not None:
            if source not in self.ranks:
                self._ask_for(source)
            path = self._path(source, target, number)
            while time.monotonic() < end:
                if os.path.exists(path):
                    with open(path, "rb") as file:
                        return pickle.load(file)
                time.sleep(_POLL_S)
        raise RuntimeError(
            f"rank {target} waits for an object from rank {source}, which is not simulated or sends none: "
            "simulate both (--ranks)"
        )

    def _ask_for(self, rank: int) -> None:
        os.makedirs(str(self.folder), exist_ok=True)
        open(os.path.join(str(self.folder), f"{layout.WANTED_PREFIX}{rank}"), "wb").close()

    def _path(self, source: int, target: int, number: int) -> str:
        return os.path.join(str(self.folder), f"{source}-{target}-{number}.pickle")


def install(folder: str | None, ranks: list[int]) -> None:
    """Replace the object functions of torch.distributed."""
    c10d = torch.distributed.distributed_c10d
    mailbox = Mailbox(folder, ranks)

    def peer(rank: Any, group: Any, group_rank: Any) -> int:
        return int(c10d.get_global_rank(group, group_rank) if group_rank is not None else rank)

    def send_object_list(object_list: Any, dst: Any = None, group: Any = None, device: Any = None,
                         group_dst: Any = None, use_batch: bool = False) -> None:  # fmt: skip
        mailbox.send(list(object_list), c10d.get_rank(), peer(dst, group, group_dst))

    def recv_object_list(object_list: Any, src: Any = None, group: Any = None, device: Any = None,
                         group_src: Any = None, use_batch: bool = False) -> int:  # fmt: skip
        sender = peer(src, group, group_src)
        object_list[:] = mailbox.receive(sender, c10d.get_rank())
        return sender

    def broadcast_object_list(object_list: Any, src: Any = None, group: Any = None, device: Any = None,
                              group_src: Any = None) -> None:  # fmt: skip
        return None

    def all_gather_object(object_list: Any, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None,
                      group_dst: Any = None) -> None:  # fmt: skip
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(scatter_object_output_list: Any, scatter_object_input_list: Any = None, src: Any = None,
                            group: Any = None, group_src: Any = None) -> None:  # fmt: skip
        if scatter_object_input_list:
            scatter_object_output_list[0] = scatter_object_input_list[c10d.get_rank(group)]

    replace(
        {
            "send_object_list": send_object_list,
            "recv_object_list": recv_object_list,
            "broadcast_object_list": broadcast_object_list,
            "all_gather_object": all_gather_object,
            "gather_object": gather_object,
            "scatter_object_list": scatter_object_list,
        }
    )


def _as_shape(each: Any) -> Any:
    if isinstance(each, FakeTensor):
        return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
    return each
