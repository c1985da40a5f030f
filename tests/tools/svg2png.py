"""Turn an SVG screenshot of a Textual app into a PNG: `svg2png.py IN.svg [OUT.png] [--cell 12]`.

Textual's screenshot is one rectangle per run of one background and one text per run of one style, on a grid
of 12.2 x 24.4 units. Every run is drawn cell by cell on a whole-pixel grid, and block, shade, box and braille
characters are drawn as shapes, as terminals with built-in box drawing do, so that areas have no seams.
General SVG renderers misplace the runs (rsvg-convert, cairosvg) or leave hairlines between cells (browsers).

Needs Pillow and the DejaVu Sans Mono font.
"""

from __future__ import annotations

import argparse
import re
import xml.etree.ElementTree as ET
from functools import lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.cells import cell_len

Colour = tuple[int, int, int]

_NS = "{http://www.w3.org/2000/svg}"
_CELL_WIDTH, _CELL_HEIGHT = 12.2, 24.4
_FONT = "/usr/share/fonts/truetype/dejavu/DejaVuSansMono{}.ttf"
#: Advance of DejaVu Sans Mono as a share of its size.
_ADVANCE = 0.602
_CANVAS: Colour = (18, 18, 18)
_INK: Colour = (224, 224, 224)

# Which quarters of the cell a quadrant character fills: 1 2 above, 3 4 below.
_QUADRANTS = {
    0x2596: "3", 0x2597: "4", 0x2598: "1", 0x2599: "134", 0x259A: "14",
    0x259B: "123", 0x259C: "124", 0x259D: "2", 0x259E: "23", 0x259F: "234",
}  # fmt: skip
# Which arms a box-drawing character has: left, right, up, down.
_BOXES = {
    "─": "lr", "│": "ud", "╭": "rd", "╮": "ld", "╯": "lu", "╰": "ru", "┌": "rd", "┐": "ld", "└": "ru",
    "┘": "lu", "├": "rud", "┤": "lud", "┬": "lrd", "┴": "lru", "┼": "lrud",
}  # fmt: skip


@lru_cache
def _font(size: int, bold: bool) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_FONT.format("-Bold" if bold else ""), size)


