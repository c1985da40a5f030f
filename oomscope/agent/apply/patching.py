"""Reversible changes to other people's objects, and callbacks for modules that are imported later.

Every run-time fix changes attributes of torch or of the user's model. All of that goes through `Patches`, so
that it can be taken back in one call, and so that a later patch by somebody else is never overwritten by our
undo.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Sequence
from typing import Any, Callable

_MISSING = object()


class Patches:
    """A last-in-first-out list of undo actions.

    `kept` names what could not be restored because somebody else had replaced it in the meantime.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.kept: list[str] = []

    def attr(self, owner: Any, name: str, new: Any) -> Any:
        """Set `owner.name` and return what stood in the owner's own `__dict__` before (None: nothing)."""
        old = vars(owner).get(name, _MISSING)
        setattr(owner, name, new)
        self._undo.append(lambda: self._restore(owner, name, old, new))
        return None if old is _MISSING else old

    def handle(self, handle: Any) -> Any:
        """Remember a torch hook handle; undo removes it."""
        self._undo.append(handle.remove)
        return handle

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on undo."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore everything, newest first."""
        while self._undo:
            self._undo.pop()()

    def _restore(self, owner: Any, name: str, old: Any, new: Any) -> None:
        if vars(owner).get(name, _MISSING) is not new:
            self.kept.append(name)
        elif old is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


class PostImport(importlib.abc.MetaPathFinder):
    """Runs `callback(module)` right after a module has been executed, now or when the script imports it."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[[Any], None]]] = {}
        self._busy = threading.local()

    def when(self, name: str, callback: Callable[[Any], None]) -> None:
        """Call `callback` with module `name`: at once if it is loaded already."""
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if module is not None and not getattr(spec, "_initializing", False):
            callback(module)
            return
        self._callbacks.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Forget every callback that has not run."""
        self._callbacks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._callbacks or getattr(self._busy, "name", None) == fullname:
            return None
        self._busy.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.name = None
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, self._callbacks.pop(fullname))
        return spec


class _Loader(importlib.abc.Loader):
    """The module's own loader, followed by the callbacks."""

    def __init__(self, inner: Any, callbacks: list[Callable[[Any], None]]) -> None:
        self._inner = inner
        self._after = callbacks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._inner.exec_module(module)
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        for callback in self._after:
            callback(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
