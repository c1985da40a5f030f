"""What `oomscope run` says on stderr: one line per event, the verdict, the fixes, and the proof.

Plain text without colour or box characters beyond punctuation, 80 columns wide, so that it reads the same in a terminal
without screens, in a CI log and in a mail.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from oomscope.collect.outside import exit_meaning
from oomscope.protocol import layout
from oomscope.store.files import read_json
from oomscope.store.session import Attempt, Session
from oomscope.views import compare, run_summary, wording
from oomscope.views import diagnosis as diagnosis_view
from oomscope.views import fixes as fixes_view

WIDTH = 80

#: A shell's exit code of a process that a signal ended is this plus the signal's number.
_SIGNALLED = 128


class Narrator:
    """Turns the records of the loop into text as they come, or afterwards from the session folder."""

    def __init__(self, session: Session, stream: TextIO) -> None:
        self.session = session
        self.stream = stream
        self._told: tuple[int, object] | None = None
        self._tellers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "attempt_started": self._started,
            "attempt_ended": self._ended,
            "diagnosed": self._diagnosed,
            "predicting": self._predicting,
            "predicted": self._predicted,
            "proved": self._proved,
            "decision": self._decided,
            "note": lambda record: self.say(str(record["text"])),
        }

    def say(self, text: str) -> None:
        """One line of narration, with our name in front: the job's own lines stand around it."""
        self.stream.write(f"oomscope: {text}\n")
        self.stream.flush()

    def event(self, record: Mapping[str, Any]) -> None:
        """Tell one record of supervisor.jsonl; kinds that nobody needs to read are passed over."""
        teller = self._tellers.get(str(record.get("k")))
        if teller is not None:
            teller(record)

    def replay(self) -> None:
        """Tell the whole session from its folder, for somebody who leaves the screens."""
        for record in self.session.supervisor_records():
            if record.get("k") != "predicting":
                self.event(record)

    def finish(self, *, exit_code: int, oom: bool) -> None:
        """The last lines: where everything is kept, and the next command when the failure is not cured."""
        self.say(f"session {self.session.path}")
        attempts = self.session.attempts()
        catalogue = fixes_view.read((attempts[-1].fixes() if attempts else None) or {})
        if oom and catalogue.recommended:
            self.say(
                f"to try the recommended fix: oomscope fix {self.session.id} --apply {','.join(catalogue.recommended)}"
            )
        elif exit_code and not oom:
            self._explain_exit(attempts[-1] if attempts else None, exit_code)

    def _explain_exit(self, attempt: Attempt | None, exit_code: int) -> None:
        """Why a job failed that did not run out of device memory; what is not known is not claimed."""
        findings = diagnosis_view.read((attempt.findings() if attempt else None) or {})
        asked = any(record.get("k") == "signal" for record in self.session.supervisor_records())
        if findings.verdicts or asked:
            self.say(f"the job ended with exit code {exit_code}")
        elif exit_code > _SIGNALLED:
            self.say(f"{exit_meaning(exit_code).text} (exit code {exit_code})")
        else:
            self.say(f"the job ended with exit code {exit_code}; nothing says that memory ran out")

    def _started(self, record: Mapping[str, Any]) -> None:
        fixes = ", ".join(record.get("fixes") or ())
        if fixes:
            self.say(f"attempt {record['attempt']} with {fixes}")

    def _ended(self, record: Mapping[str, Any]) -> None:
        attempt = self._attempt(record)
        row = _row(self.session, attempt)
        self.say(compare.sentence(row))
        for text in _unseen(attempt.result() or {}, simulated=bool(attempt.info().get("device"))):
            self.say(text)

    def _diagnosed(self, record: Mapping[str, Any]) -> None:
        attempt = self._attempt(record)
        findings = diagnosis_view.read(attempt.findings() or {}, attempt=attempt.number)
        before, self._told = self._told, (attempt.number, record.get("rule"))
        if self._told == before:
            return  # the second look, after the predictions, came to the same
        if findings.verdicts or (attempt.result() or {}).get("oom"):
            self._write(diagnosis_lines(findings))

    def _predicting(self, record: Mapping[str, Any]) -> None:
        self.say(f"predicting: {record['fix']} ({record['done']} of {record['total']})")

    def _predicted(self, record: Mapping[str, Any]) -> None:
        self._write(fix_lines(fixes_view.read(self._attempt(record).fixes() or {})))

    def _decided(self, record: Mapping[str, Any]) -> None:
        by = {"option": "as asked", "recommendation": "recommended", "user": "chosen"}[str(record["by"])]
        self.say(f"applying {', '.join(record['fixes'])} ({by})")

    def _proved(self, record: Mapping[str, Any]) -> None:
        attempt = self._attempt(record)
        proof = read_json(attempt.path / layout.PROOF_FILE)
        self._write(proof_lines(_row(self.session, attempt), proof or {}))

    def _attempt(self, record: Mapping[str, Any]) -> Attempt:
        number = int(record["attempt"])
        return next(each for each in self.session.attempts() if each.number == number)

    def _write(self, lines: Iterable[str]) -> None:
        self.stream.write("\n" + "\n".join(lines) + "\n\n")
        self.stream.flush()


