"""Plain ASCII in place of every other character, for terminals and locales that have nothing else.

A filter over finished lines: widgets draw as always, and each character is replaced by one of the same width.
"""

from __future__ import annotations

import locale
import os
from collections.abc import Mapping

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_GLYPHS = {
    "█": "#", "▓": "%", "▒": "=", "░": ":", "·": ".",
    "▁": "_", "▂": "_", "▃": "_", "▄": "=", "▅": "#", "▆": "#", "▇": "#",
    "│": "|", "┃": "|", "▌": "|", "▐": "|", "▎": "|", "─": "-", "━": "-", "▔": "-",
    "╭": "+", "╮": "+", "╯": "+", "╰": "+", "┌": "+", "┐": "+", "└": "+", "┘": "+",
    "├": "+", "┤": "+", "┬": "+", "┴": "+", "┼": "+",
    "●": "*", "○": "o", "◐": "o", "◆": "*", "★": "*", "▲": "!", "✔": "+", "✖": "x", "≡": "=", "◫": "#",
    "▚": "&", "╱": "/", "╳": "X", "∙": ",",
    "▶": ">", "▸": ">", "▾": "v", "›": ">", "◀": "<", "‹": "<", "↑": "^", "↓": "v", "←": "<", "→": ">",
    "−": "-", "–": "-", "—": "-", "×": "x", "±": "~", "Δ": "d", "…": "~", "°": "o", "²": "2",
}  # fmt: skip
_TABLE = str.maketrans(_GLYPHS)


def to_ascii(text: str) -> str:
    """`text` with known glyphs replaced and everything else beyond ASCII as "?", as wide as before."""
    if text.isascii():
        return text
    return "".join(c if c.isascii() else "?" * cell_len(c) for c in text.translate(_TABLE))


class AsciiFilter(LineFilter):
    """Replaces every character that is not ASCII."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]


def wants_ascii(environ: Mapping[str, str] | None = None) -> bool:
    """The Linux console, a locale that is not UTF-8, or `OOMSCOPE_ASCII=1`."""
    environ = os.environ if environ is None else environ
    if environ.get("OOMSCOPE_ASCII"):
        return environ["OOMSCOPE_ASCII"] != "0"
    encoding = locale.getpreferredencoding(False).lower().replace("-", "")
    return environ.get("TERM") == "linux" or encoding in (
        "ascii",
        "ansi_x3.41968",
        "usascii",
        "latin1",
        "iso88591",
    )
