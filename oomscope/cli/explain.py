"""`oomscope explain`: what an out-of-memory failure says, from a log, a pasted text, a snapshot or a session."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oomscope.errors import ExitCode, InputError, UsageError

if TYPE_CHECKING:
    from oomscope.core.diagnosis.evidence import Evidence
    from oomscope.core.diagnosis.log import LogReading


@click.command()
@click.argument("source", required=False)
@click.option("--text", "pasted", metavar="TEXT", help="The error text itself.")
@click.option("--about", default="", metavar="WORDS", help="What you saw, in your own words; weak evidence.")
@click.option("--rank", type=click.IntRange(0), help="Judge this rank of a session.")
@click.option("--job", type=click.IntRange(1), help="Judge this run of a log that holds several.")
@click.option(
    "--answer",
    "answers",
    multiple=True,
    metavar="QUESTION=yes|no",
    help="Walk the flowchart with your answer in place of the one found, as in Q3.1b=yes. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object (oomscope.diagnosis/1).")
@click.option("--markdown", "as_markdown", is_flag=True, help="Markdown, to paste into an issue.")
@click.option("--guide", is_flag=True, help="Show what the usual flowchart says at each question, corrected.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when a cause was found.")
def explain(
    source: str | None,
    pasted: str | None,
    about: str,
    rank: int | None,
    job: int | None,
    answers: tuple[str, ...],
    as_json: bool,
    as_markdown: bool,
    guide: bool,
    exit_code: bool,
) -> int:
    """Explain an out-of-memory failure.

    SOURCE is a log file, a memory snapshot, a session (folder, id or "last"), or "-" for standard input.
    """
    if pasted is not None and source is not None:
        raise UsageError("give either a source or --text, not both")
    if as_json and as_markdown:
        raise UsageError("give either --json or --markdown, not both")
    given = _answers(answers)
    evidence, reading = _evidence(source, pasted, about, rank, job)
    from oomscope.live.judge import judge
    from oomscope.report import diagnosis as report

    try:
        diagnosis = judge(evidence, given)
    except ValueError as error:
        raise UsageError(f"--answer: {error}") from error
    findings = diagnosis.to_json()
    nothing = ""
    if reading is not None and not evidence.failed and not diagnosis.verdicts:
        nothing = report.nothing_found(reading.other_tracebacks, reading.lines)
        findings["notes"].append(nothing)
    if as_json:
        click.echo(json.dumps(findings, indent=1))
    elif nothing:
        click.echo(nothing)
    elif as_markdown:
        click.echo(report.markdown(findings), nl=False)
    else:
        click.echo(report.text(findings, guide=guide), nl=False)
    found = diagnosis.verdict is not None and diagnosis.verdict.rule.cause != "unknown"
    return int(ExitCode.ANSWER_IS_NO) if exit_code and found else int(ExitCode.DONE)


def _answers(options: tuple[str, ...]) -> dict[str, str]:
    given = {}
    for option in options:
        question, separator, answer = option.partition("=")
        if not separator:
            raise UsageError(f"--answer {option}: give QUESTION=yes or QUESTION=no")
        given[question.strip()] = answer.strip().lower()
    return given


def _evidence(
    source: str | None, pasted: str | None, about: str, rank: int | None, job: int | None
) -> tuple[Evidence, LogReading | None]:
    from oomscope.live import evidence_text as texts

    chosen = None if job is None else job - 1
    if pasted is not None:
        from oomscope.core.diagnosis.log import scan_text

        reading = scan_text(pasted)
        words = f"{texts.description(pasted)}\n{about}"
        return texts.from_reading(_with_job(reading, chosen), source="text", about=words, job=chosen), reading
    if source is None or source == "-":
        if sys.stdin.isatty():
            raise UsageError(
                "nothing to explain", hint="oomscope explain train.log, or: oomscope explain < train.log"
            )
        reading = texts.read_stream(sys.stdin.buffer, "standard input")
        evidence = texts.from_reading(
            _with_job(reading, chosen), source="standard input", about=about, job=chosen
        )
        return evidence, reading
    path = Path(source)
    if path.is_file():
        return _from_file(path, about, chosen)
    return _from_session(source, rank), None


def _with_job(reading: LogReading, job: int | None) -> LogReading:
    if job is not None and job >= reading.jobs:
        raise UsageError(
            f"the log holds {reading.jobs} run{'s' if reading.jobs > 1 else ''}, there is no run {job + 1}"
        )
    return reading


def _from_file(path: Path, about: str, job: int | None) -> tuple[Evidence, LogReading | None]:
    from oomscope.live import evidence_text as texts

    try:
        with path.open("rb") as stream:
            head = stream.read(4096)
            if texts.is_snapshot(head):
                return texts.from_snapshot(path, about=about), None
            stream.seek(0)
            reading = texts.read_stream(stream, str(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    return texts.from_reading(_with_job(reading, job), source="log", about=about, job=job), reading


def _from_session(source: str, rank: int | None) -> Evidence:
    from oomscope.live.evidence import collect

    folder = Path(source)
    if (folder / "procs").is_dir():  # an attempt's own folder
        return collect(folder, rank)
    if not folder.exists() and (os.sep in source or folder.suffix):
        raise InputError(f"no file or session {source}", hint="oomscope sessions lists the sessions")
    from oomscope.store.library import find

    return collect(find(source).path, rank)
