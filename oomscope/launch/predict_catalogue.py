"""The fixes that are known here: the built-in catalogue, and what plugins add through the entry point `oomscope.fixes`.

An entry point names a `Fix` or an iterable of them. A plugin that fails to load, or offers something else, is left out;
`oomscope doctor` lists it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from oomscope import plugins
from oomscope.core.fixes import CATALOGUE, Fix
from oomscope.errors import FixError

GROUP = "oomscope.fixes"


@lru_cache(maxsize=1)
def catalogue() -> tuple[Fix, ...]:
    """Built-in fixes, then those of plugins in the order of their names; an id is taken once."""
    found = {fix.id: fix for fix in CATALOGUE}
    for loaded in plugins.load(GROUP):
        for fix in _fixes(loaded.value):
            found.setdefault(fix.id, fix)
    return tuple(found.values())


def _fixes(value: object) -> list[Fix]:
    if isinstance(value, Fix):
        return [value]
    if isinstance(value, Iterable):
        return [each for each in value if isinstance(each, Fix)]
    return []


def find(fix_id: str) -> Fix:
    """The fix named `fix_id`, built in or of a plugin.

    Raises:
        FixError: there is none; the nearest id is named.
    """
    known = {fix.id: fix for fix in catalogue()}
    if fix_id in known:
        return known[fix_id]
    from difflib import get_close_matches

    near = get_close_matches(fix_id, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"fixes: {', '.join(known)}"
    raise FixError(f"no fix is called {fix_id!r}", hint=hint)
