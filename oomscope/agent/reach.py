"""What the script can reach by name: containers and tensors, from its frames, its modules and its objects.

Nothing of the script's own code runs: only exact built-in containers are opened, attributes come from an object's
`__dict__`, and nothing is kept alive past a scan. The walk is bounded in depth and in the objects it looks at.
"""

from __future__ import annotations

import collections
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_OBJECTS = 20_000
"""Objects looked at in one walk (about 20 ms)."""
MAX_DEPTH = 6
_WIDE = 64
"""Of a longer container only the first and last so many items are looked into."""
_CO_OPTIMIZED = 1
"""Flag of a code object whose locals are fast: its `f_locals` is a copy (inspect.CO_OPTIMIZED)."""
_FRAME_AND_US = 3
"""References to a frame's dictionary of locals: of the frame, of our variable, of the question itself."""
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
_LEAVES = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType,
    types.CodeType, range, slice,
)  # fmt: skip


class Place(NamedTuple):
    """Where something hangs."""

    path: str
    """As the script would write it: `losses`, `self.history`, `model.blocks[3].cache`."""
    scope: str
    """"local of train", "global of train.py"."""
    file: str
    line: int
    """Of the frame, or 0."""


class Item(NamedTuple):
    """One thing that was reached."""

    place: Place
    value: Any


def user_frames(frame: Any, is_own: Any) -> Iterator[Any]:
    """The frames of the script from `frame` outwards; installed code and our own are left out."""
    while frame is not None:
        if not is_own(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def locals_of(frame: Any) -> dict[str, Any]:
    """The local variables of a running frame, by name.

    Until Python 3.12 `f_locals` of a function is a copy that the frame then keeps, and with it every value: it is
    emptied again, or our look would prolong the life of the script's tensors. Unless the script itself called
    `locals()`: it was given that same dictionary. From 3.13 on it is a view.
    """
    found = frame.f_locals
    values = dict(found)
    copied = sys.version_info < (3, 13) and frame.f_code.co_flags & _CO_OPTIMIZED
    ours = sys.getrefcount(found) <= _FRAME_AND_US
    if copied and ours and sys.gettrace() is None and found is not frame.f_globals:
        found.clear()
    return values


class Walk:
    """One walk. Iterate over it; every container, and every tensor, comes once, by its shortest path."""

    def __init__(self, torch: Any, frames: Any, is_own: Any) -> None:
        """`frames` are those of the script; `is_own(file)` tells files that are not the script's."""
        self._tensor = torch.Tensor
        self._is_own = is_own
        self._seen: set[int] = set()
        self._queue: collections.deque[tuple[Any, Place, int]] = collections.deque()
        self._left = MAX_OBJECTS
        self._alive: list[Any] = []
        modules: dict[int, tuple[str, dict[str, Any]]] = {}
        for frame in frames:
            code = frame.f_code
            file, name = code.co_filename, code.co_name
            modules.setdefault(id(frame.f_globals), (file, frame.f_globals))
            if name != "<module>":
                self._start(locals_of(frame), f"local of {name}", file, frame.f_lineno)
        for file, names in modules.values():
            self._start(names, f"global of {file.replace(chr(92), '/').rsplit('/', 1)[-1]}", file, 0)

    def _start(self, names: dict[str, Any], scope: str, file: str, line: int) -> None:
        for name, value in list(names.items()):
            if not name.startswith("__"):
                self._add(value, Place(name, scope, file, line), 0)

    def _add(self, value: Any, place: Place, depth: int) -> None:
        # Of a type, never of an object: `isinstance` may ask the object's own `__class__`, which is the script's code.
        if depth <= MAX_DEPTH and not issubclass(type(value), _LEAVES) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._alive.append(value)  # until the walk ends: an identity must not be given to another object
            self._queue.append((value, place, depth))

    def __iter__(self) -> Iterator[Item]:
        while self._queue and self._left > 0:
            value, place, depth = self._queue.popleft()
            self._left -= 1
            kind = type(value)
            is_tensor = issubclass(kind, self._tensor)
            if is_tensor or kind in _SEQUENCES or kind in _MAPPINGS:
                yield Item(place, value)
            if is_tensor:
                continue
            self._open(value, kind, place, depth)

    def _open(self, value: Any, kind: type, place: Place, depth: int) -> None:
        path = place.path
        if kind in _MAPPINGS:
            for key, item in _ends(value.items()):
                shown = repr(key)[:40] if type(key) in (str, int) else "…"
                self._add(item, place._replace(path=f"{path}[{shown}]"), depth + 1)
        elif kind in _SEQUENCES:
            for number, item in _numbered_ends(value):
                self._add(item, place._replace(path=f"{path}[{number}]"), depth + 1)
        elif kind is types.FunctionType:
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
                try:
                    self._add(cell.cell_contents, place._replace(path=f"{path}: {name}"), depth + 1)
                except ValueError:  # an empty cell
                    continue
        elif kind is types.MethodType:
            self._add(value.__self__, place._replace(path=f"{path}.__self__"), depth)
        else:
            self._open_object(value, place, depth)

    def _open_object(self, value: Any, place: Place, depth: int) -> None:
        try:
            names = object.__getattribute__(value, "__dict__")
        except (AttributeError, TypeError):
            return
        if type(names) is not dict:
            return
        for name, item in list(names.items()):
            inner = name in ("_modules", "_parameters", "_buffers") and type(item) in _MAPPINGS
            if inner:  # a module's children are its attributes
                for child, each in list(item.items()):
                    self._add(each, place._replace(path=f"{place.path}.{child}"), depth + 1)
            elif type(name) is str:
                self._add(item, place._replace(path=f"{place.path}.{name}"), depth + 1)


def _ends(items: Any) -> list[Any]:
    """The first and the last of `items`, without a look at what lies between: a data set may have millions."""
    if len(items) <= 2 * _WIDE:
        return list(items)
    first = list(itertools.islice(items, _WIDE))
    last = [] if isinstance(items, (set, frozenset)) else list(itertools.islice(reversed(items), _WIDE))
    return first + last[::-1]


def _numbered_ends(items: Any) -> list[tuple[int, Any]]:
    """(index, item) of the first and the last of a sequence or set."""
    ends = _ends(items)
    after = len(items) - len(ends)
    return [(number if number < _WIDE else number + after, item) for number, item in enumerate(ends)]