def _unseen(result: Mapping[str, Any], *, simulated: bool) -> Iterable[str]:
    """What a finished job gave nothing to see of, so that a short report is not taken for a clean one."""
    ranks = result.get("ranks") or ()
    size = run_summary.world_size(result) or 1
    if simulated and len(ranks) < size:
        names = ", ".join(str(rank.get("rank")) for rank in ranks)
        yield f"simulated: rank {names} of {size} ranks; the others were not run (--ranks chooses)"
    if result.get("exit_code") != 0:
        yield from _failure(result)
        return
    if not ranks:
        yield "no training process was seen (one that imports torch and trains), so its memory is not known"
    elif not any(rank.get("steps") for rank in ranks):
        yield "no optimizer step was seen: the peaks are those of the whole run, and growth cannot be judged"


def _failure(result: Mapping[str, Any]) -> Iterable[str]:
    """What ended the first rank that failed, where several ranks speak or this one's words went to a file."""
    ranks = result.get("ranks") or ()
    failed = next((rank for rank in ranks if rank.get("rank") == result.get("first_failing_rank")), None)
    if failed is not None and len(ranks) > 1 and failed.get("exception"):
        yield f"rank {failed['rank']} failed: {str(failed['exception']).splitlines()[0][:300]}"


def diagnosis_lines(findings: diagnosis_view.Diagnosis) -> list[str]:
    """The verdict with its evidence, and the three questions with their answers."""
    lines = [f"  {findings.what_happened()}"] if findings.what_happened() else []
    verdict = findings.verdict
    if findings.recovered:
        lines += _field("RECOVERED", findings.recovered)
    if verdict is None:
        lines.append("  VERDICT    unknown: the evidence decides nothing")
    else:
        lines += _field("CAUSE" if findings.recovered else "VERDICT", verdict.headline())
        lines += _field("", verdict.explanation)
        for fact in verdict.evidence:
            lines += _item("-", fact.text + (f" [{fact.source}]" if fact.source else ""))
        if verdict.where is not None:
            place = verdict.where
            lines += _field("WHERE", f"{place.file}:{place.line}  {place.source.strip()}")
        for gap in verdict.missing:
            lines += _item("?", f"not known: {gap.what}; to find out: {gap.capture}")
    walked = [node for node in findings.flow if node.on_path]
    if walked:
        lines += ["", "  QUESTIONS"]
        for node in walked:
            reason = f"  {node.evidence[0].text}" if node.evidence else ""
            text = f"{'  ' * node.depth}{node.question} {node.answer.upper()}{reason}"
            lines += textwrap.wrap(text, WIDTH - 4, initial_indent="    ", subsequent_indent="      ")
    return lines


def fix_lines(fixes: fixes_view.Fixes) -> list[str]:
    """The fixes that help, best first, then those that do not, with the reason."""
    wanted = [row for row in fixes.rows if row.applicable and row.effective is not False]
    helpful = [(row, row.predicted) for row in wanted if row.predicted is not None]
    useless = [row for row in fixes.rows if row.applicable and row.effective is False]
    capacity = wording.size(fixes.capacity_bytes)
    lines = [f"  FIXES      predicted by: {fixes.basis or 'nothing'}; capacity {capacity}", ""]
    if helpful:
        lines.append(f"    {'':2}{'fix':<22}{'peak GiB':>9} {'interval':>13}  {'fits':<8}{'time':<7}risk")
    for row, predicted in helpful:
        marked = fixes.recommended == (row.id,)
        lines.append("    " + _prediction_row(row.id, predicted, row.risk, marked=marked))
    for plan in fixes.plans:
        if len(plan.fixes) > 1 and plan.predicted is not None:
            marked = set(plan.fixes) == set(fixes.recommended)
            lines.append("    " + _prediction_row(" + ".join(plan.fixes), plan.predicted, "", marked=marked))
    if not helpful:
        lines.append("    none that applies is known to help")
    lines += _remarks("not predicted:", [row for row in wanted if row.predicted is None])
    lines += _remarks("no help here:", useless)
    for sentence in filter(None, (fixes.note, fixes.outlook)):
        lines += ["", *textwrap.wrap(sentence, WIDTH - 4, initial_indent="    ", subsequent_indent="    ")]
    return lines


