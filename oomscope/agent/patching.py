"""Reversible patches of attributes, and callbacks after a module was imported."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

_MISSING = object()


class Patches:
    """A list of undo actions, last in first out; `undo` leaves alone what somebody patched over us."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attribute(self, owner: Any, name: str, new: Any) -> None:
        """Set `owner.name`; for a class or module only what it defines itself counts as the old value."""
        old = vars(owner).get(name, _MISSING)
        setattr(owner, name, new)

        def undo() -> None:
            if vars(owner).get(name, _MISSING) is not new:
                return
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

        self._undo.append(undo)

    def handle(self, handle: Any) -> None:
        """Remember a hook handle that has `remove()`."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


class _Loader:
    def __init__(self, inner: Any, after: Callable[[Any], None]) -> None:
        self._inner = inner
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: Any) -> Any:
        return self._inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._after(module)


class AfterImport:
    """Calls back once a module has been executed; at once when it already is. Callbacks must be guarded."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[Any], None]]] = {}
        self._busy: set[str] = set()

    def when(self, name: str, callback: Callable[[Any], None]) -> None:
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            callback(module)
            return
        self._waiting.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._waiting or name in self._busy:
            return None
        self._busy.add(name)
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find is not None and finder is not self else None
                if spec is None:
                    continue
                callbacks = self._waiting.pop(name)
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, functools.partial(_call_all, callbacks))
                return spec
        finally:
            self._busy.discard(name)
        return None


def _call_all(callbacks: list[Callable[[Any], None]], module: Any) -> None:
    for callback in callbacks:
        callback(module)
