"""Live memory by calls, outermost on top: each box is as wide as its share of the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from oomscope.core.snapshot.flame import Node
from oomscope.tui.actions import make_bindings
from oomscope.tui.screens.snapshot_actions import ICICLE_ACTIONS
from oomscope.tui.themes import Palette, palette
from oomscope.tui.widgets.categories import STYLES
from oomscope.tui.widgets.spans import clip
from oomscope.units import format_bytes

_BY_LABEL = {each.label: style for each, style in STYLES.items()}
_OTHERS = ("allocated", "inactive", "ok", "predicted", "other")
_SMALLER = "…"


@dataclass(frozen=True, slots=True)
class Box:
    """One node in one line of the picture; `node` is None for what is too small to draw."""

    x: int
    width: int
    node: Node | None
    hidden: int = 0
    """How many smaller nodes the box stands for."""


class Icicle(ScrollView, can_focus=True):
    """The tree, a selected node, and a node to which the view is zoomed."""

    BINDINGS: ClassVar[list[BindingType]] = [*make_bindings(ICICLE_ACTIONS)]
    DEFAULT_CSS = "Icicle { height: 1fr; scrollbar-size: 1 1; overflow-x: hidden; }"

    class Selected(Message):
        """Another node is selected."""

        def __init__(self, node: Node) -> None:
            super().__init__()
            self.node = node

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, Icicle.Selected)

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._root = Node("")
        self.zoomed = self._root
        self.selected = self._root
        self._lines: list[list[Box]] = []
        self._width = -1

    # -- data --------------------------------------------------------------------------------

    def show(self, root: Node) -> None:
        """Another tree; selection and zoom stay where the same calls are."""
        if root is self._root:
            return
        selected, zoomed = self.selected.path(), self.zoomed.path()
        self._root = root
        self.selected, self.zoomed = _find(root, selected), _find(root, zoomed)
        self._lay_out()

    def _lay_out(self) -> None:
        width = self.scrollable_content_region.width
        self._width = width
        self._lines = boxes(self.zoomed, width) if width > 0 and self.zoomed.bytes > 0 else []
        self.virtual_size = Size(0, len(self._lines))
        self.refresh()

    def on_resize(self, event: events.Resize) -> None:
        self._lay_out()

    # -- painting ----------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        if width != self._width:
            self._lay_out()
        colours = palette(self.app.theme, self.rich_style)
        index = y + int(self.scroll_offset.y)
        if index >= len(self._lines):
            note = " nothing was live at this moment" if not self._lines and y == 0 else ""
            return Strip([Segment(note.ljust(width), colours.style("dim"))], width)
        segments, x = [], 0
        for box in self._lines[index]:
            if box.x > x:
                segments.append(Segment(" " * (box.x - x), colours.base))
            segments.append(Segment(_text(box), self._style(box, colours)))
            x = box.x + box.width
        return Strip(segments).adjust_cell_length(width, colours.base)

    def _style(self, box: Box, colours: Palette) -> Style:
        if box.node is None:
            return colours.style("faint")
        chosen = box.node is self.selected
        if colours.mono:
            return colours.base + Style(reverse=chosen, bold=chosen, underline=not chosen)
        if box.node is self._root:
            return colours.style("tab" if chosen else "bar-bold")
        colour = colours.style(_style_of(box.node)).color
        ink = "#101214" if self.app.current_theme.dark else "#FFFFFF"
        if chosen:
            return Style(color=colour, bgcolor=ink, bold=True, reverse=False, underline=True)
        return Style(color=ink, bgcolor=colour)

    # -- keys --------------------------------------------------------------------------------

    def select(self, node: Node, *, quiet: bool = False) -> None:
        """Select a node and bring its line into view."""
        if node is self.selected:
            return
        self.selected = node
        for number, line in enumerate(self._lines):
            if any(box.node is node for box in line):
                self.scroll_to_region_line(number)
        self.refresh()
        if not quiet:
            self.post_message(self.Selected(node))

    def scroll_to_region_line(self, number: int) -> None:
        top, height = int(self.scroll_offset.y), self.scrollable_content_region.height
        if number < top:
            self.scroll_to(y=number, animate=False)
        elif number >= top + height:
            self.scroll_to(y=number - height + 1, animate=False)

    def action_child(self) -> None:
        children = self.selected.ordered()
        if children:
            self.select(children[0])

    def action_parent(self) -> None:
        parent = self.selected.parent
        if parent is None:
            return
        if self.selected is self.zoomed:
            self.zoomed = parent
            self._lay_out()
        self.select(parent)

    def action_sibling(self, delta: int) -> None:
        """The next box in the same line, also one of another parent."""
        for line in self._lines:
            nodes = [box.node for box in line if box.node is not None]
            if self.selected in nodes:
                at = nodes.index(self.selected) + delta
                if 0 <= at < len(nodes):
                    self.select(nodes[at])
                return

    def action_zoom(self) -> None:
        self.zoomed = self.selected
        self.scroll_to(y=0, animate=False)
        self._lay_out()

    def zoom_out(self) -> bool:
        """One level out; False when everything is shown already."""
        if self.zoomed.parent is None:
            return False
        self.zoomed = self.zoomed.parent
        self._lay_out()
        return True

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        index = offset.y + int(self.scroll_offset.y)
        for box in self._lines[index] if index < len(self._lines) else []:
            if box.node is not None and box.x <= offset.x < box.x + box.width:
                self.select(box.node)
                if event.chain == 2:
                    self.action_zoom()

    def plain_text(self) -> str:
        """The tree below the zoomed node as indented text, for copying; parts below 1 % are left out."""
        lines: list[str] = []
        waiting = [(self.zoomed, 0)]
        while waiting and len(lines) < 400:
            node, depth = waiting.pop()
            share = node.bytes / self._root.bytes if self._root.bytes else 0
            lines.append(f"{format_bytes(node.bytes):>12} {share:>4.0%}  {'  ' * depth}{node.label}")
            children = [child for child in node.ordered() if child.bytes * 100 >= self._root.bytes]
            waiting += [(child, depth + 1) for child in reversed(children)]
        return "\n".join(lines) + "\n"


def boxes(top: Node, width: int) -> list[list[Box]]:
    """Lines of boxes below `top`, which takes `width` cells; work grows with the boxes drawn only."""
    lines: list[list[Box]] = []
    level: list[tuple[float, float, Node]] = [(0.0, float(width), top)]
    right = {id(top): width}  # where the box of a node ends
    while level:
        line: list[Box] = []
        below: list[tuple[float, float, Node]] = []
        for x, extent, node in level:
            first, last = round(x), round(x + extent)
            if last > first:
                line.append(Box(first, last - first, node))
                right[id(node)] = last
                below += _children(node, x, extent)
        if line:
            lines.append(_with_smaller(line, right) if line[0].node is not top else line)
        level = below
    return lines


def _children(node: Node, x: float, extent: float) -> list[tuple[float, float, Node]]:
    found = []
    for child in node.ordered():
        part = extent * child.bytes / node.bytes if node.bytes else 0.0
        if part < 0.5:
            break  # the rest is smaller still
        found.append((x, part, child))
        x += part
    return found


def _with_smaller(line: list[Box], right: dict[int, int]) -> list[Box]:
    """Fill gaps beside siblings with a box that says how many were too small to draw.

    `right` tells where the box of each parent ends.
    """
    out: list[Box] = []
    for number, box in enumerate(line):
        out.append(box)
        parent = box.node.parent if box.node is not None else None
        following = line[number + 1].node if number + 1 < len(line) else None
        if parent is None or (following is not None and following.parent is parent):
            continue
        drawn = sum(1 for each in line if each.node is not None and each.node.parent is parent)
        hidden = len(parent.children) - drawn
        lost = sum(child.bytes for child in parent.ordered()[drawn:])
        end = box.x + box.width
        room = min(right[id(parent)] - end, round((right[id(parent)] - end) * lost / _undrawn(parent, line)))
        if hidden and room >= 1:
            out.append(Box(end, room, None, hidden))
    return out


def _undrawn(parent: Node, line: list[Box]) -> int:
    """Bytes of `parent` to the right of its drawn children: smaller children, and what it allocated itself."""
    drawn = sum(each.node.bytes for each in line if each.node is not None and each.node.parent is parent)
    return max(1, parent.bytes - drawn)


def _text(box: Box) -> str:
    """What is written in a box: label and size, the label alone, or a sliver's edge."""
    if box.node is None:
        text = f"{_SMALLER} {box.hidden} smaller"
    else:
        size = format_bytes(box.node.bytes)
        text = f"{box.node.label} {size}"
        if len(text) > box.width - 1:
            text = box.node.label
    if box.width == 1:
        return "▏"
    return clip(text, box.width - 1).ljust(box.width - 1) + "▕"


def _style_of(node: Node) -> str:
    """The category's style when the tree is grouped by category, else one that stays with the label."""
    each: Node | None = node
    while each is not None and each.parent is not None and each.parent.parent is not None:
        each = each.parent
    label = each.label if each is not None else ""
    return _BY_LABEL.get(label) or _OTHERS[sum(map(ord, label)) % len(_OTHERS)]


def _find(root: Node, path: list[str]) -> Node:
    """The node at `path`, or the deepest one on the way that is there."""
    node = root
    for label in path[1:]:
        child = node.children.get(label)
        if child is None:
            break
        node = child
    return node
