"""`torch._C._cuda_*` in Python, so that torch.cuda's own Python layer works unmodified."""

from __future__ import annotations

from typing import Any

from . import accelerator, graphs, memory, properties, streams


def install(mode: Any) -> None:
    """Put everything in place; `mode` is the `SimulatedMode` of the process."""
    properties.install(mode)
    memory.install(mode)
    streams.install(mode)
    graphs.install(mode)
    accelerator.install(mode)
