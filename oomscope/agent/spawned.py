"""Exceptions in the ranks of torch.multiprocessing.spawn, which catches them itself before any hook could see them."""

from __future__ import annotations

import functools
from typing import Any

from .exceptions import ExceptionProbe
from .guard import guarded
from .patching import AfterImport, Patches


def hear_spawned_ranks(patches: Patches, after_import: AfterImport, exceptions: ExceptionProbe) -> None:
    """Wrap the function that runs in each spawned rank, once its module is imported."""

    @guarded("spawn")
    def patch(module: Any) -> None:
        inner = getattr(module, "_wrap", None)
        if inner is None:
            return

        @functools.wraps(inner)
        def wrap(function: Any, *args: Any, **kwargs: Any) -> Any:
            return inner(_Heard(function, exceptions), *args, **kwargs)

        patches.attribute(module, "_wrap", wrap)

    after_import.when("torch.multiprocessing.spawn", patch)


class _Heard:
    """A function of a spawned rank whose exception is recorded on its way out."""

    def __init__(self, function: Any, exceptions: ExceptionProbe) -> None:
        self._function = function
        self._exceptions = exceptions

    def __call__(self, *args: Any) -> Any:
        try:
            return self._function(*args)
        except Exception as error:
            self._exceptions.saw(type(error), error, error.__traceback__, main=True)
            raise
