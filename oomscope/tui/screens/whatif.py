"""The What-if overlay: the recorded trace replayed under other allocator settings.

The replay is minutes of pure Python for a long trace, so it runs as a command of its own, the one shown; closing
the overlay ends it.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.screen import ModalScreen

from oomscope.tui import actions
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, fit, wrap
from oomscope.views import whatif as view
from oomscope.views import wording

#: Seconds that the replay may take for each device; beyond it fewer address models are tried, and the answer says so.
BUDGET_S = 60


class Answered(Message):
    """The command has ended."""

    def __init__(self, answer: dict[str, Any] | None, problem: str) -> None:
        super().__init__()
        self.answer, self.problem = answer, problem


class WhatIfTable(LineList):
    """One line per setting, and what follows from them."""

    def __init__(self) -> None:
        super().__init__()
        self._found: view.WhatIf | None = None
        self._message = ""

    def show(self, found: view.WhatIf | None, message: str = "") -> None:
        self._found, self._message = found, message
        self.invalidate()

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        found = self._found
        if found is None:
            return [], [Row([("", "")]), *(Row([(line, "dim")]) for line in wrap(self._message, width))]
        rows: list[Row] = []
        if found.settings:
            rows += [
                _line(each, found, width, str(n) == self.cursor_key, str(n))
                for n, each in enumerate(found.settings)
            ]
            rows.append(Row([("", "")]))
        style = "ok" if found.recommended is not None else "bold" if found.is_trusted else "warn"
        rows += [Row([(line, style)]) for line in wrap(found.advice(), width)]
        rows += [Row([(line, "dim")]) for line in wrap(_bound(found), width)]
        rows += [Row([(line, "dim")]) for note in found.notes for line in wrap(note, width)]
        head = f"  {'setting':<{_name_cells(width)}}{'peak GiB':>12}{'smallest card':>15}{'retries':>8}  fits"
        return [[(head, "heading")]], rows


def _name_cells(width: int) -> int:
    return max(26, min(44, width - 48))


def _line(each: view.Setting, found: view.WhatIf, width: int, lit: bool, key: str) -> Row:
    cells = _name_cells(width)
    name = each.name + (" (as it was)" if each.is_recorded else "")
    fits = {True: ("✔ yes", "ok"), False: ("✖ no", "error"), None: ("? open", "warn")}[each.fits]
    if found.capacity_bytes is None:
        fits = ("–", "dim")
    return Row(
        [
            ("› " if lit else "  ", "bold"),
            (fit(name, cells - 1) + " ", "bold" if each.is_recommended else ""),
            (f"{each.peak.gib() if each.peak else '–':>12}", ""),
            (f"{each.need.gib() if each.need else 'not searched':>15}", ""),
            (f"{each.retries:>8}  ", "dim"),
            fits,
            ("  ★" if each.is_recommended else "", "key"),
        ],
        key,
    )


def _bound(found: view.WhatIf) -> str:
    live = f"Live blocks alone come to {wording.size(found.live_peak_bytes)}; no setting needs less."
    if found.capacity_bytes is not None:
        live += f" The card holds {wording.size(found.capacity_bytes)}."
    return live + (
        " Peak is what the allocator takes when nothing limits it; the smallest card is what decides, because at a "
        "shortage free segments go back to the driver first."
    )


class WhatIfScreen(ModalScreen[None]):
    """Other allocator settings for the trace in one snapshot."""

    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.WHATIF)]
    DEFAULT_CSS = """
    WhatIfScreen { align: center middle; background: $background 60%; }
    WhatIfScreen > Vertical {
        width: 104; max-width: 98%; height: 24; max-height: 94%; border: round $primary;
        border-title-style: bold; padding: 0 1; background: $background;
    }
    """

    def __init__(self, snapshot: Path) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._process: subprocess.Popen[str] | None = None
        self._found: view.WhatIf | None = None
        self._started = time.monotonic()
        self._over = False

    def compose(self) -> ComposeResult:
        with Vertical():
            yield WhatIfTable()

    def on_mount(self) -> None:
        box = self.query_one(Vertical)
        box.border_title = f"What if: {self._snapshot.name}"
        box.border_subtitle = "y copies the command · esc closes"
        self.query_one(WhatIfTable).focus()
        self._tick()
        self.set_interval(0.5, self._tick)
        self._run()

    def command(self) -> list[str]:
        """The command line that gives the same answer as text."""
        return ["oomscope", "whatif", str(self._snapshot)]

    def _tick(self) -> None:
        if not self._over:
            waited = time.monotonic() - self._started
            self.query_one(WhatIfTable).show(None, f"Replaying the recorded trace, {waited:.0f} s.")

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _run(self) -> None:
        arguments = [sys.executable, "-m", *self.command(), "--json", "--budget", str(BUDGET_S)]
        try:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            out, err = self._process.communicate()
        except OSError as error:
            self.post_message(Answered(None, f"cannot start the replay: {error}"))
            return
        try:
            answer = json.loads(out)
        except ValueError:
            self.post_message(Answered(None, err.strip() or "the replay was ended"))
            return
        self.post_message(Answered(answer if isinstance(answer, dict) else None, err.strip()))

    def on_answered(self, message: Answered) -> None:
        self._over = True
        self._found = view.read(message.answer) if message.answer is not None else None
        self.query_one(WhatIfTable).show(
            self._found, message.problem or "The snapshot holds no history to replay."
        )

    def on_unmount(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def action_copy_whatif(self) -> None:
        self.app.copy_to_clipboard(shlex.join(self.command()))
        self.notify("copied the command")

    def action_close(self) -> None:
        self.dismiss(None)
