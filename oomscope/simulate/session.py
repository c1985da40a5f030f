"""One simulated process from its start to its last record."""

from __future__ import annotations

import atexit
import os
import platform
import sys
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any, Callable

import torch

from ..errors import SetupError
from ..protocol import layout
from ..protocol.env import SIMULATED_RANK, simulated_rank
from . import compiler, extensions, guard
from .cards import Card, resolve
from .composition import compose, unknown_bytes
from .device import Device
from .ending import end_before_static_destructors, let_device_threads_finish
from .frames import StackTable
from .mode import SimulatedMode
from .tracker import Tracker

#: Versions of torch that the checks of this package were run with.
SUPPORTED = ((2, 13), (2, 14))
_session: Session | None = None


def refusal() -> str | None:
    """Why this torch or platform cannot be simulated, in one sentence; None when it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return (
            f"the simulated device needs Linux on x86-64; this is {platform.system()} on {platform.machine()}"
        )
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version not in SUPPORTED:
        known = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        return f"the simulated device is tested with torch {known}; this is torch {torch.__version__}"
    return None


class Session:
    """The simulated device of this process."""

    def __init__(self, card: Card, world_size: int, rank: int, count: int, emit: Callable[..., None]) -> None:
        self.card = card
        self.world_size = world_size
        self.rank = rank
        self.emit = emit
        self.stacks = StackTable()
        self.device = Device(card, count, card.capacity_bytes(world_size), self.stacks)
        self.tracker = Tracker(self.device, self.stacks)
        self.mode = SimulatedMode(self.device, self.tracker)
        self.exchange: str | None = None
        """Folder that all simulated ranks of the job share."""
        self.ranks: list[int] | None = None
        """The simulated ranks; None where nobody has chosen."""
        self.starter: Callable[[], None] | None = None
        """Starts the device in a process that the script starts; None where the agent does."""
        self.world: Any = None
        self.plugins: list[str] = []
        self._ended = False

    def resize(self, world_size: int, rank: int) -> None:
        """The script itself starts its ranks: they are as many as it says."""
        before, self.world_size, self.rank = self.world_size, world_size, rank
        self.device.grow(world_size)
        if self.world is not None:
            self.world.size, self.world.rank = world_size, rank
        if before == 1 and world_size > 1:
            self.device.capacity_bytes = max(0, self.device.capacity_bytes - self.card.nccl_bytes)
        for allocator in self.device.allocators.values():
            allocator.driver.capacity = self.device.capacity_bytes

    def forked(self) -> None:
        """In a forked child: what the parent put on its cards cannot be used, as on a real card."""
        self._ended = SIMULATED_RANK not in os.environ
        if not self._ended:
            Finalize(None, self.end, exitpriority=-900)  # multiprocessing leaves without atexit handlers
        if self.tracker.peaks:
            setattr(self.device, "malloc", _bad_fork)  # noqa: B010  # a method

    def enter(self) -> None:
        """Patch torch and switch the mode on for this thread."""
        from . import cuda, patches

        self.tracker.follow_resizes()
        cuda.install(self.mode)
        patches.install(self.mode)
        if torch.distributed.is_available():
            from . import distributed

            self.world = distributed.World(self.world_size, self.rank)
            distributed.install(self.mode, self.world, self.exchange, self.ranks)
        self.mode.__enter__()

    def peak(self) -> dict[str, Any]:
        """The record "peak": the highest point of the card that this process used most."""
        peaks = self.tracker.peaks
        index = max(peaks, key=lambda each: peaks[each].bytes, default=0)
        composition, modules = compose(self.tracker, index)
        below, above = unknown_bytes(self.tracker, index)
        reserved = peaks[index].reserved if index in peaks else 0
        step, phase = (None, None) if index not in peaks else peaks[index].where
        return {
            "k": "peak",
            "device": index,
            "peak_allocated_bytes": peaks[index].bytes if index in peaks else 0,
            "peak_reserved_bytes": reserved,
            "peak_reserved_low_bytes": reserved - below,
            "peak_reserved_high_bytes": reserved + above + self.mode.convolution_bound,
            "capacity_bytes": self.device.capacity_bytes,
            "step": step,
            "phase": phase or (peaks[index].phase if index in peaks else None),
            "composition": composition,
            "modules": modules,
        }

    def summary(self) -> dict[str, Any]:
        """The record "simulated": what was assumed and what could not be done."""
        card = self.card
        return {
            "k": "simulated",
            "assumed_values": dict(sorted(self.mode.values.assumed.items())),
            "unsupported": sorted(self.mode.unsupported),
            "card": {
                "name": card.name, "product": card.product, "usable_bytes": card.usable_bytes,
                "capacity_bytes": self.device.capacity_bytes, "context_bytes": card.context_bytes,
                "nccl_bytes": card.nccl_bytes if self.world_size > 1 else 0,
                "compute_capability": list(card.compute_capability), "source": card.source,
            },
            "ops": self.mode.operations,
            "compile_ignored": self.mode.compiled,
            "convolution_workspace_bound_bytes": self.mode.convolution_bound,
            "plugins": self.plugins,
            "world_size": self.world_size,
            "rank": self.rank,
        }  # fmt: skip

    def end(self) -> None:
        """Emit the last records; once."""
        if not self._ended:
            self._ended = True
            self.emit(self.peak())
            self.emit(self.summary())
            self.tracker.closing = True


def _bad_fork(*_args: Any) -> Any:
    raise RuntimeError(
        "Cannot re-initialize CUDA in forked subprocess. "
        "To use CUDA with multiprocessing, you must use the 'spawn' start method"
    )


def start(config: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> Session:
    """See `oomscope.simulate.start`."""
    global _session
    if _session is not None:
        return _session
    reason = refusal()
    if reason is not None:
        raise SetupError(reason, hint="pip install 'torch==2.13.*', or run on a real GPU")
    card = _card(config.get("device"))
    given = simulated_rank(os.environ)
    rank, world_size = _rank_of_launcher(config)
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or min(world_size, 8))
    local = max(local, card.count, given[1] if given else 1)
    compiler.keep_out()
    guard.hide_real_devices()
    guard.install(local)
    session = Session(card, world_size, rank, local, emit)
    if isinstance(config.get("device"), dict) and config["device"].get("capacity_bytes"):
        session.device.capacity_bytes = int(config["device"]["capacity_bytes"])
    if given is not None:
        session.resize(given[1], given[0])
    if config.get("attempt_dir"):
        session.exchange = os.path.join(config["attempt_dir"], layout.EXCHANGE_DIR)
    if config.get("ranks"):
        session.ranks = [int(each) for each in config["ranks"]]
    session.starter = config.get("starter")
    session.plugins = extensions.load(emit)
    session.enter()
    if config.get("role") == "prediction":
        session.device.request_folder = config.get("attempt_dir")
    session.tracker.where = config.get("where")
    atexit.register(let_device_threads_finish)
    atexit.register(session.end)
    os.register_at_fork(after_in_child=session.forked)
    end_before_static_destructors()
    _session = session
    return session


def _rank_of_launcher(config: dict[str, Any]) -> tuple[int, int]:
    """(rank, world size) as the configuration or torchrun's variables have it."""
    world_size = int(config.get("world_size") or os.environ.get("WORLD_SIZE") or 1)
    return int(config.get("rank") or os.environ.get("RANK") or 0), world_size


def current() -> Session | None:
    """The session of this process, None when nothing is simulated."""
    return _session


def _card(device: Any) -> Card:
    """The card of a configuration: a name, or an object whose values override those of the table."""
    if isinstance(device, str):
        return resolve(device)
    card = resolve(str(device["spec"]))
    overrides: dict[str, Any] = {}
    for key, field in (
        ("total_bytes", "usable_bytes"),
        ("context_bytes", "context_bytes"),
        ("nccl_bytes", "nccl_bytes"),
    ):
        if device.get(key) is not None:
            overrides[field] = int(device[key])
    if device.get("compute_capability"):
        overrides["compute_capability"] = tuple(int(part) for part in device["compute_capability"])
    return replace(card, **overrides)
