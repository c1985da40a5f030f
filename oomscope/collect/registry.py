"""The collectors of this installation: our own and those of plugins, all built the same way."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from oomscope import plugins
from oomscope.collect.base import API, Collector
from oomscope.errors import PluginError, UsageError

GROUP = "oomscope.collectors"

#: name -> module:attribute. Imported on use: the NVIDIA one loads a driver library.
BUILT_IN = {
    "nvidia": "oomscope.collect.nvml:NvmlCollector",
    "host": "oomscope.collect.host:HostCollector",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One collector that could be started; `error` when its plugin is broken."""

    name: str
    target: str
    error: str | None = None


def entries() -> list[Entry]:
    """All collectors by name, the built-in ones first."""
    found = [Entry(name, target) for name, target in BUILT_IN.items()]
    others = (loaded for loaded in plugins.load(GROUP) if loaded.name not in BUILT_IN)
    return found + [Entry(loaded.name, loaded.target, loaded.error) for loaded in others]


def build(name: str) -> Collector:
    """A new collector.

    Raises:
        UsageError: there is none of that name.
        PluginError: it cannot be imported, or speaks another version of the interface.
    """
    for entry in entries():
        if entry.name == name:
            return _build(entry)
    raise UsageError(f"no collector {name!r}", hint=f"known: {', '.join(entry.name for entry in entries())}")


def _build(entry: Entry) -> Collector:
    if entry.error is not None:
        raise PluginError(f"collector {entry.name!r} ({entry.target}) cannot be loaded: {entry.error}")
    module, _, attribute = entry.target.partition(":")
    factory: Callable[[], Collector] = getattr(importlib.import_module(module), attribute)
    collector = factory()
    if getattr(collector, "api", None) != API:
        raise PluginError(
            f"collector {entry.name!r} ({entry.target}) is for version {getattr(collector, 'api', None)} of "
            "the collector "
            f"interface, this oomscope has version {API}"
        )
    return collector
