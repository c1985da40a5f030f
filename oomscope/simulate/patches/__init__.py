"""Changes to torch's Python layer other than torch.cuda: what looks at tensor types, devices or data."""

from __future__ import annotations

from typing import Any

from . import (
    compiling,
    data,
    distributions,
    engine,
    files,
    loading,
    losses,
    modules,
    nested,
    profiling,
    text,
    triton,
)


def install(mode: Any) -> None:
    """Put all in place; only once in a process."""
    modules.install(mode)
    data.install(mode)
    distributions.install(mode)
    engine.install(mode)
    text.install(mode)
    files.install(mode)
    loading.install(mode)
    losses.install(mode)
    compiling.install(mode)
    nested.install(mode)
    profiling.install(mode)
    triton.install(mode)
