"""What `oomscope fix` prints: the list of fixes as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from oomscope.report.run import WIDTH, fix_lines
from oomscope.views import fixes as fixes_view


def text(fixes: Mapping[str, Any], *, show_all: bool = False) -> str:
    """The fixes that help, best first, then those that do not; with `show_all` also those that do not apply."""
    view = fixes_view.read(fixes)
    lines = fix_lines(view)
    if fixes.get("recommended"):
        lines += ["", f"    recommended: {' + '.join(fixes['recommended'])}"]
    if show_all:
        refused = [entry for entry in fixes.get("fixes", ()) if not entry.get("applicable")]
        lines += ["", "    do not apply:"]
        for entry in refused:
            lines += _wrapped(f"{entry['id']}: {entry.get('why_not')}", indent=6)
    return "\n".join(lines)


def _wrapped(sentence: str, indent: int = 4) -> list[str]:
    return textwrap.wrap(
        sentence, WIDTH - 2, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2)
    )
