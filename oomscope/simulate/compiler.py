"""Keeps torch's compiler out of simulated processes: importing it takes a second, and nothing is compiled.

`FakeTensorMode` reads two settings of `torch._dynamo.config`, and many functions of torch are wrapped so
that their first call imports the compiler only to exempt them from it. Here `torch._dynamo` is a package
that is loaded when somebody really asks for more of it than its settings, and the wrapped functions are
told that they are exempt.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import types
from typing import Any, cast

import torch

_NAME = "torch._dynamo"
_LIGHT = (
    "config",
    "__path__",
    "__name__",
    "__spec__",
    "__loader__",
    "__file__",
    "__doc__",
    "__dict__",
    "__class__",
)


class _Package(types.ModuleType):
    """`torch._dynamo` until it is needed; a few functions do what they do where nothing is compiled."""

    @staticmethod
    def graph_break(msg: str = "") -> None:
        return None

    @staticmethod
    def is_compiling() -> bool:
        return False

    @staticmethod
    def disable(fn: Any = None, recursive: bool = True, **_kwargs: Any) -> Any:
        return fn if fn is not None else (lambda function: function)

    def __getattr__(self, name: str) -> Any:
        if name in _LIGHT or name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(), name)


class _Finder:
    """Loads the whole package before any of its modules is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith(_NAME + ".") or name == _NAME + ".config":
            return None
        if not isinstance(sys.modules.get(_NAME), _Package):
            return None
        _load()
        loaded = sys.modules.get(name)
        if loaded is None:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, cast(Any, _Loaded(loaded)), is_package=hasattr(loaded, "__path__"))


class _Loaded:
    """A loader for a module that is there already."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def create_module(self, _spec: Any) -> Any:
        return self._module

    def exec_module(self, _module: Any) -> None:
        return None


def keep_out() -> None:
    """Put the light package in place, unless the compiler is loaded already."""
    if _NAME in sys.modules:
        return
    _exempt_wrapped_functions()
    package: Any = _Package(_NAME)
    package.__path__ = [os.path.join(os.path.dirname(torch.__file__), "_dynamo")]
    sys.modules[_NAME] = package
    package.config = importlib.import_module(_NAME + ".config")
    sys.meta_path.insert(0, _Finder)
    torch._dynamo = package


def _load() -> Any:
    """Replace the light package by the real one."""
    if isinstance(sys.modules.get(_NAME), _Package):
        del sys.modules[_NAME]
        if isinstance(vars(torch).get("_dynamo"), _Package):
            del torch._dynamo
    real = importlib.import_module(_NAME)
    torch._dynamo = real
    return real


def _exempt_wrapped_functions() -> None:
    """Functions wrapped by `torch._disable_dynamo` go straight to what they wrap."""

    def nothing() -> None:
        return None

    wrapper = torch._compile._disable_dynamo(nothing).__code__
    for function in gc.get_objects():
        if type(function) is types.FunctionType and function.__code__ is wrapper:
            closure: Any = function.__closure__
            inner = closure[wrapper.co_freevars.index("fn")].cell_contents
            inner.__dynamo_disable = inner

    def leave_alone(fn: Any = None, recursive: bool = True) -> Any:
        return fn if fn is not None else (lambda function: function)

    torch._compile._disable_dynamo = torch._disable_dynamo = leave_alone
