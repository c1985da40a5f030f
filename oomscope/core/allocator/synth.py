"""Snapshots without a GPU: any stream of requests, run through the model, in torch's own schema.

What the model does is what a GPU would have done, so these files have everything that recorded ones have
(exact addresses, rows in order, a state that agrees with the history) and serve as tests, samples and
demonstrations.

The shape follows the release: which keys exist since when is in docs/snapshots.md.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from .model import DEFAULT_POOL, AllocatorConfig, CachingAllocator, TraceRow, VirtualDriver

Frame = dict[str, Any]
Version = tuple[int, int]

#: First and last release whose shape is known.
OLDEST: Version = (2, 0)
NEWEST: Version = (2, 13)

_START_US = 1_700_000_000_000_000
_STEP_US = 10


def frame(filename: str, line: int, name: str) -> Frame:
    """One line of a call stack in torch's form; stacks are lists of these, innermost first."""
    return {"filename": filename, "line": line, "name": name}


#: What torch.cuda.empty_cache() looks like in a history.
EMPTY_CACHE_STACK: list[Frame] = [frame("torch/cuda/memory.py", 224, "empty_cache")]


class SyntheticDevice:
    """One device of a synthetic process: the model, and a history of bounded length."""

    def __init__(self, process: SyntheticProcess, ordinal: int, driver: VirtualDriver) -> None:
        self.process = process
        self.rows: deque[TraceRow] = deque(maxlen=process.max_entries)
        self.metadata: deque[str] = deque(maxlen=process.max_entries)
        self.user_metadata = ""
        """Kept with each row from now on (torch.cuda.memory._set_memory_metadata())."""
        self.allocator = CachingAllocator(
            process.config, driver, device=ordinal, tracer=self._record, clock=process.now_us
        )

    def _record(self, row: TraceRow) -> None:
        self.rows.append(row)
        self.metadata.append(self.user_metadata)

    def malloc(
        self, size: int, stack: Sequence[Frame] = (), *, stream: int = 0, pool: tuple[int, int] = DEFAULT_POOL
    ) -> int:
        """Address of a new block; the rows of this request carry `stack`.

        Raises:
            AllocatorOutOfMemory: the history then ends with the `oom` row.
        """
        return self.allocator.malloc(size, stream, list(stack), pool)

    def free(self, address: int, stack: Sequence[Frame] | None = None) -> None:
        """Free a block; without `stack` the rows carry the allocation's, as with context="alloc"."""
        self.allocator.free(address, None if stack is None else list(stack))

    def record_stream(self, address: int, stream: int) -> None:
        self.allocator.record_stream(address, stream)

    def process_events(self, stack: Sequence[Frame] = ()) -> int:
        """Complete pending frees; torch does this inside an allocation, whose stack the rows carry."""
        return self.allocator.process_events(list(stack) or None)

    def empty_cache(self) -> None:
        self.allocator.empty_cache(EMPTY_CACHE_STACK)


class SyntheticProcess:
    """A process with one or more devices, as one snapshot file describes it.

    Args:
        config: allocator settings, or their PYTORCH_CUDA_ALLOC_CONF text.
        capacity: bytes that each device can hand out; None for no limit.
        devices: number of devices.
        torch_version: whose shape the snapshot has.
        max_entries: length of the ring of each device's history; None for no limit.
        total_bytes: total memory of a device, from which the address range of expandable segments follows.
        addresses: address model of the driver.
    """

    def __init__(
        self,
        config: AllocatorConfig | str = "",
        *,
        capacity: int | None = None,
        devices: int = 1,
        torch_version: Version = NEWEST,
        max_entries: int | None = None,
        total_bytes: int | None = None,
        addresses: str = "holes",
    ) -> None:
        if not OLDEST <= torch_version <= NEWEST:
            raise ValueError(f"torch {torch_version}: known shapes are {OLDEST} to {NEWEST}")
        self.config = AllocatorConfig.parse(config) if isinstance(config, str) else config
        self.torch_version = torch_version
        self.max_entries = max_entries
        self.annotations: list[dict[str, Any]] = []
        self._time_us = _START_US
        self.devices = [
            SyntheticDevice(
                self, ordinal, VirtualDriver(capacity, total_bytes=total_bytes, addresses=addresses)
            )
            for ordinal in range(devices)
        ]

    @property
    def device(self) -> SyntheticDevice:
        """The first device."""
        return self.devices[0]

    def now_us(self) -> int:
        """The process's clock: ten microseconds a row."""
        self._time_us += _STEP_US
        return self._time_us

    def annotate(self, name: str, start: bool, device: int = 0) -> None:
        """Begin or end a record_function range."""
        self.annotations.append(
            {
                "stage": "START" if start else "END",
                "name": name,
                "device": device,
                "time_us": self.now_us(),
            }
        )

    def snapshot(self, *, settings: bool = True) -> dict[str, Any]:
        """What torch.cuda.memory._snapshot() of this release would return.

        Args:
            settings: False leaves out `allocator_settings`, as older files do.
        """
        version = self.torch_version
        snapshot: dict[str, Any] = {
            "segments": [
                _segment(segment, version)
                for device in self.devices
                for segment in device.allocator.segments()
            ],
            "device_traces": [
                [_event(row, note, version) for row, note in zip(device.rows, device.metadata, strict=True)]
                for device in self.devices
            ],
        }
        if version >= (2, 3) and settings:
            snapshot["allocator_settings"] = _settings(self.config, version)
        if version >= (2, 5):
            snapshot["external_annotations"] = list(self.annotations)
        return snapshot


def to_bytes(snapshot: dict[str, Any]) -> bytes:
    """`snapshot` as torch writes it: pickle protocol 4, which torch's own viewer reads too."""
    return pickle.dumps(snapshot, protocol=4)


def stripped(snapshot: dict[str, Any], keys: Iterable[str] = ("allocator_settings",)) -> dict[str, Any]:
    """A copy without some top-level keys."""
    gone = set(keys)
    return {key: value for key, value in snapshot.items() if key not in gone}


def _segment(segment: dict[str, Any], version: Version) -> dict[str, Any]:
    if version >= (2, 1):
        return segment
    kept = {
        key: value
        for key, value in segment.items()
        if key not in ("segment_pool_id", "is_expandable", "frames", "blocks")
    }
    kept["blocks"] = [_old_block(block) for block in segment["blocks"]]
    return kept


def _old_block(block: dict[str, Any]) -> dict[str, Any]:
    """2.0 had a `history` in place of the address and the frames."""
    old = {key: block[key] for key in ("size", "requested_size", "state")}
    if block["state"] != "inactive":
        old["history"] = [
            {"addr": block["address"], "real_size": block["requested_size"], "frames": block["frames"]}
        ]
    return old


def _event(row: TraceRow, note: str, version: Version) -> dict[str, Any]:
    event: dict[str, Any] = {"action": row.action}
    if row.action == "oom":
        event["device_free"] = row.device_free
    else:
        event["addr"] = row.addr
    event["size"] = row.size
    event["stream"] = row.stream
    if version >= (2, 2):
        event["time_us"] = row.time_us
    if version >= (2, 8):
        event["compile_context"] = "N/A"
    if version >= (2, 10):
        event["user_metadata"] = note
    if version >= (2, 13):
        event["pool_id"] = row.pool
    if row.context is not None:
        event["frames"] = row.context
    return event


def _settings(config: AllocatorConfig, version: Version) -> dict[str, Any]:
    settings = config.to_settings()
    if version >= (2, 9):
        settings["graph_capture_record_stream_reuse"] = config.graph_capture_record_stream_reuse
    return settings
