"""The OOM screen: the cause, the questions that led to it with their evidence, and the source line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message

from oomscope.errors import OomscopeError
from oomscope.tui import actions
from oomscope.tui.editor import edit
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.screens.whatif import WhatIfScreen
from oomscope.tui.widgets.composition import CompositionBars
from oomscope.tui.widgets.flowchart import EvidenceList, FlowList, SourcePane, VerdictBlock
from oomscope.tui.widgets.lines import LineList
from oomscope.views import diagnosis as view
from oomscope.views import whatif, wording
from oomscope.views.frame import Frame
from oomscope.views.headline import Alert, Fact, Headline
from oomscope.views.overrule import Rewalk, next_answer


@dataclass
class Walked(Message):
    """The flowchart of an attempt was walked with these answers."""

    attempt: int
    answers: dict[str, str]
    found: view.Diagnosis | None
    error: str = ""


class OomScreen(BaseScreen):
    """Why memory ran out."""

    MODE = "oom"
    HELP = (
        "At the top the most likely cause, how sure it is, and the card at the moment of failure. Below, the "
        "questions that were asked: ● is on the path to the cause, ? could not be answered. Every question "
        "has its evidence, and where evidence is missing, the cheapest way to get it. d shows the questions "
        "off the path too; space answers one otherwise and walks the chart again with your answer; u returns to "
        "what was found. oomscope explain SESSION --answer Q1=no does the same."
    )
    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.OOM)]
    DEFAULT_CSS = """
    OomScreen VerdictBlock { height: auto; max-height: 9; }
    OomScreen #middle { height: 1fr; layout: horizontal; }
    OomScreen #flow-pane { width: 1fr; height: 1fr; }
    OomScreen #evidence-pane { width: 1fr; height: 1fr; }
    OomScreen.-narrow #middle { layout: vertical; }
    OomScreen.-narrow #flow-pane { height: auto; max-height: 50%; }
    OomScreen.-narrow FlowList { height: auto; max-height: 100%; }
    OomScreen #lower { height: 1fr; display: none; }
    OomScreen.-roomy.-composition #lower { display: block; }
    OomScreen SourcePane { height: auto; max-height: 7; border-top: solid $line; display: none; }
    OomScreen.-source SourcePane { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[str, str] = {}
        self._answered_for = 0
        self._rewalk: Rewalk | None = None
        self._walked: Walked | None = None
        self._shown: view.Diagnosis | None = None
        self._trace: Path | None = None
        """The snapshot with the memory trace, for What-if."""

    def compose_body(self) -> ComposeResult:
        yield VerdictBlock()
        with Horizontal(id="middle"):
            with Vertical(id="flow-pane", classes="pane"):
                yield FlowList(id="flow")
            with Vertical(id="evidence-pane", classes="pane ruled"):
                yield EvidenceList(id="evidence")
        with Horizontal(id="lower"), Vertical(id="composition-pane", classes="pane ruled"):
            yield CompositionBars(id="composition")
        yield SourcePane()

    def on_mount(self) -> None:
        self.query_one("#flow-pane").border_title = "Questions"
        self.query_one("#evidence-pane").border_title = "Evidence"
        self.query_one("#composition-pane").border_title = "In memory at the peak"
        self.query_one("#flow").focus()

    # -- showing -----------------------------------------------------------------------------

    def show_frame(self, frame: Frame) -> None:
        found = frame.diagnosis
        if found is None or not found.is_about_oom:
            self.show_missing(*_missing(frame))
            return
        self.show_missing()
        tall = self.size.height >= 32
        self.set_class(self.size.height >= 28, "-roomy")
        if frame.diagnosis_attempt != self._answered_for:
            self._answered_for, self._answers, self._walked = frame.diagnosis_attempt, {}, None
            self._rewalk = None
        walked, lead = self._walked, ""
        if walked is not None and walked.found is not None and walked.answers == self._answers:
            found, lead = walked.found, "with your answers: "
        if found is not self._shown:
            self._trace = whatif.snapshot_of(frame.path, frame.diagnosis_attempt, found.rank)
        self._shown = found
        self.query_one(VerdictBlock).show(found, 5 if tall else 2, lead)
        flow = self.query_one(FlowList)
        flow.brief = self.query_one(EvidenceList).brief = not tall
        if tall and not flow.shows_all and len(found.flow) <= self.size.height - 20:
            flow.shows_all = True
        flow.given = dict(self._answers)
        flow.show(found)
        self.query_one(EvidenceList).show(flow.node, found.verdict)
        self.set_class(frame.composition is not None, "-composition")
        word = "simulated" if found.attempt in _simulated(frame) else "measured"
        self.query_one(CompositionBars).show(frame.composition, word)
        where = found.verdict.where if found.verdict else None
        lines = view.source_lines(where, context=2 if tall else 1) if where else ()
        self.set_class(bool(lines), "-source")
        if where is not None and lines:
            title = f"{wording.below(where.file, frame.cwd)}:{where.line}" + (
                f" in {where.function}" if where.function else ""
            )
            self.query_one(SourcePane).show(title, lines)

    def headline(self, frame: Frame) -> Headline:
        found = frame.diagnosis
        if found is None or not found.verdicts:
            return frame.headline
        parts = found.what_happened().split(" · ")
        facts = [
            Fact(part, 8 if part.startswith("tried") else 9 - 2 * i) for i, part in enumerate(parts) if part
        ]
        facts.append(Fact(f"attempt {frame.diagnosis_attempt}", 2))
        if found.recovered:
            return Headline("▲", "warn", "RECOVERED FROM OOM", tuple(facts))
        if not found.failed:
            return Headline("▲", "warn", "FINDING", tuple(facts))
        return Headline("✖", "error", "OOM", tuple(facts))

    def alert(self, frame: Frame) -> Alert | None:
        fixes = frame.fixes
        if frame.diagnosis is None or frame.state in ("running", "predicting", "done") or fixes is None:
            return frame.alert
        fitting = sum(bool(row.predicted and row.predicted.fits) for row in fixes.rows)
        if fitting:
            words = wording.plural(fitting, "fix is predicted to fit", "fixes are predicted to fit")
            return Alert("ok", words, "4", "choose" if frame.state == "waiting" else "fixes")
        return Alert("warn", "no single fix is predicted to fit", "4", "fixes")

    def copy_text(self) -> str:
        found = self._shown
        return "\n".join(view.sentences(found)) + "\n" if found else ""

    def command_text(self) -> str:
        given = "".join(f" --answer {name}={answer}" for name, answer in self._answers.items())
        return f"oomscope explain {self.host.frame.target}{given}" if self.host.frame else ""

    def offers(self, action_id: str) -> bool:
        """To edit only a line that is known, and to replay only a trace that is there."""
        verdict = self._shown.verdict if self._shown else None
        if action_id == "oom.edit":
            return verdict is not None and verdict.where is not None
        return action_id != "oom.whatif" or self._trace is not None

    # -- events and actions ------------------------------------------------------------------

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        if message.lines.id == "flow" and self._shown is not None:
            self.query_one(EvidenceList).show(self.query_one(FlowList).node, self._shown.verdict)

    def on_line_list_opened(self, message: LineList.Opened) -> None:
        if message.lines.id == "flow":
            self.query_one("#evidence").focus()

    def action_overrule(self) -> None:
        """The next answer for the question under the cursor."""
        found = self.host.frame.diagnosis if self.host.frame else None
        name = self.query_one(FlowList).cursor_key
        node = next((n for n in found.flow if n.name == name), None) if found else None
        if node is None:
            return
        answer = next_answer(node, self._answers.pop(name, None))
        if answer is not None:
            self._answers[name] = answer
        self._walk()

    def action_as_found(self) -> None:
        self._answers.clear()
        self.refresh_frame()

    def _walk(self) -> None:
        frame = self.host.frame
        if frame is None or frame.diagnosis is None or not self._answers:
            self.refresh_frame()
            return
        if self._rewalk is None:
            self._rewalk = Rewalk(frame.path, frame.diagnosis_attempt, frame.diagnosis.rank)
        self._walk_in_thread(self._rewalk, dict(self._answers))

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _walk_in_thread(self, rewalk: Rewalk, answers: dict[str, str]) -> None:
        try:
            found = rewalk.walk(answers)
        except OomscopeError as error:
            self.post_message(Walked(rewalk.attempt, answers, None, error.message))
        else:
            self.post_message(Walked(rewalk.attempt, answers, found))

    def on_walked(self, message: Walked) -> None:
        if (message.attempt, message.answers) != (self._answered_for, self._answers):
            return  # superseded: a thread that runs cannot be stopped
        if message.error:
            self._answers.clear()
            self.notify(f"the questions cannot be walked again: {message.error}")
        self._walked = message
        self.refresh_frame()

    def action_why_not(self) -> None:
        flow = self.query_one(FlowList)
        flow.toggle_all()
        self.notify("all questions" if flow.shows_all else "only the path to the cause")

    def action_edit(self) -> None:
        where = self._shown.verdict.where if self._shown and self._shown.verdict else None
        if where is None:
            self.notify("this cause has no source line")
            return
        edit(self.host, where.file, where.line)

    def action_whatif(self) -> None:
        if self._trace is None:
            self.notify("this attempt left no memory snapshot, so there is no trace to replay")
            return
        self.app.push_screen(WhatIfScreen(self._trace))


def _simulated(frame: Frame) -> set[int]:
    """Attempts that ran on a simulated device."""
    return {row.number for row in frame.comparison.attempts if row.simulated} if frame.comparison else set()


def _missing(frame: Frame) -> tuple[str, str]:
    if frame.state == "diagnosing":
        return "Finding the cause.", "It takes a few seconds; this screen fills by itself."
    if frame.state in ("starting", "running", "stopping"):
        growing = [row for row in frame.ranks if row.is_growing]
        if growing:
            return (
                f"No out-of-memory error yet, but rank {growing[0].rank} is on its way to one.",
                "Its lows rise from step to step: something is kept that each step adds to. Press s for a "
                "memory snapshot now and 3 to see what is held; the full diagnosis comes with the error "
                "itself.",
            )
        return "No out-of-memory error so far.", "The diagnosis appears here by itself when one happens."
    if frame.state == "failed" and frame.exception:
        return (
            "This job ended, but not for lack of memory.",
            f"{frame.exception}\n\nctrl+l shows what it printed.",
        )
    if frame.state == "done":
        return "This run did not run out of memory.", "Press 1 for its peaks, 6 for other sessions."
    problem = frame.problem_with("findings.json")
    return (
        "The diagnosis cannot be read." if problem else "No diagnosis was recorded for this session.",
        f"{problem}\n\nMake one with: oomscope explain {frame.target}".strip(),
    )