def _remarks(heading: str, rows: Sequence[fixes_view.FixRow]) -> list[str]:
    by_note: dict[str, list[str]] = {}
    for row in rows:
        by_note.setdefault(row.unpredicted or row.note(), []).append(row.id)
    lines = ["", f"    {heading}"] if rows else []
    for note, ids in by_note.items():
        remark = f"{', '.join(ids)}: {note}"
        lines += textwrap.wrap(remark, WIDTH - 6, initial_indent="      ", subsequent_indent="        ")
    return lines


def proof_lines(row: compare.AttemptRow, proof: Mapping[str, Any]) -> list[str]:
    """Predicted beside reached, and what happened to the loss."""
    lines = [f"  PROOF      attempt {row.number} with {' + '.join(row.fixes)}: {row.outcome()}", ""]
    lines += _proved_peak(row)
    loss = proof.get("loss")
    if loss:
        detail = proof.get("loss_detail")
        lines += _field("loss", f"{loss}{f': {detail}' if detail else ''}", indent=4)
    if proof.get("accepted") is False:
        lines += _field("accepted", f"no: {proof.get('why_not_accepted')}", indent=4)
    return lines


def _proved_peak(row: compare.AttemptRow) -> list[str]:
    if row.reached_bytes is None and row.predicted is None:  # a job without a GPU
        return [f"    {'peak host memory':<22}{wording.size(row.peak_rss_bytes):>13}"]
    lines = [f"    {'peak reserved':<22}{'GiB':>9}"]
    if row.predicted is not None:
        span = f"({wording.gib(row.predicted.low_bytes, 2)} to {wording.gib(row.predicted.high_bytes, 2)})"
        lines.append(f"    {'predicted':<22}{wording.gib(row.predicted.peak_bytes, 2):>9}  {span}")
    inside = {True: "  inside the interval", False: "  OUTSIDE the interval", None: ""}[row.within()]
    lines.append(f"    {row.word:<22}{wording.gib(row.reached_bytes, 2):>9}{inside}")
    lines.append(f"    {'capacity':<22}{wording.gib(row.capacity_bytes, 2):>9}")
    return lines


def _prediction_row(name: str, predicted: fixes_view.Prediction, risk: str, *, marked: bool) -> str:
    span = f"{wording.gib(predicted.low_bytes, 2)}–{wording.gib(predicted.high_bytes, 2)}"
    time = wording.factor(predicted.time_factor)
    peak = wording.gib(predicted.peak_bytes, 2)
    return f"{'> ' if marked else '  '}{name:<22}{peak:>9} {span:>13}  {predicted.verdict():<8}{time:<7}{risk}".rstrip()


def _row(session: Session, attempt: Attempt) -> compare.AttemptRow:
    """The row of `attempt`, with the prediction that was made for its fixes before it started."""
    info = attempt.info()
    chosen = tuple(info.get("fixes") or ())
    predicted = None
    for earlier in session.attempts():
        if earlier.number < attempt.number and chosen:
            predicted = fixes_view.read(earlier.fixes() or {}).predicted_for(chosen) or predicted
    return compare.attempt_row(
        attempt.number, info, attempt.result() or {}, predicted=predicted, simulated=bool(info.get("device"))
    )


def _field(name: str, text: str, *, indent: int = 2) -> list[str]:
    head = " " * indent + f"{name:<11}"
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) if text else []


def _item(mark: str, text: str) -> list[str]:
    head = " " * 13
    return textwrap.wrap(text, WIDTH, initial_indent=f"{head}{mark} ", subsequent_indent=head + "  ")
