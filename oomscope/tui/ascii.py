"""Plain ASCII in place of every other character, for terminals and locales that have nothing else.

A filter over finished lines: widgets draw as always, and each character is replaced by one of the same width.
"""

from __future__ import annotations

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


#: What Python itself puts into LC_CTYPE when it is started in the C locale (PEP 538): not the user's word.
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")


def wants_ascii(environ: Mapping[str, str] | None = None) -> bool:
    """The Linux console, a locale that is named and is not UTF-8, or `OOMSCOPE_ASCII=1`.

    Without any locale, as in most containers, terminals show UTF-8 all the same.
    """
    environ = os.environ if environ is None else environ
    if environ.get("OOMSCOPE_ASCII"):
        return environ["OOMSCOPE_ASCII"] != "0"
    if environ.get("TERM") == "linux":
        return True
    language, kind = environ.get("LANG", ""), environ.get("LC_CTYPE", "")
    if kind in _COERCED and language:
        kind = ""
    named = environ.get("LC_ALL") or kind or language
    return bool(named) and "utf" not in named.lower()
