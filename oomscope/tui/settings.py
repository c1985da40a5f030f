"""What the user set in config.toml: a theme, and other keys for any action.

::

    theme = "light"            # dark, light, mono

    [keymap]
    list.down = "n,down"       # ids are those of docs/keys.md
    go.fixes = "f"

The file is `$OOMSCOPE_CONFIG`, else `${XDG_CONFIG_HOME:-~/.config}/oomscope/config.toml`. It is the user's own: a
project cannot change what a key does. A mistake in it never keeps the viewer from opening; what is wrong is said and
left out.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from textual.keys import KEY_NAME_REPLACEMENTS, Keys

from oomscope.errors import OomscopeError
from oomscope.store.toml_file import read_toml
from oomscope.tui import actions, themes

_THEMES = {"dark": themes.DARK, "light": themes.LIGHT, "mono": themes.MONO}
_MODIFIERS = frozenset({"ctrl", "shift", "alt", "super", "hyper", "meta"})
_NAMED = frozenset(key.value for key in Keys) | frozenset(actions.KEY_NAMES)


@dataclass(frozen=True)
class Settings:
    """What config.toml says."""

    theme: str = ""
    """Name of a theme in `themes`; empty: by the terminal."""
    keymap: Mapping[str, str] = field(default_factory=dict)
    """Id of an action to its keys, comma-separated, as `App.set_keymap` takes them."""
    problems: tuple[str, ...] = ()
    """What was left out, and why."""


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where the file is, whether or not it exists."""
    environ = os.environ if environ is None else environ
    if environ.get("OOMSCOPE_CONFIG"):
        return Path(environ["OOMSCOPE_CONFIG"])
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "oomscope" / "config.toml"


def load(path: Path | None = None) -> Settings:
    """The settings in `path`, by default the user's own file; a missing file sets nothing."""
    path = config_path() if path is None else path
    if not path.exists():
        return Settings()
    try:
        data = read_toml(path, "the settings")
    except OomscopeError as error:
        return Settings(problems=(error.message,))
    problems: list[str] = []
    keymap = _keymap(data.pop("keymap", {}), problems)
    theme = data.pop("theme", "")
    if theme and (not isinstance(theme, str) or theme not in _THEMES):
        problems.append(f"no theme {theme!r}; there are {', '.join(_THEMES)}")
        theme = ""
    problems += [f"unknown setting {name!r}{_nearest(name, ('theme', 'keymap'))}" for name in data]
    return Settings(_THEMES.get(theme, ""), keymap, tuple(f"{path}: {each}" for each in problems))


def _keymap(table: object, problems: list[str]) -> dict[str, str]:
    """The entries that can be used; what is wrong with the others is added to `problems`."""
    if not isinstance(table, Mapping):
        problems.append("keymap must be a table: [keymap]")
        return {}
    known = {action.id: action for action in actions.all_actions()}
    found: dict[str, str] = {}
    for name, value in _flat(table):
        keys = _keys(value)
        if name not in known:
            problems.append(f"keymap: no action {name!r}{_nearest(name, tuple(known))}")
        elif not keys:
            problems.append(f"keymap: {name} = {value!r} names no key")
        elif wrong := next((key for key in keys if not _is_key(key)), None):
            problems.append(f"keymap: {name}: no key {wrong!r}")
        else:
            found[name] = ",".join(keys)
    problems += [f"keymap: {clash}" for clash in _clashes(found)]
    return found


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """`list.down = "n"` is a table in a table for TOML; both that and a quoted "list.down" are meant."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, value


def _keys(value: object) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return [_long_name(part.strip()) for part in parts if isinstance(part, str) and part.strip()]


def _long_name(key: str) -> str:
    """Textual's name of a key: "question_mark" for "?"."""
    head, plus, last = key.rpartition("+") if len(key) > 1 else ("", "", key)
    if len(last) == 1 and not last.isalnum():
        last = unicodedata.name(last, last).lower().replace("-", "_").replace(" ", "_")
        last = KEY_NAME_REPLACEMENTS.get(last, last)
    return head + plus + last


def _is_key(key: str) -> bool:
    *modifiers, last = key.split("+")
    return all(each in _MODIFIERS for each in modifiers) and (
        len(last) == 1 or last in _NAMED or key in _NAMED or "_" in last
    )


def _clashes(keymap: Mapping[str, str]) -> Iterator[str]:
    """Two actions of one place under one key: the later one would never be reached."""
    seen: dict[tuple[str, str], str] = {}
    for action in actions.all_actions():
        for key in keymap.get(action.id, action.keys).split(","):
            other = seen.setdefault((action.group, key), action.id)
            if other != action.id:
                yield f"{key} is both {other} and {action.id}"


def _nearest(name: str, known: tuple[str, ...]) -> str:
    close = get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""