class Cell:
    """One character cell of the picture."""

    def __init__(self, draw: ImageDraw.ImageDraw, x: int, y: int, width: int, height: int) -> None:
        self.draw, self.x, self.y, self.width, self.height = draw, x, y, width, height

    def fill(self, x0: float, y0: float, x1: float, y1: float, ink: Colour) -> None:
        """A rectangle in shares of the cell."""
        left, right = self.x + round(x0 * self.width), self.x + round(x1 * self.width)
        top, bottom = self.y + round(y0 * self.height), self.y + round(y1 * self.height)
        if right > left and bottom > top:
            self.draw.rectangle((left, top, right - 1, bottom - 1), fill=ink)

    def shape(self, char: str, ink: Colour) -> bool:
        """Draw `char` as a shape; False when it is an ordinary glyph."""
        code = ord(char)
        if 0x2581 <= code <= 0x2588:
            self.fill(0, 1 - (code - 0x2580) / 8, 1, 1, ink)
        elif 0x2589 <= code <= 0x258F:
            self.fill(0, 0, (0x2590 - code) / 8, 1, ink)
        elif code in (0x2580, 0x2590):
            self.fill(*((0, 0, 1, 0.5) if code == 0x2580 else (0.5, 0, 1, 1)), ink)
        elif 0x2591 <= code <= 0x2593:
            self._shade(code, ink)
        elif code in _QUADRANTS:
            for quarter in _QUADRANTS[code]:
                row, column = divmod(int(quarter) - 1, 2)
                self.fill(column / 2, row / 2, column / 2 + 0.5, row / 2 + 0.5, ink)
        elif char in _BOXES:
            self._box(_BOXES[char], ink)
        else:
            return False
        return True

    def _shade(self, code: int, ink: Colour) -> None:
        """A dither, so that a shade differs from a solid colour in kind and not only in brightness."""
        for row in range(self.height):
            for column in range(self.width):
                sparse = (column % 4, row % 4) in ((0, 0), (2, 2))
                checker = (column + row) % 2 == 0
                lit = sparse if code == 0x2591 else checker if code == 0x2592 else not sparse
                if lit:
                    self.draw.point((self.x + column, self.y + row), fill=ink)

    def _box(self, arms: str, ink: Colour) -> None:
        middle_x, middle_y = self.x + self.width // 2, self.y + self.height // 2
        thick = max(1, self.width // 10) - 1
        right, bottom = self.x + self.width - 1, self.y + self.height - 1
        lines = {
            "l": (self.x, middle_y, middle_x + thick, middle_y + thick),
            "r": (middle_x, middle_y, right, middle_y + thick),
            "u": (middle_x, self.y, middle_x + thick, middle_y + thick),
            "d": (middle_x, middle_y, middle_x + thick, bottom),
        }
        for arm in arms:
            self.draw.rectangle(lines[arm], fill=ink)


def convert(svg: Path, png: Path, *, cell: int = 12) -> None:
    """Draw the screenshot `svg` into `png` with cells of `cell` x 2 `cell` pixels."""
    text = svg.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    styles = {m[1]: m[2] for m in re.finditer(r"\.(\S+-r\d+)\s*\{([^}]*)\}", text)}
    matrix = next(
        g for g in root.iter(f"{_NS}g") if "clip-path" in g.attrib and "translate" in g.get("transform", "")
    )
    clip = root.find(f".//{_NS}clipPath/{_NS}rect")
    assert clip is not None
    columns = round(float(clip.get("width", "0")) / _CELL_WIDTH)
    rows = round(float(clip.get("height", "0")) / _CELL_HEIGHT)
    image = Image.new("RGB", (columns * cell, rows * cell * 2), _CANVAS)
    draw = ImageDraw.Draw(image)
    for rectangle in matrix.iter(f"{_NS}rect"):
        x = round(float(rectangle.get("x", "0")) / _CELL_WIDTH) * cell
        y = round((float(rectangle.get("y", "0")) - 1.5) / _CELL_HEIGHT) * cell * 2
        width = round(float(rectangle.get("width", "0")) / _CELL_WIDTH) * cell
        if width > 0:
            draw.rectangle(
                (x, y, x + width - 1, y + cell * 2 - 1), fill=_rgb(rectangle.get("fill", "#121212"))
            )
    for run in matrix.iter(f"{_NS}text"):
        line = re.search(r"-line-(\d+)\)", run.get("clip-path", ""))
        row = int(line[1]) if line else round(float(run.get("y", "0")) / _CELL_HEIGHT) - 1
        column = round(float(run.get("x", "0")) / _CELL_WIDTH)
        _draw_run(draw, run.text or "", column, row, styles.get(run.get("class", ""), ""), cell)
    image.save(png, optimize=True)


def _draw_run(draw: ImageDraw.ImageDraw, text: str, column: int, row: int, css: str, cell: int) -> None:
    fill = re.search(r"fill:\s*(#\w{6})", css)
    ink = _rgb(fill[1]) if fill else _INK
    height = cell * 2
    font = _font(round(cell / _ADVANCE), "bold" in css)
    for char in text:
        width = cell_len(char)
        x, y = column * cell, row * height
        if width and char not in " \xa0" and not Cell(draw, x, y, cell * width, height).shape(char, ink):
            draw.text((x, y + height // 2), char, font=font, fill=ink, anchor="lm")
        if "underline" in css:
            draw.line((x, y + height - 3, x + cell * width, y + height - 3), fill=ink)
        column += width


def _rgb(text: str) -> Colour:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("svg", type=Path)
    parser.add_argument("png", type=Path, nargs="?")
    parser.add_argument("--cell", type=int, default=12, help="width of a cell in pixels")
    arguments = parser.parse_args()
    convert(arguments.svg, arguments.png or arguments.svg.with_suffix(".png"), cell=arguments.cell)


if __name__ == "__main__":
    main()
