"""Styled pieces of one line: the currency between the builders of rows and the widgets that paint them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from textual.strip import Strip

from oomscope.tui.themes import Palette

#: Text and the name of its style in `themes`.
Span = tuple[str, str]
Spans = tuple[Span, ...]


class Row(NamedTuple):
    """One line of a list."""

    spans: Sequence[Span]
    key: str = ""
    """Identity of the line across updates; empty: the cursor skips it."""
    fill: str = ""
    """Style of the rest of the line."""


def width_of(spans: Iterable[Span]) -> int:
    """Cells that `spans` take."""
    return sum(cell_len(text) for text, _ in spans)


def pad(spans: Sequence[Span], width: int, fill: str = "") -> list[Span]:
    """`spans` cut with an ellipsis or filled with spaces to exactly `width` cells."""
    out: list[Span] = []
    left = width
    for index, (text, style) in enumerate(spans):
        size = cell_len(text)
        more = any(t for t, _ in spans[index + 1 :])
        if size > left or (size == left and more and width_of(spans[index + 1 :]) > 0):
            if left > 0:
                out.append((_ellipsis(text, left), style))
            return out
        out.append((text, style))
        left -= size
    if left > 0:
        out.append((" " * left, fill))
    return out


def clip(text: str, width: int) -> str:
    """`text` in at most `width` cells; an ellipsis marks what is missing."""
    return text if cell_len(text) <= width else _ellipsis(text, width)


def clip_left(text: str, width: int) -> str:
    """The end of `text` in at most `width` cells: for paths, whose end says most."""
    if cell_len(text) <= width:
        return text
    room, start = width - 1, len(text)
    while start > 0 and (size := cell_len(text[start - 1])) <= room:
        room -= size
        start -= 1
    return "…" + text[start:] if width > 0 else ""


def fit(text: str, width: int) -> str:
    """`text` in exactly `width` cells: a column of a table, whatever script it is written in."""
    return _filled(clip(text, width), width)


def fit_left(text: str, width: int) -> str:
    """The end of `text` in exactly `width` cells."""
    return _filled(clip_left(text, width), width)


def _filled(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def _ellipsis(text: str, width: int) -> str:
    if width <= 0:
        return ""
    return set_cell_size(text, width - 1) + "…"


def columns(left: Sequence[Span], right: Sequence[Span], width: int, fill: str = "") -> list[Span]:
    """`left` and `right` at the two ends of a line; the left side gives way."""
    room = width - width_of(right)
    if room <= 0:
        return pad(right, width, fill)
    return [*pad(left, room, fill), *right]


def wrap(text: str, width: int, indent: int = 0) -> list[str]:
    """`text` broken at spaces into lines of at most `width` cells.

    Leading spaces of a paragraph stay; its further lines start with as many and `indent` more.
    """
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        body = paragraph.lstrip(" ")
        lead = " " * min(len(paragraph) - len(body), width // 2)
        later = lead + " " * indent
        line = lead
        for word in body.split(" "):
            joined = line + word if line in (lead, later) else f"{line} {word}"
            if cell_len(joined) <= width:
                line = joined
                continue
            if line.strip():
                lines.append(line)
            line = later + word
            while cell_len(line) > width > len(later) + 1:
                head = chop_cells(line, width)[0]
                lines.append(head)
                line = later + line[len(head) :]
        lines.append(line)
    return lines


def to_strip(
    spans: Sequence[Span], width: int, palette: Palette, *, selected: bool = False, fill: str = ""
) -> Strip:
    """Exactly `width` cells painted with the styles of `palette`."""
    style = palette.style
    segments = [
        Segment(text, style(name, selected=selected)) for text, name in pad(spans, width, fill) if text
    ]
    return Strip(segments, width)


def plain(spans: Iterable[Span]) -> str:
    """The text alone."""
    return "".join(text for text, _ in spans)
