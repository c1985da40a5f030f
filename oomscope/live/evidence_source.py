"""The user's source around a failed run: which file is the script, its lines, its pitfalls, what it uses."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from oomscope.core.diagnosis.evidence import HolderFact, LintFact, Signal, Where
from oomscope.core.diagnosis.message import Frame, is_user_file
from oomscope.core.lint import features, lint
from oomscope.core.lint.additions import additions

MAX_SOURCE_BYTES = 4 << 20
MAX_FILES = 12
"""Files of the user that are read: the script and those on the stack of the failure."""


def find_script(info: Mapping[str, Any], hello: Mapping[str, Any] | None) -> Path | None:
    """The script of an attempt: named in attempt.json, else the first Python file of the command line."""
    named = info.get("script")
    cwd = Path(str(info.get("cwd") or (hello or {}).get("cwd") or "."))
    candidates: list[str] = [named] if isinstance(named, str) else []
    for words in ((hello or {}).get("argv"), info.get("command")):
        if isinstance(words, list):
            candidates += [word for word in words if isinstance(word, str) and word.endswith(".py")]
    for each in candidates:
        path = Path(each) if Path(each).is_absolute() else cwd / each
        if path.is_file():
            return path.absolute()
    return Path(candidates[0]) if candidates else None


def source_line(file: str, line: int) -> str:
    """The text of a line, "" when the file is not here."""
    return linecache.getline(file, line).strip()


def with_source(frame: Frame) -> Frame:
    """`frame` with the text of its line, where it is the user's own and at hand."""
    if frame.source or not is_user_file(frame.file):
        return frame
    return replace(frame, source=source_line(frame.file, frame.line))


def read_source(path: Path) -> str | None:
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def adding_line(holder: HolderFact) -> HolderFact:
    """`holder` with the line that adds to it, where its file is at hand and has one."""
    if holder.where is None:
        return holder
    path = Path(holder.where.file)
    text = read_source(path)
    lines = additions(text, holder.path) if text is not None else []
    if not lines:
        return holder
    first = lines[0]
    return replace(holder, where=Where(str(path), first.line, first.function, first.source))


def inspect(script: Path | None, files: Iterable[str]) -> tuple[tuple[LintFact, ...], tuple[Signal, ...]]:
    """Pitfalls and features of the script and of the user's files on the stack, the script first."""
    paths = list(dict.fromkeys([*([script] if script else []), *(Path(f) for f in files if is_user_file(f))]))
    found: list[LintFact] = []
    signals: dict[str, Signal] = {}
    for path in paths[:MAX_FILES]:
        text = read_source(path)
        if text is None:
            continue
        found += [
            LintFact(f.rule, Where(str(path), f.line, f.function, f.source), f.text) for f in lint(text)
        ]
        for feature in features(text):
            signal = Signal(feature.name, f"{path.name}:{feature.line} {feature.text}", "source code", 0.9)
            signals.setdefault(feature.name, signal)
    return tuple(found), tuple(signals.values())
