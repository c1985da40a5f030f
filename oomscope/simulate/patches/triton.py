"""Triton kernels: nothing is launched, as nothing is computed; what they work on was allocated by the script.

A CUDA machine has Triton beside torch, a CPU machine often has not. Where it is missing, `import triton` finds a
stand-in whose kernels can be declared and launched; where it is there, only the launch is replaced.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable

import torch
import torch.utils._triton
from torch._subclasses.fake_tensor import FakeTensor

from ...agent.patching import AfterImport

_NAME = "triton"
_VERSION = "3.4.0"
_modules = AfterImport()


def install(mode: Any) -> None:
    """Replace the launch of kernels, and offer the stand-in after everything that is installed."""

    def launch(*arguments: Any, **named: Any) -> None:
        """What a kernel writes is not known; it may write to any tensor that it gets."""
        mode.values.assume("triton kernel")
        for each in (*arguments, *named.values()):
            if isinstance(each, FakeTensor):
                mode.values.forget(each)

    _modules.when("triton.runtime.jit", lambda module: _replace_launch(module.JITFunction, launch))
    _modules.when("triton.runtime.autotuner", lambda module: _replace_launch(module.Autotuner, launch))
    if importlib.util.find_spec(_NAME) is None:
        # torch's own compiler must not take the stand-in for the real one.
        torch.utils._triton.has_triton_package = lambda: False
        sys.meta_path.append(Finder(launch))


def _replace_launch(kind: Any, launch: Callable[..., None]) -> None:
    if issubclass(kind, Anything):
        return
    plain = kind.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, FakeTensor) for each in (*args, *kwargs.values())):
            return launch(*args, **kwargs)
        return plain(self, *args, **kwargs)

    kind.run = run


class Finder:
    """Finds `triton` and everything below it where nobody else has."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _NAME and not (
            name.startswith(_NAME + ".") and isinstance(sys.modules.get(_NAME), StandIn)
        ):
            return None
        return ModuleSpec(name, self, origin="simulated", is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Only what scripts use outside of kernels has a meaning."""
        if module.__name__ == _NAME:
            launch = self._launch

            def declare(function: Any = None, **_options: Any) -> Any:
                return (lambda each: Kernel(each, launch)) if function is None else Kernel(function, launch)

            vars(module).update(
                __version__=_VERSION,
                jit=declare,
                autotune=_unchanged,
                heuristics=_unchanged,
                cdiv=lambda x, y: -(-x // y),
                next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length(),
                Config=Anything,
            )


def _unchanged(*_args: Any, **_kwargs: Any) -> Callable[[Any], Any]:
    """A decorator that leaves the kernel as it is."""
    return lambda kernel: kernel


class Kernel:
    """A declared kernel: `kernel[grid](…)` launches it."""

    def __init__(self, function: Any, launch: Callable[..., None]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = getattr(function, "__doc__", None)
        self._launch = launch

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return self._launch

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._launch(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> None:
        self._launch(*args, **kwargs)


class StandIn(ModuleType):
    """A module that has every name; those with a capital are classes, which code may ask about with `isinstance`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Anything,), {}) if name[:1].isupper() else Anything()
        setattr(self, name, made)
        return made


class Anything:
    """Stands for types, functions and settings that only kernels use."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else Anything()

    def __getitem__(self, _index: Any) -> Any:
        return Anything()

    def __or__(self, _other: Any) -> Any:
        return Anything()

    __ror__ = __or__
