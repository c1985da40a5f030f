"""Plugins of the simulated device: fake kernels and workspaces of other people's CUDA extensions.

A distribution in the job's own environment declares an entry point of the group `oomscope.simulate` that names a
function. It is called before the device starts with the module `ops.registry`, and registers fake kernels with
`torch.library.register_fake`, and memory that a kernel takes for itself with `registry.workspace`.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any, Callable

from .ops import registry

GROUP = "oomscope.simulate"


def load(emit: Callable[[dict[str, Any]], None]) -> list[str]:
    """Call every plugin; one that fails is reported and takes nothing else down. Returns the names that worked."""
    loaded = []
    for point in _points():
        try:
            register = point.load()
            register(registry)
            loaded.append(point.name)
        except Exception as problem:  # noqa: BLE001  # the plugin boundary: their fault must stay theirs
            error = f"{type(problem).__name__}: {problem}"
            emit({"k": "agent_error", "probe": f"simulate plugin {point.name}", "error": error})
    return loaded


def _points() -> list[Any]:
    found: Any = metadata.entry_points()
    chosen = found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ())
    return sorted(chosen, key=lambda point: str(point.name))
