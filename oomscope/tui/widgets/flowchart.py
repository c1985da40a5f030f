"""The parts of the OOM screen: walked flowchart, evidence of one node, verdict, source line."""

from __future__ import annotations

from collections.abc import Sequence

from textual.geometry import Size

from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, clip, clip_left, columns, pad, width_of, wrap
from oomscope.views import wording
from oomscope.views.diagnosis import Diagnosis, Evidence, Gap, Node, SourceLine, Verdict

_ANSWERS = {"yes": ("YES", "bold"), "no": ("no", "dim"), "unknown": ("?", "warn")}


class FlowList(LineList):
    """Questions down the path that led to the verdict, each with its answer; the others on demand."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._questions: tuple[Node, ...] = ()
        self._verdict = ""
        self.shows_all = False
        self.given: dict[str, str] = {}
        """Answers of the user in place of those found."""
        self.brief = False
        """Only the path, where there is little room."""

    def show(self, diagnosis: Diagnosis) -> None:
        verdict = diagnosis.verdict.rule if diagnosis.verdict else ""
        if (diagnosis.flow, verdict) == (self._questions, self._verdict):
            return
        first = not self._questions
        self._questions, self._verdict = diagnosis.flow, verdict
        self.invalidate()
        if first:
            decided = [n for n in self._questions if n.on_path and n.verdict == verdict and verdict]
            on_path = [n for n in self._questions if n.on_path]
            start = (decided or on_path or list(self._questions))[-1:]
            if start:
                self.select(start[0].name)

    def toggle_all(self) -> None:
        self.shows_all = not self.shows_all
        self.invalidate()

    @property
    def node(self) -> Node | None:
        """The node under the cursor."""
        return next((n for n in self._questions if n.name == self.cursor_key), None)

    def in_view(self) -> list[Node]:
        """On the path and top-level questions; all of them after `d`."""
        if self.shows_all:
            return list(self._questions)
        path = [n for n in self._questions if n.on_path or (n.depth == 0 and not self.brief)]
        return path or [n for n in self._questions if n.depth == 0]

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        nodes = self.in_view()
        if not nodes:
            return [], [Row([("no question was asked: there is no out-of-memory event", "dim")])]
        return [], [self._line(nodes, index, width) for index in range(len(nodes))]

    def _line(self, nodes: Sequence[Node], index: int, width: int) -> Row:
        node = nodes[index]
        answer, style = _ANSWERS[node.answer]
        selected = node.name == self.cursor_key
        glyph = ("●", "key") if node.on_path else ("?", "warn") if node.answer == "unknown" else ("·", "dim")
        hit = bool(node.verdict) and node.verdict == self._verdict and node.on_path
        left: list[Span] = [
            ("›" if selected else " ", "bold"),
            (_branch(nodes, index), "faint"),
            glyph,
            (f" {node.question or node.name}", "bold" if hit else "" if node.on_path else "dim"),
        ]
        mine = [(" you", "warn")] if node.name in self.given else []
        right: list[Span] = [(f" {answer}", style), *mine, (" ◀" if hit else "  ", "key")]
        return Row(columns(left, right, width), node.name)


def _branch(nodes: Sequence[Node], index: int) -> str:
    """Tree lines in front of a node: a corner when no sibling follows."""
    depth = nodes[index].depth
    if depth == 0:
        return ""
    last = True
    for later in nodes[index + 1 :]:
        if later.depth < depth:
            break
        if later.depth == depth:
            last = False
            break
    return "  " * (depth - 1) + ("└ " if last else "├ ")


def evidence_rows(items: Sequence[Evidence], missing: Sequence[Gap], width: int) -> list[Row]:
    """Facts as wrapped lines with their source, then what is not known and how to find out."""
    rows: list[Row] = []
    for item in items:
        lines = wrap(item.text, width - 2)
        source = f"  [{item.source}]" if item.source else ""
        for number, line in enumerate(lines):
            spans: list[Span] = [("· " if number == 0 else "  ", "key"), (line, "")]
            if number == len(lines) - 1 and source:
                if width_of(spans) + len(source) <= width:
                    spans.append((source, "dim"))
                else:
                    rows.append(Row(spans))
                    spans = [("  ", ""), (source.strip(), "dim")]
            rows.append(Row(spans))
    for gap in missing:
        lines = wrap(f"unknown: {gap.what}", width - 2)
        rows += [Row([("? " if n == 0 else "  ", "warn"), (line, "")]) for n, line in enumerate(lines)]
        if gap.capture:
            rows += [Row([("    ", ""), (line, "dim")]) for line in wrap(f"get it: {gap.capture}", width - 4)]
    return rows


class EvidenceList(LineList):
    """What is known about the node under the flowchart's cursor."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._node: Node | None = None
        self._verdict: Verdict | None = None
        self.brief = False
        """Without the question, which the flowchart shows already."""

    def show(self, node: Node | None, verdict: Verdict | None) -> None:
        """`verdict`: shown with a node that led to it, and when there is no flowchart at all."""
        if (node, verdict) != (self._node, self._verdict):
            self._node, self._verdict = node, verdict
            self.invalidate()
            self.scroll_to(y=0, animate=False)

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        rows: list[Row] = []
        node, verdict = self._node, self._verdict
        if node is not None and not self.brief:
            rows += [Row([(line, "bold")]) for line in wrap(node.question, width)]
            answer, style = _ANSWERS[node.answer]
            rows.append(
                Row(
                    [
                        ("answer ", "dim"),
                        (answer, style),
                        (f"  {node.verdict}" if node.verdict else "", "key"),
                    ]
                )
            )
        if node is not None:
            rows += evidence_rows(node.evidence, node.missing, width)
            if not node.evidence and not node.missing:
                rows.append(Row([("no separate evidence", "dim")]))
        if verdict is not None and (
            node is None or not verdict.rule or (node.on_path and node.verdict == verdict.rule)
        ):
            known = set(node.evidence) if node else set()
            extra = [e for e in verdict.evidence if e not in known]
            rows += evidence_rows(extra, verdict.missing, width)
        if node is not None and node.guide:
            rows.append(Row([("", "")]))
            rows += [Row([(line, "dim")]) for line in wrap(f"the guide: {node.guide}", width)]
        return [], rows


