"""The Fixes screen: what would help, by how much, at what cost; tick, look, apply and rerun."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical

from oomscope.errors import OomscopeError
from oomscope.store.session import Session
from oomscope.tui import actions
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.screens.dialogs import Confirm
from oomscope.tui.widgets.fixlist import FixBars, FixDetail, FixList
from oomscope.tui.widgets.lines import LineList
from oomscope.views import fixes as view
from oomscope.views import wording
from oomscope.views.frame import Frame
from oomscope.views.headline import Alert, Fact, Headline


class FixesScreen(BaseScreen):
    """Fixes ranked by what they save at this job's peak."""

    MODE = "fixes"
    HELP = (
        "Every number is a prediction for this script at its peak, with its interval; the line says on what "
        "it stands. space ticks fixes, d shows exactly what the ticked ones change, A reruns the job with "
        "them after a confirmation. ★ marks the recommended combination. Fixes that save less than 3 % are "
        "shown with the reason, not hidden. Risk: none and exact keep the numbers, rounding changes their "
        "last digits, semantic changes the training."
    )
    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.FIXES)]
    DEFAULT_CSS = """
    FixesScreen #list-pane { height: auto; max-height: 60%; } FixesScreen FixList { height: auto; max-height:
    100%; } FixesScreen #bars { height: auto; } FixesScreen #bars-pane { height: auto; border-top: solid
    $line; } FixesScreen #lower { height: 1fr; } FixesScreen #detail-pane, FixesScreen #preview-pane { width:
    1fr; height: 1fr; border-top: solid $line; padding: 0 1; } FixesScreen #preview-pane { display: none; }
    FixesScreen.-wide #preview-pane, FixesScreen.-preview #preview-pane { display: block; }
    FixesScreen.-preview #detail-pane { display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._preview = False

    def compose_body(self) -> ComposeResult:
        with Vertical(id="list-pane"):
            yield FixList(id="fixes")
        with Vertical(id="bars-pane"):
            yield FixBars(id="bars")
        with Horizontal(id="lower"):
            with Vertical(id="detail-pane", classes="ruled"):
                yield FixDetail(id="detail")
            with Vertical(id="preview-pane", classes="ruled"):
                yield FixDetail(id="preview")

    def on_mount(self) -> None:
        self.query_one("#fixes").focus()

    # -- showing -----------------------------------------------------------------------------

    def show_frame(self, frame: Frame) -> None:
        found = frame.fixes
        if found is None or not found.rows:
            self.show_missing(*_missing(frame))
            return
        self.show_missing()
        listing = self.query_one(FixList)
        listing.show(found)
        bars, note = view.bars(found, listing.chosen)
        self.query_one(FixBars).show(bars, note, found.capacity_bytes, self._reached_word(frame))
        self.query_one("#detail", FixDetail).show_fix(listing.current)
        current = listing.current
        looked_at = listing.chosen or ([current.id] if current is not None and current.applicable else [])
        pane = self.query_one("#preview-pane")
        pane.border_title = "What the ticked fixes change" if listing.chosen else "What this fix would change"
        lines = view.preview(found, looked_at, frame.command) if looked_at else []
        self.query_one("#preview", FixDetail).show_preview(lines)

    def _reached_word(self, frame: Frame) -> str:
        for row in frame.comparison.attempts if frame.comparison else ():
            if row.number == frame.fixes_attempt:
                return row.word
        return frame.device_word

    def headline(self, frame: Frame) -> Headline:
        found = frame.fixes
        if found is None or not found.rows:
            return frame.headline
        verdict = frame.diagnosis.verdict if frame.diagnosis else None
        is_known = verdict is not None and verdict.rule != "oom.unknown"
        facts = [Fact(f"for {verdict.clause()}" if verdict and is_known else "for this run", 9)]
        need = found.need_bytes()
        if need is not None:
            facts.append(Fact(f"needs −{wording.gib(need)} GiB", 8))
        facts.append(Fact(f"capacity {wording.size(found.capacity_bytes)}", 7))
        chosen = len(self.query_one(FixList).chosen)
        if chosen:
            facts.append(Fact(f"{chosen} ticked", 8))
        if found.basis:
            facts.append(Fact(f"by {found.basis}", 3))
        return Headline("◆", "warn", "FIXES", tuple(facts))

    def alert(self, frame: Frame) -> Alert | None:
        found = frame.fixes
        if found is None or not found.rows:
            return frame.alert
        said = self._judged(found)
        if said.key == "A" and not frame.is_active:
            return replace(
                said, text=f"{said.text}; the session has ended: Y copies the command", key="", answer=""
            )
        return said

    def offers(self, action_id: str) -> bool:
        """To apply only where a supervisor waits or runs."""
        return action_id != "fixes.apply" or (self.host.frame is not None and self.host.frame.is_active)

    def _judged(self, found: view.Fixes) -> Alert:
        """What the ticked fixes would come to."""
        chosen = self.query_one(FixList).chosen
        if not chosen:
            if found.recommended:
                return Alert("info", f"recommended: {' + '.join(found.recommended)}", "R", "tick it")
            return Alert(
                "warn",
                found.outlook
                or found.note
                or "no combination is predicted to fit; space ticks one all the same",
            )
        clash = found.conflict(chosen)
        if clash:
            return Alert("error", f"{clash[0]} and {clash[1]} exclude each other: untick one")
        predicted = found.predicted_for(chosen)
        if predicted is None:
            return Alert("warn", "no prediction for exactly this combination", "A", "apply anyway")
        if predicted.tight:
            top = wording.size(predicted.high_bytes)
            return Alert("warn", f"predicted to fit, but it may need up to {top}", "A", "apply & rerun")
        if predicted.fits:
            return Alert(
                "ok", f"predicted to fit: {wording.size(predicted.peak_bytes)}", "A", "apply & rerun"
            )
        return Alert("warn", "not predicted to fit", "A", "apply anyway")

    def copy_text(self) -> str:
        found = self.host.frame.fixes if self.host.frame else None
        return "\n".join(view.sentences(found)) + "\n" if found else ""

    def command_text(self) -> str:
        if self.host.frame is None:
            return ""
        chosen = self.query_one(FixList).chosen
        apply = f" --apply {','.join(chosen)}" if chosen else ""
        return f"oomscope fix {self.host.frame.target}{apply}"

    # -- events and actions ------------------------------------------------------------------

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        if message.lines.id == "fixes":
            self.refresh_frame()

    def on_line_list_opened(self, message: LineList.Opened) -> None:
        if message.lines.id == "fixes":
            if self.query_one(FixList).current is None:
                self.action_fold()
            else:
                self.query_one("#detail").focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide what changes the job from a read-only viewer."""
        if action == "predict" and self.host.frame is not None and _has_rows(self.host.frame):
            return False
        return not (self.host.readonly and action in ("apply", "predict"))

    def action_tick(self) -> None:
        refused = self.query_one(FixList).toggle()
        if refused:
            self.notify(refused, severity="warning")
        self.refresh_frame()

    def action_clear(self) -> None:
        self.query_one(FixList).choose([])
        self.refresh_frame()

    def action_recommend(self) -> None:
        found = self.host.frame.fixes if self.host.frame else None
        if found is None or not found.recommended:
            self.notify("nothing is predicted yet" if found is None else "no combination is predicted to fit")
            return
        self.query_one(FixList).choose(found.recommended)
        self.refresh_frame()

    def action_fold(self) -> None:
        self.query_one(FixList).fold()

    def action_preview(self) -> None:
        self._preview = not self._preview
        self.set_class(self._preview, "-preview")

    def action_apply(self) -> None:
        frame = self.host.frame
        found = frame.fixes if frame else None
        chosen = list(self.query_one(FixList).chosen)
        if frame is None or found is None or not chosen:
            self.notify("nothing is predicted yet" if found is None else "tick a fix first: space")
            return
        clash = found.conflict(chosen)
        if clash:
            self.notify(f"{clash[0]} and {clash[1]} exclude each other", severity="warning")
            return
        if not frame.is_active:
            self.notify(
                f"no supervisor is waiting; in a shell: {self.command_text()}",
                title="session has ended",
                timeout=8,
            )
            return

        def decided(yes: bool | None) -> None:
            if yes and self.host.ask("rerun", f"asked for a rerun with {', '.join(chosen)}", fixes=chosen):
                self.host.action_go("live")

        body: list[str | tuple[str, str]] = []
        predicted = found.predicted_for(chosen)
        if predicted is not None:
            body.append(
                f"Predicted peak {wording.size(predicted.peak_bytes)} "
                f"of {wording.size(found.capacity_bytes)}."
            )
        else:
            body.append(("There is no prediction for exactly this combination.", "warn"))
        body.append("")
        styles = {"heading": "heading", "added": "added", "removed": "removed", "hunk": "dim"}
        for line in view.preview(found, chosen, frame.command):
            lead = "" if line.kind == "heading" else "  "
            body.append((lead + line.text, styles.get(line.kind, "")))
        self.app.push_screen(
            Confirm(
                f"Rerun as attempt {frame.attempt + 1}?", body, yes="Apply and rerun", no="Change nothing"
            ),
            decided,
        )

    def action_predict(self) -> None:
        """Predict for a run that nobody predicts for: one that goes on, or one that has ended."""
        frame, model = self.host.frame, self.host.model
        if frame is None or model is None or _has_rows(frame):
            return
        if frame.is_attached:
            self.notify("an attached job is not ours to run again; oomscope run predicts its fixes")
            return
        if frame.is_active:
            self.host.ask("predict", "fixes are predicted as soon as this attempt has ended")
            return

        def decided(yes: bool | None) -> None:
            if yes:
                self._take_up(model.session)

        body: list[str | tuple[str, str]] = [
            "The script is run on a simulated device, once for each fix, two at a time:",
            "",
            ("  " + " ".join(frame.command), "heading"),
            "",
            "No GPU is used. What the script writes, except by torch.save, is written again.",
        ]
        dialog = Confirm("Predict fixes for this run?", body, yes="Predict", no="Not now")
        self.app.push_screen(dialog, decided)

    def _take_up(self, session: Session) -> None:
        from oomscope.launch.supervised import predict_ended

        try:
            predict_ended(session)
        except (OomscopeError, OSError) as error:
            self.notify(str(error), severity="error")
        else:
            self.notify("predicting; this screen fills by itself")

    def action_back(self) -> None:
        self.host.action_go("oom")


def _missing(frame: Frame) -> tuple[str, str]:
    if frame.state == "predicting":
        said = frame.progress.sentence() if frame.progress else "The first prediction run is starting"
        return "Predicting what each fix would do.", f"{said}. This screen fills by itself."
    if frame.state == "diagnosing":
        return "Finding the cause first.", "Fixes are predicted as soon as it is known."
    if frame.state in ("starting", "running", "stopping"):
        return (
            "Nothing to fix so far.",
            "Fixes are predicted by themselves after an out-of-memory error; P predicts them at the end of any run.",
        )
    if frame.state == "done":
        return (
            "This run did not run out of memory.",
            "Press P to predict what each fix would save, 5 to compare its attempts.",
        )
    return (
        "No fixes were predicted for this session.",
        f"Press P to predict them, or in a shell: oomscope fix {frame.target}",
    )


def _has_rows(frame: Frame) -> bool:
    return frame.fixes is not None and bool(frame.fixes.rows)
