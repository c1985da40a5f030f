"""Whether there is a terminal that screens can be drawn on."""

from __future__ import annotations

import os
import sys

from oomscope.errors import NotATerminal

#: Below this the screens show only that they need more room.
SMALLEST = (60, 15)


def has_screens(ui: str) -> bool:
    """Whether to draw screens, given `--ui auto|never|always`.

    Textual draws on stderr and reads stdin, so both must be a terminal; stdout may go into a file.

    Raises:
        NotATerminal: `always` without a terminal.
    """
    if ui == "never":
        return False
    terminal = sys.stdin.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if ui == "always":
        if not terminal:
            raise NotATerminal("there is no terminal to draw on", hint="leave out --ui always")
        return True
    return terminal and not os.environ.get("CI") and _is_large_enough()


def _is_large_enough() -> bool:
    """Whether the terminal has the room; where it has not, says so, because the plain text would surprise."""
    try:
        columns, lines = os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        return False
    if columns >= SMALLEST[0] and lines >= SMALLEST[1]:
        return True
    sys.stderr.write(
        f"oomscope: screens need {SMALLEST[0]}x{SMALLEST[1]}, this terminal is {columns}x{lines}: plain text instead\n"
        "  hint: enlarge it, or choose --ui never\n"
    )
    return False
