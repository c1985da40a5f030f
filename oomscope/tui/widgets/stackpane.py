"""The selected allocation or call: its facts, its stack, and source lines where the files are at hand."""

from __future__ import annotations

from oomscope.core.snapshot.categories import Category
from oomscope.core.snapshot.columns import Frame
from oomscope.core.snapshot.flame import Node
from oomscope.core.snapshot.stack_rules import is_user_code, shown_frames
from oomscope.store._snapshot_source import source_line
from oomscope.tui.widgets.categories import STYLES
from oomscope.tui.widgets.lines import TextLines
from oomscope.tui.widgets.spans import Row, Span
from oomscope.units import format_bytes
from oomscope.views.snapshot import count, frame_text, plain
from oomscope.views.snapshot_picture import Painter


class StackPane(TextLines):
    """Lines of text; frames can be walked with the cursor, and `e` edits the one it is on."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._frames: list[Frame] = []

    @property
    def frame(self) -> Frame | None:
        """The frame under the cursor."""
        number = int(self.cursor_key) if self.cursor_key.isdigit() else -1
        return self._frames[number] if 0 <= number < len(self._frames) else None

    def show_allocation(self, painter: Painter, allocation: int) -> None:
        """Show one allocation."""
        analysis = painter.analysis
        lives, first = analysis.lives, analysis.device.skipped_events
        category = Category(int(analysis.category[allocation]))
        born, freed = int(lives.birth[allocation]), int(lives.death[allocation])
        begin = f"event {born + first:,}" if born >= 0 else "before the history"
        end = f"event {freed + first:,}" if freed < lives.n_events else "not in this history"
        stream = analysis.snapshot.streams[int(lives.stream[allocation])]
        head: list[list[Span]] = [
            [(f"{format_bytes(int(lives.size[allocation]))} ", "bold"), (category.label, STYLES[category])],
            [(f"at {int(lives.address[allocation]):#x}, stream {stream}", "dim")],
            [(f"born {begin}; freed {end}", "dim")],
        ]
        stack = int(lives.stack[allocation])
        self._show(head, shown_frames(painter.frames(stack)), stack < 0)

    def show_node(self, node: Node) -> None:
        """Show one box of the icicle: the calls from it outwards."""
        frames = []
        each: Node | None = node
        while each is not None:
            if each.frame is not None:
                frames.append(each.frame)
            each = each.parent
        head: list[list[Span]] = [
            [(plain(node.label), "bold")],
            [(f"{format_bytes(node.bytes)} in {count(node.blocks, 'block')}", "dim")],
        ]
        self._show(head, frames, False)

    def _show(self, head: list[list[Span]], frames: list[Frame], missing: bool) -> None:
        self._frames = frames
        rows = [Row(spans) for spans in head]
        if missing:
            rows.append(Row([("No stack was recorded for it.", "dim")]))
        own = next((n for n, frame in enumerate(frames) if is_user_code(frame)), 0)
        self.cursor_key = str(own) if frames else ""
        for number, frame in enumerate(frames):
            style = "" if is_user_code(frame) else "dim"
            rows.append(Row([(("▸" if number == own else " ") + frame_text(frame), style)], str(number)))
            text = source_line(frame.file, frame.line) if is_user_code(frame) else None
            if text:
                rows.append(Row([(f"    {plain(text)}", "key" if number == own else "faint")]))
        self.show(rows)
