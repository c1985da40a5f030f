"""A `Snapshot` as one line of JSON and a row of raw arrays: how the loading process hands its result back.

Nothing in it can run: the reader takes lengths, types from a fixed list, and text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oomscope.core.snapshot.columns import Annotations, Blocks, Events, Frame, Segments, StackTable
from oomscope.core.snapshot.identity import Identity
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot, SnapshotWarning

Array = NDArray[Any]
_TYPES = ("int64", "int32", "int16", "uint8", "bool")


class _Writer:
    """Collects arrays and describes where they are."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.layout: list[tuple[str, int]] = []

    def put(self, array: Array | None) -> int | None:
        if array is None:
            return None
        self.arrays.append(np.ascontiguousarray(array))
        self.layout.append((array.dtype.name, len(array)))
        return len(self.arrays) - 1

    def table(self, table: Any) -> dict[str, int | None]:
        return {each.name: self.put(getattr(table, each.name)) for each in fields(table)}


def pack(snapshot: Snapshot) -> tuple[dict[str, Any], list[Array]]:
    """The JSON head of a snapshot and the arrays that follow it, in order."""
    writer = _Writer()
    head: dict[str, Any] = {
        "name": snapshot.name,
        "devices": [
            {
                "device": each.device,
                "segments": writer.table(each.segments),
                "blocks": writer.table(each.blocks),
                "events": writer.table(each.events),
                "skipped_events": each.skipped_events,
                "window": each.window,
            }
            for each in snapshot.devices
        ],
        "frames": [[each.file, each.line, each.function] for each in snapshot.stacks.frames],
        "offsets": writer.put(snapshot.stacks.offsets),
        "frame_ids": writer.put(snapshot.stacks.frame_ids),
        "streams": snapshot.streams,
        "pools": snapshot.pools,
        "texts": snapshot.texts,
        "settings": snapshot.settings,
        "annotations": writer.table(snapshot.annotations),
        "torch_at_least": snapshot.torch_at_least,
        "torch_version": snapshot.torch_version,
        "keys": snapshot.keys,
        "identity": [snapshot.identity.rank, snapshot.identity.step, snapshot.identity.pid],
        "warnings": [[each.code, each.message] for each in snapshot.warnings],
    }
    head["layout"] = writer.layout
    return head, writer.arrays


def payload_bytes(head: dict[str, Any]) -> int:
    """Bytes of the arrays that follow `head`."""
    return sum(np.dtype(_checked(name)).itemsize * int(count) for name, count in head["layout"])


def unpack(head: dict[str, Any], payload: memoryview) -> Snapshot:
    """The snapshot of `pack`; its arrays are views of `payload`."""
    arrays = list(_arrays(head["layout"], payload))

    def array(number: int | None) -> Any:
        return None if number is None else arrays[number]

    def table(kind: Any, numbers: dict[str, int | None]) -> Any:
        return kind(**{name: array(number) for name, number in numbers.items()})

    devices = [
        DeviceSnapshot(
            each["device"],
            table(Segments, each["segments"]),
            table(Blocks, each["blocks"]),
            table(Events, each["events"]),
            each["skipped_events"],
            each["window"],
        )
        for each in head["devices"]
    ]
    frames = [Frame(file, line, function) for file, line, function in head["frames"]]
    return Snapshot(
        name=head["name"],
        devices=devices,
        stacks=StackTable(frames, array(head["offsets"]), array(head["frame_ids"])),
        streams=head["streams"],
        pools=[(first, second) for first, second in head["pools"]],
        texts=head["texts"],
        settings=head["settings"],
        annotations=table(Annotations, head["annotations"]),
        torch_at_least=head["torch_at_least"],
        torch_version=head["torch_version"],
        keys=tuple(head["keys"]),
        identity=Identity(*head["identity"]),
        warnings=[SnapshotWarning(code, message) for code, message in head["warnings"]],
    )


def _arrays(layout: list[list[Any]], payload: memoryview) -> Iterator[Array]:
    position = 0
    for name, count in layout:
        dtype = np.dtype(_checked(name))
        yield np.frombuffer(payload, dtype, int(count), position)
        position += dtype.itemsize * int(count)


def _checked(name: str) -> str:
    if name not in _TYPES:
        raise ValueError(f"unexpected array type {name!r}")
    return name
