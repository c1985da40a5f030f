"""Keeps torch.compile out of the agent's hooks: they run as they are, and cost no compilation and no warning.

The wrapper of module calls is the exception: it stands inside compiled graphs, steps aside there by itself, and
must be traced for that.
"""

from __future__ import annotations

from typing import Any

from .guard import guarded
from .patching import AfterImport

_SKIPPED = ("guard", "loss", "probes", "readings", "recorder", "saving", "writer")


def keep_out(after_import: AfterImport) -> None:
    """Tell Dynamo, once it is imported, to skip the files of the hooks."""

    @guarded("dynamo")
    def skip(trace_rules: Any) -> None:
        package = __name__.rpartition(".")[0]
        for name in _SKIPPED:
            trace_rules.add(f"{package}.{name}")

    after_import.when("torch._dynamo.trace_rules", skip)
