"""`import flash_attn` where the package is not installed: modules made of this package's functions.

Libraries ask for the version among the installed distributions, so one of that name is announced as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VERSION = "2.8.3"
"""The release whose functions the stand-in has."""
_ATTENTION = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
)
_MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "flash_attn": ("functions", _ATTENTION),
    "flash_attn.flash_attn_interface": ("functions", _ATTENTION),
    "flash_attn.bert_padding": (
        "padding",
        ("index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"),
    ),
    "flash_attn.layers": ("functions", ()),
    "flash_attn.layers.rotary": ("functions", ("apply_rotary_emb",)),
}
"""Module -> our module with its contents, and their names."""


def offer() -> None:
    """Let `import flash_attn` find the stand-in, after everything that is installed."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


class Finder(metadata.DistributionFinder):
    """Finds and loads the modules of the stand-in, and its distribution."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A spec for the modules above; None for everything else."""
        if name not in _MODULES:
            return None
        return ModuleSpec(name, self, origin="oomscope-flash-attn", is_package=_is_package(name))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """The import system makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the functions in."""
        from importlib import import_module

        source, names = _MODULES[module.__name__]
        ours = import_module(f".{source}", __package__)
        for name in names:
            setattr(module, name, getattr(ours, name))
        module.__dict__["__version__"] = VERSION

    def find_distributions(self, context: Any = None) -> Iterable[metadata.Distribution]:
        """The distribution "flash-attn", unless the caller looks for another one or in other places."""
        asked = (getattr(context, "name", None) or "").replace("_", "-").lower()
        return [Distribution()] if asked == "flash-attn" else []


def _is_package(name: str) -> bool:
    return any(each.startswith(f"{name}.") for each in _MODULES)


class Distribution(metadata.Distribution):
    """Name and version of the stand-in."""

    def read_text(self, filename: str) -> str | None:
        """The METADATA file; there is no other."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {VERSION}\nSummary: stand-in of oomscope\n"

    def locate_file(self, path: Any) -> Any:
        """There are no files."""
        raise FileNotFoundError(path)
