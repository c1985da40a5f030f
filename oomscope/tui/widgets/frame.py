"""The parts that every screen has: title line, alert line, footer, and stand-ins for missing data or room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.style import Style
from textual import events
from textual.strip import Strip
from textual.widget import Widget

from oomscope.tui.actions import TABS, key_name
from oomscope.tui.themes import palette
from oomscope.tui.widgets.spans import Span, clip, pad, to_strip, width_of, wrap
from oomscope.views.headline import Alert, Headline

#: Smallest terminal in which the screens are laid out, columns x rows.
MINIMUM = (60, 15)

#: Labels that every footer ends with.
_LAST = ("Help", "Quit")
_GLYPHS = {"error": "▲", "warn": "!", "ok": "✔", "info": "·"}


class OneLine(Widget):
    """A widget of one line, painted from spans."""

    DEFAULT_CSS = "OneLine { height: 1; width: 1fr; }"

    def spans(self, width: int) -> Sequence[Span]:
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        colours = palette(self.app.theme, self.rich_style)
        return to_strip(self.spans(self.size.width), self.size.width, colours, fill="bar")


class TitleLine(OneLine):
    """What is looked at: state, script, ranks, device, step; the least important facts give way."""

    def __init__(self) -> None:
        super().__init__()
        self._headline = Headline("", "info", "", ())

    def show(self, headline: Headline) -> None:
        if headline != self._headline:
            self._headline = headline
            self.refresh()

    def spans(self, width: int) -> Sequence[Span]:
        head = self._headline
        severity = {"error": "error", "warn": "warn", "ok": "ok"}.get(head.severity, "bold")
        left: list[Span] = [
            (" oomscope ", "badge"),
            ("  ", "bar"),
            (f"{head.glyph} {head.word}", "bar-" + severity),
        ]
        room = width - width_of(left) - 2
        facts = list(head.facts)
        while len(facts) > 1 and len(" · ".join(f.text for f in facts)) > room:
            facts.remove(min(facts, key=lambda fact: fact.weight))
        text = " · ".join(f.text for f in facts)
        return [*left, ("  ", "bar"), (clip(text, max(0, room)), "bar")]


class AlertLine(OneLine):
    """The single most urgent fact, and the key that answers it."""

    def __init__(self) -> None:
        super().__init__()
        self._alert: Alert | None = None

    def show(self, alert: Alert | None) -> None:
        if alert != self._alert:
            self._alert = alert
            self.refresh()

    def spans(self, width: int) -> Sequence[Span]:
        alert = self._alert
        if alert is None:
            return []
        filled = {"error": "alert", "warn": "alert-warn", "ok": "alert-ok"}.get(alert.severity)
        answer = f"[{key_name(alert.key)}] {alert.answer}" if alert.key else ""
        text = f" {_GLYPHS.get(alert.severity, '·')} {alert.text}"
        room = width - len(answer) - (2 if answer else 0)
        style, key_style = (filled, filled) if filled else ("dim", "key")
        return [
            *pad([(text, style)], room, style),
            *([(" ", style), (answer, key_style), (" ", style)] if answer else []),
        ]

    def on_click(self) -> None:
        if self._alert is not None and self._alert.key:
            self.app.simulate_key(self._alert.key)


class FooterLine(OneLine):
    """The next likely keys on the left, the screens on the right; both can be clicked."""

    def __init__(self) -> None:
        super().__init__()
        self._mode = ""
        self._keys: tuple[tuple[str, str, int], ...] = ()
        self._targets: list[tuple[int, int, str]] = []

    @property
    def _digits(self) -> list[str]:
        """The key of each screen in the strip."""
        numbers = [str(number) for number in range(1, len(TABS) + 1)]
        own: Callable[[str], str] | None = getattr(self.app, "key_of", None)
        return [own(number) for number in numbers] if own else numbers

    def show(self, mode: str, keys: Sequence[tuple[str, str, int]]) -> None:
        """`keys`: Textual key, label and priority of each entry, in the order of the table."""
        if (mode, tuple(keys)) != (self._mode, self._keys):
            self._mode, self._keys = mode, tuple(keys)
            self.refresh()

    def spans(self, width: int) -> Sequence[Span]:
        narrow = width < 100
        tabs = self._tabs(short=narrow)
        chosen = self._fitting(width - width_of(tabs) - 1, narrow)
        left: list[Span] = []
        self._targets = []
        for key, label in chosen:
            start = width_of(left)
            left += [(f" {key_name(key)}", "bar-key"), (f" {label} " if label else " ", "bar")]
            self._targets.append((start, width_of(left), key))
        line = [*pad(left, width - width_of(tabs), "bar"), *tabs]
        at = width - width_of(tabs)
        for place, key in enumerate(self._digits):
            size = width_of(tabs[2 * place : 2 * place + 2])
            self._targets.append((at, at + size, key))
            at += size
        return line

    def _tabs(self, *, short: bool) -> list[Span]:
        out: list[Span] = []
        for key, (mode, label, brief) in zip(self._digits, TABS, strict=True):
            current = mode == self._mode
            text = brief if short else label
            name = key_name(key)
            out.append((f" {name}" if not current else f" {name} ", "tab" if current else "bar-key"))
            out.append((f"{text} " if current else f" {text}", "tab" if current else "bar"))
        if out[-1][1] != "tab":
            out.append((" ", "bar"))  # the last letter keeps off the edge, which some terminals cut
        return out

    def _fitting(self, room: int, narrow: bool) -> list[tuple[str, str]]:
        """Keys and labels that fit, by priority; help and quit stand last and lose their words first."""
        always = [(key, "" if narrow else label) for key, label, _ in self._keys if label in _LAST]
        room -= sum(self._cells(*entry) for entry in always)
        chosen = []
        for key, label, _ in sorted(self._keys, key=lambda entry: -entry[2]):
            if label not in _LAST and self._cells(key, label) <= room:
                chosen.append((key, label))
                room -= self._cells(key, label)
        return [*chosen, *always]

    @staticmethod
    def _cells(key: str, label: str) -> int:
        return len(key_name(key)) + len(label) + (3 if label else 2)

    def on_click(self, event: events.Click) -> None:
        for start, end, key in self._targets:
            if start <= event.x < end:
                self.app.simulate_key(key)
                return


class Missing(Widget):
    """Says what a screen would show, why it cannot yet, and how to get it."""

    DEFAULT_CSS = "Missing { height: 1fr; width: 1fr; }"

    def __init__(self, what: str = "", how: str = "", *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._what, self._how = what, how

    def show(self, what: str, how: str) -> None:
        if (what, how) != (self._what, self._how):
            self._what, self._how = what, how
            self.refresh()

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        colours = palette(self.app.theme, self.rich_style)
        column = max(20, min(70, width - 8))
        lines: list[Span] = [(text, "bold") for text in wrap(self._what, column)]
        lines.append(("", ""))
        lines += [(text, "dim") for text in wrap(self._how, column)]
        at = y - max(1, (height - len(lines)) // 3)
        left = max(0, (width - column) // 2)
        spans: list[Span] = [(" " * left, ""), lines[at]] if 0 <= at < len(lines) else []
        return to_strip(spans, width, colours)


class TooSmall(Widget):
    """Takes the screen's place when the terminal is smaller than the layout needs."""

    DEFAULT_CSS = "TooSmall { display: none; width: 1fr; height: 1fr; }"

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        base: Style = self.rich_style
        colours = palette(self.app.theme, base)
        text = (
            f"oomscope needs {MINIMUM[0]}x{MINIMUM[1]}; this terminal is {width}x{height}. "
            "Enlarge it, or press q and use --ui never."
        )
        lines = wrap(text, max(1, width))
        return to_strip([(lines[y], "bold")] if y < len(lines) else [], width, colours)
