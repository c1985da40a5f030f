"""`oomscope top` on the screen: GPUs above, the selected one's last minutes in the middle, processes below.

An app of its own: it belongs to the machine, not to a session.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.message import Message

from oomscope.collect.base import State
from oomscope.collect.machine import MachineWatch
from oomscope.launch.whose import Owners, TorchReadings
from oomscope.tui import actions, themes
from oomscope.tui.actions import Action
from oomscope.tui.widgets.frame import AlertLine, Missing, OneLine, TitleLine
from oomscope.tui.widgets.gpulist import WIDE, GpuHistory, GpuList
from oomscope.tui.widgets.lines import LineList, TextLines
from oomscope.tui.widgets.spans import Row, Span, clip, columns
from oomscope.units import GIB, format_bytes
from oomscope.views.headline import Alert, Fact, Headline
from oomscope.views.machine import GpuRow, MachineView, ProcessRow, machine_view
from oomscope.views.machine_text import command_of, value, who

MACHINE = "Machine"
MACHINE_ACTIONS = (
    Action("machine.sort", "o", "app.sort", "Sort", "Sort processes by GPU, memory, job, user or pid.", MACHINE, 5),
    Action("machine.only", "f", "app.only", "This GPU", "Show the processes of the selected GPU only.", MACHINE, 4),
    Action("machine.pause", "space", "app.pause", "Pause", "Stop and go on reading.", MACHINE, 3),
    Action("machine.copy", "y", "app.copy_all", "Copy", "Copy the tables as plain text.", MACHINE, 2),
    Action("machine.theme", "ctrl+t", "app.next_theme", "Theme", "Dark, light, or no colours at all.", MACHINE, 1),
    Action("machine.leave", "q,ctrl+c,ctrl+q,escape", "app.quit", "Quit", "Leave.", MACHINE, 9),
)  # fmt: skip

#: Readings kept of each GPU: ten minutes at the default rate.
_HISTORY = 600
_SORTS = ("gpu", "memory", "job", "user", "pid")
_POLL_S = 0.2


class KeyLine(OneLine):
    """The keys on the left, the meaning of the bars on the right."""

    def spans(self, width: int) -> Sequence[Span]:
        keys: list[Span] = []
        for action in MACHINE_ACTIONS:
            if action.footer > 1:
                keys += [
                    (f" {actions.key_name(action.keys.split(',')[0])}", "bar-key"),
                    (f" {action.label} ", "bar"),
                ]
        legend = (("█", "allocated"), ("▒", "cached"), ("▓", "rest of jobs"), ("░", "others"))
        words = [(f" {glyph} {word}", "bar-dim") for glyph, word in legend] if width >= 100 else []
        return columns(keys, words, width, "bar")


class ViewReady(Message):
    """The collectors delivered something new."""

    def __init__(self, view: MachineView) -> None:
        super().__init__()
        self.view = view


class MachineApp(App[None]):
    """The GPUs of this machine, live.

    Args:
        interval_s: between two readings.
        watch: in place of one on this machine's collectors; polled and closed here.
        clock: seconds since the epoch.
        start: False in tests, which call `show` themselves.
    """

    TITLE = "oomscope top"
    CSS_PATH = "../styles/app.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [*actions.make_bindings(MACHINE_ACTIONS)]
    DEFAULT_CSS = """
    MachineApp #gpus { height: 3; }
    MachineApp #processes { height: 1fr; margin-top: 1; }
    MachineApp #none { display: none; }
    MachineApp .-none #none { display: block; }
    MachineApp .-none #tables { display: none; }
    """

    def __init__(
        self,
        *,
        interval_s: float = 1.0,
        watch: MachineWatch | None = None,
        clock: Callable[[], float] = time.time,
        start: bool = True,
    ) -> None:
        self.is_mono = bool(os.environ.get("NO_COLOR"))
        super().__init__(ansi_color=True if self.is_mono else None)
        for theme in themes.THEMES:
            self.register_theme(theme)
        self.theme = self._themes[0]
        self._watch = watch
        self._interval = interval_s
        self._clock = clock
        self._autostart = start
        self._ended = threading.Event()
        self._sort = _SORTS[0]
        self._only_selected = False
        self._paused = False
        self.machine: MachineView | None = None
        self._memory: dict[str, deque[float]] = {}
        self._load: dict[str, deque[float]] = {}

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield AlertLine()
        with Vertical(id="body"):
            yield Missing("Reading the GPUs.", "", id="none")
            with Vertical(id="tables"):
                yield GpuList(id="gpus")
                yield GpuHistory("util", id="load")
                yield GpuHistory("mem ", id="memory")
                yield TextLines(id="processes")
        yield KeyLine()

    def on_mount(self) -> None:
        self.query_one("#gpus").focus()
        if self._autostart:
            self.run_worker(self._read, thread=True, exclusive=True, exit_on_error=False)

    def on_unmount(self) -> None:
        self._ended.set()

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return {"line": "#3A4249"}

    def _read(self) -> None:
        """In a thread: polls the collectors until the app ends."""
        watch = self._watch or MachineWatch(period_s=self._interval)
        owners, torch = Owners(), TorchReadings()
        try:
            while not self._ended.is_set():
                if watch.poll() and not self._paused:
                    pids = [row["pid"] for rows in watch.machine.holders().values() for row in rows]
                    view = machine_view(watch.machine, watch.statuses, owners.of(pids), torch.poll())
                    self.post_message(ViewReady(view))
                self._ended.wait(_POLL_S)
        finally:
            watch.close()

    def on_view_ready(self, message: ViewReady) -> None:
        self.show(message.view)

    def show(self, view: MachineView) -> None:
        """Shows `view` and remembers it in the histories."""
        self.machine = view
        for row in view.gpus:
            if row.used_bytes is not None and row.total_bytes:
                self._memory.setdefault(row.uuid, deque(maxlen=_HISTORY)).append(
                    row.used_bytes / row.total_bytes
                )
            load = row.record.get("utilization_pct")
            if load is not None:
                self._load.setdefault(row.uuid, deque(maxlen=_HISTORY)).append(load / 100)
        self._paint()

    def _paint(self) -> None:
        view = self.machine
        if view is None:
            return
        with self.batch_update():
            self.query_one(TitleLine).show(_headline(view, self._paused))
            self.query_one(AlertLine).show(_alert(view))
            empty = not view.gpus
            self.query_one("#body").set_class(empty, "-none")
            if empty:
                self.query_one("#none", Missing).show(*_why_empty(view))
                return
            self.query_one(GpuList).show(view.gpus, self._load)
            self._paint_selected()

    def _paint_selected(self) -> None:
        view = self.machine
        listing = self.query_one(GpuList)
        listing.rows  # noqa: B018  # builds the rows, which puts the cursor on the first
        row = listing.current
        if view is None or row is None:
            return
        load = row.record.get("utilization_pct")
        self.query_one("#load", GpuHistory).show(self._load.get(row.uuid, ()), value(load, "%"))
        used = "–" if row.used_bytes is None else format_bytes(row.used_bytes, 1)
        self.query_one("#memory", GpuHistory).show(self._memory.get(row.uuid, ()), used)
        rows = [(gpu, each) for gpu in view.gpus for each in gpu.processes]
        if self._only_selected:
            rows = [pair for pair in rows if pair[0].uuid == row.uuid]
        rows.sort(key=self._order)
        width = self.size.width
        listing_of_processes = self.query_one("#processes", TextLines)
        listing_of_processes.show(
            [
                Row(_process_spans(gpu, each, width), f"{gpu.uuid}:{each.pid}:{each.kind}")
                for gpu, each in rows
            ]
            or [Row([("  no process uses these GPUs", "dim")])],
            [[(_process_head(width, self._sort), "heading")]],
        )

    def _order(self, pair: tuple[GpuRow, ProcessRow]) -> tuple[object, ...]:
        gpu, process = pair
        used = -(process.used_bytes or 0)
        if self._sort == "memory":
            return (used,)
        if self._sort == "job":
            return (
                process.job is None,
                process.job or "",
                process.rank if process.rank is not None else -1,
                process.pid,
            )
        if self._sort in ("user", "pid"):
            return (process.user if self._sort == "user" else "", process.pid)
        return gpu.index, gpu.label, used

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        if isinstance(message.lines, GpuList):
            self._paint_selected()

    # -- keys

    def action_sort(self) -> None:
        self._sort = _SORTS[(_SORTS.index(self._sort) + 1) % len(_SORTS)]
        self.notify(f"processes sorted by {self._sort}")
        self._paint_selected()

    def action_only(self) -> None:
        self._only_selected = not self._only_selected
        self._paint_selected()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._paint()

    def action_copy_all(self) -> None:
        text = self.query_one(GpuList).plain_text() + self.query_one("#processes", TextLines).plain_text()
        self.copy_to_clipboard(text)
        self.notify("copied")

    def action_next_theme(self) -> None:
        known = self._themes
        at = known.index(self.theme) if self.theme in known else 0
        self.theme = known[(at + 1) % len(known)]

    @property
    def _themes(self) -> tuple[str, ...]:
        return (themes.MONO,) if self.is_mono else themes.cycle(self.console.color_system)


def _headline(view: MachineView, paused: bool) -> Headline:
    used = sum(row.used_bytes or 0 for row in view.gpus if row.record.get("mig_parent_uuid") is None)
    total = sum(row.total_bytes for row in view.gpus if row.record.get("mig_parent_uuid") is None)
    facts = [Fact(view.host, 5)]
    if view.gpus:
        facts.append(Fact(f"{used / GIB:.1f} of {total / GIB:.0f} GiB on the GPUs", 4))
    if view.driver:
        facts.append(Fact(f"driver {view.driver}", 2))
    memory = view.memory
    if memory.get("mem_total_bytes"):
        host = memory["mem_total_bytes"] - memory.get("mem_available_bytes", 0)
        facts.append(Fact(f"host {host / GIB:.1f} of {memory['mem_total_bytes'] / GIB:.0f} GiB", 3))
    return Headline(
        "‖" if paused else "●", "info" if paused else "ok", "PAUSED" if paused else "MACHINE", tuple(facts)
    )


def _alert(view: MachineView) -> Alert | None:
    """The most urgent note: a lost GPU before a stale collector before the rest."""
    lost = next((row for row in view.gpus if row.state != "ok"), None)
    if lost is not None:
        return Alert("error", f"GPU {lost.label}: {(lost.warnings or (lost.state,))[0]}")
    bad = next(
        (
            s
            for s in view.collectors.values()
            if s["state"] in (State.STALE.value, State.FAILED.value) and s["why"]
        ),
        None,
    )
    if bad is not None:
        return Alert("error", bad["why"])
    notes = [note for note in view.notes if not note.startswith("nvidia:") or view.gpus]
    return Alert("warn", notes[0]) if notes and view.gpus else None


def _why_empty(view: MachineView) -> tuple[str, str]:
    reasons = [f"{name}: {s['why']}" for name, s in view.collectors.items() if s["why"] and name != "host"]
    if reasons:
        return "There is no GPU to show.", "\n".join(reasons)
    return "Reading the GPUs.", "The first reading takes a second or two."


def _process_head(width: int, sort: str) -> str:
    def mark(name: str) -> str:
        return name + "▾" if name == sort else name

    wide = f"{'allocated':>11}{'cached':>11}{'host RSS':>11}" if width >= WIDE else ""
    head = f" {mark('gpu'):<5}{mark('pid'):>8} {mark('user'):<9}{mark('job'):<18}{mark('memory'):>11}{wide}"
    return head + "  command"


def _process_spans(gpu: GpuRow, process: ProcessRow, width: int) -> list[Span]:
    def size(count: int | None) -> str:
        return "–" if count is None else format_bytes(count, 1)

    spans: list[Span] = [
        (f" {gpu.label:<5}", "bold"),
        (f"{str(process.pid) + ('' if process.visible else '*'):>8} ", ""),
        (f"{clip(process.user, 8):<9}", "dim"),
        (f"{clip(who(process), 17):<18}", "accent" if process.job else "dim"),
        (f"{size(process.used_bytes):>11}", "bold"),
    ]
    if width >= WIDE:
        cached = None
        if process.reserved_bytes is not None and process.allocated_bytes is not None:
            cached = process.reserved_bytes - process.allocated_bytes
        spans += [
            (f"{size(process.allocated_bytes):>11}", "allocated"),
            (f"{size(cached):>11}", "inactive"),
            (f"{size(process.rss_bytes):>11}", ""),
        ]
    return [*spans, (f"  {command_of(process)}", "dim")]