class VerdictBlock(LineList, can_focus=False):
    """The cause, how sure, why, and the card's memory at the moment of failure as one bar."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._diagnosis: Diagnosis | None = None
        self.max_lines = 3
        self.lead = ""
        """Words before the cause: whose answers it rests on."""

    def show(self, diagnosis: Diagnosis, max_lines: int, lead: str = "") -> None:
        if (diagnosis, max_lines, lead) != (self._diagnosis, self.max_lines, self.lead):
            self._diagnosis, self.max_lines, self.lead = diagnosis, max_lines, lead
            self.invalidate()
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.build(width)[1]) if width > 0 else 1

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        found = self._diagnosis
        if found is None:
            return [], [Row([("", "")])]
        verdict = found.verdict
        if verdict is None:
            return [], [Row([(" No cause found: the questions below say what is missing.", "bold")])]
        sure = f"{verdict.sureness()} "
        style = {"high": "ok", "medium": "warn"}.get(wording.confidence_word(verdict.confidence), "dim")
        title = columns(
            [(" ▶ ", "error"), (self.lead, "warn"), (verdict.title, "bold"), (f"   {verdict.rule}", "dim")],
            [(" confidence ", "dim"), (sure, style)] if verdict.rule else [],
            width,
        )
        rows = [Row(title)]
        lines = wrap(verdict.explanation, width - 4) if verdict.explanation else []
        if len(lines) > self.max_lines:
            lines = [*lines[: self.max_lines - 1], clip(lines[self.max_lines - 1] + " …", width - 4)]
        if found.recovered:
            lines = [*wrap(f"Recovered: {found.recovered}.", width - 4), *lines]
        rows += [Row([("   ", ""), (line, "")]) for line in lines]
        bar = _card_bar(found, width - 3)
        if bar:
            rows.append(Row([("   ", ""), *bar]))
        return [], rows


def _card_bar(found: Diagnosis, width: int) -> list[Span]:
    """The card at the failure: allocated, inactive, not PyTorch, free, and what was asked, in one line."""
    capacity, allocated, reserved = found.capacity_bytes, found.allocated_bytes, found.reserved_bytes
    if not capacity or allocated is None or reserved is None:
        return []
    free = found.device_free_bytes
    asked = (
        f"  asked {wording.short_size(found.requested_bytes)} " if found.requested_bytes is not None else ""
    )
    left = f", free {wording.short_size(free)}" if free is not None else ""
    held = f" {wording.gib(allocated)} allocated, {wording.gib(reserved)} reserved"
    label = f"{held} of {wording.gib(capacity)} GiB{left}"
    room = width - len(label) - len(asked)
    if room < 12:
        label = (
            f" {wording.gib(allocated)} alloc, {wording.gib(reserved)} resv of {wording.gib(capacity)} GiB"
        )
        room = width - len(label) - len(asked)
    if room < 8:
        return []
    room = min(room, 60)
    edge_a = round(allocated / capacity * room)
    edge_r = max(edge_a, min(room, round(reserved / capacity * room)))
    other = 0 if free is None else max(0, capacity - reserved - free)
    cells_o = min(room - edge_r, round(other / capacity * room))
    return [
        ("█" * edge_a, "allocated"),
        ("▒" * (edge_r - edge_a), "inactive"),
        ("░" * cells_o, "other"),
        ("·" * (room - edge_r - cells_o), "free"),
        (label, "dim"),
        (asked, "error"),
    ]


class SourcePane(LineList, can_focus=False):
    """The blamed source line with its neighbours."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._title = ""
        self._lines: tuple[SourceLine, ...] = ()

    def show(self, title: str, lines: tuple[SourceLine, ...]) -> None:
        if (title, lines) != (self._title, self._lines):
            self._title, self._lines = title, lines
            self.invalidate()
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines) + 1

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        rows = []
        for line in self._lines:
            mark = "▸" if line.is_blamed else " "
            style = "bold" if line.is_blamed else "dim"
            spans = pad(
                [(f" {mark}{line.number:>5}  ", "error" if line.is_blamed else "faint"), (line.text, style)],
                width,
            )
            rows.append(Row(spans))
        return [[(f" {clip_left(self._title, width - 2)}", "heading")]], rows
