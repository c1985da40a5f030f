"""Log lines made comparable: colours, boxes and prefixes off, ranks and time stamps noted, white space squeezed out.

Ranks of one job write into one log. Lines are therefore sorted into streams by their rank prefix before a
text that spans several lines is put together.
"""

from __future__ import annotations

import bisect
import datetime
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

#: Colour codes: real, as a terminal shows them ("^["), and as JSON or repr() writes them.
_ANSI = re.compile(r"(?:\x1b|\^\[|\\x1b|\\u001b|\\033)\[[0-9;?]*[A-Za-z]")
#: Borders of rich tracebacks, quotes of e-mails and issue trackers, escaped line ends inside repr().
_BORDER = re.compile(r"^\s*[│┃|>❱╭╰─]+ ?|\s*[│┃|]\s*$")
_ESCAPED_BREAK = re.compile(r"\\r?\\n|\\n")
_RANK_PREFIXES = (
    re.compile(r"\[rank ?[:=]? ?(?P<rank>\d+)\]:?\s?", re.IGNORECASE),
    re.compile(r"^\s*\[\d+,(?P<rank>\d+)\]<std(?:err|out)>:\s?"),
    re.compile(r"^\s*\(rank[ =:](?P<rank>\d+)\)\s?", re.IGNORECASE),
    re.compile(r"^\s*rank[ =:]+(?P<rank>\d+)[:\]|]\s?", re.IGNORECASE),
    re.compile(r"^\s*(?P<rank>\d{1,5}): (?=\S|\s*File )"),
)
_LABELS = re.compile(r"\[default(?P<local>\d+)\]:\s?|\((?:[\w.-]+ )?pid=\d+(?:, ip=[\d.]+)?\)\s?")
_RANK_INSIDE = re.compile(r"\bon rank (\d+)\b|\brank[=:]\s?(\d+)\b", re.IGNORECASE)
_STAMP = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[T _](?P<time>\d\d:\d\d:\d\d)(?P<frac>[.,]\d+)?"
    r"|\b[EWIF](?P<md>\d{4}) (?P<gtime>\d\d:\d\d:\d\d)(?P<gfrac>\.\d+)?"
    r"|\b(?P<otime>\d\d:\d\d:\d\d)(?P<ofrac>[.,]\d+)?\b"
)


#: The start of a new log entry: a date, a time, a progress bar.
_NEW_ENTRY = re.compile(r"\s*(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|\d+%\||\d+/\d+)")
_BREAK = "\n"
"""Stands in squeezed text between two entries; no pattern matches across it."""


def stamp_seconds(text: str) -> float | None:
    """Seconds from the first time stamp in `text`; stamps without a date count from midnight."""
    match = _STAMP.search(text)
    if match is None:
        return None
    clock = match["time"] or match["gtime"] or match["otime"]
    fraction = (match["frac"] or match["gfrac"] or match["ofrac"] or "").replace(",", ".")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    value = hours * 3600 + minutes * 60 + seconds + (float(fraction) if fraction else 0.0)
    if match["date"]:
        try:
            day = datetime.date.fromisoformat(match["date"])
        except ValueError:
            return None
        return value + (day - datetime.date(1970, 1, 1)).days * 86400.0
    if match["md"]:
        month_day = match["md"]
        value += (int(month_day[:2]) * 31 + int(month_day[2:])) * 86400.0
    return value


@dataclass(frozen=True)
class Line:
    """One cleaned line of a log."""

    number: int
    """1-based line number in the log."""
    text: str
    rank: int | None
    """From the prefix of this very line; None when it has none."""
    local_rank: int | None
    stream: str
    """Lines of one stream belong together: "r3", or "" for lines without prefix."""


def clean(number: int, raw: str, previous: str) -> Line:
    """`raw` without colours, borders and prefixes.

    A line without a prefix continues the stream `previous`.
    """
    text = _ANSI.sub("", raw.rstrip("\r\n"))
    text = _ESCAPED_BREAK.sub(" ", text)
    rank = local = None
    label = _LABELS.search(text, 0, 200)
    if label:
        local = int(label["local"]) if label["local"] is not None else None
        text = text[: label.start()] + text[label.end() :]
    for prefix in _RANK_PREFIXES:
        match = prefix.search(text, 0, 200)
        if match:
            rank = int(match["rank"])
            text = text[: match.start()] + text[match.end() :]
            break
    text = _BORDER.sub("", _BORDER.sub("", text))
    if rank is not None:
        stream = f"r{rank}"
    elif local is not None:
        stream = f"l{local}"
    else:
        stream = previous
    return Line(number, text, rank, local, stream)


def rank_inside(text: str) -> int | None:
    """A rank that the sentence itself names ("on rank 1")."""
    match = _RANK_INSIDE.search(text)
    return int(match.group(1) or match.group(2)) if match else None


@dataclass
class Stream:
    """The lines of one stream, and their squeezed text with the way back to the lines."""

    lines: list[Line] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)
    _length: int = 0

    def add(self, line: Line) -> None:
        squeezed = "".join(line.text.split())
        if self._pieces and _NEW_ENTRY.match(line.text):
            # A number at the end of the line before must not run into the time stamp of the next entry.
            self._pieces[-1] += _BREAK
            self._length += len(_BREAK)
        self.lines.append(line)
        self._starts.append(self._length)
        self._pieces.append(squeezed)
        self._length += len(squeezed)

    @property
    def squeezed(self) -> str:
        return "".join(self._pieces)

    def index_at(self, position: int) -> int:
        """Index of the line that holds the squeezed `position`."""
        return max(0, bisect.bisect_right(self._starts, position) - 1)

    def column_at(self, position: int) -> int:
        """Column of the cleaned line that the squeezed `position` falls on."""
        index = self.index_at(position)
        wanted = position - self._starts[index]
        for column, character in enumerate(self.lines[index].text):
            if not character.isspace():
                if wanted == 0:
                    return column
                wanted -= 1
        return len(self.lines[index].text)

    def digit_follows(self, position: int) -> bool:
        """A digit stands at the squeezed `position`, on the same line as the character before it."""
        index = self.index_at(position)
        return (
            self._starts[index] < position
            and self._pieces[index][position - self._starts[index] :][:1].isdigit()
        )

    def words(self, start: int, end: int, limit: int = 600) -> str:
        """The text between two squeezed positions, white space collapsed, at most `limit` characters."""
        first, last = self.index_at(start), self.index_at(max(start, end - 1))
        parts = [line.text for line in self.lines[first : last + 1]]
        parts[-1] = parts[-1][: self.column_at(max(start, end - 1)) + 1]
        parts[0] = parts[0][self.column_at(start) :]
        return " ".join(" ".join(parts).split())[:limit]


def streams(lines: Iterable[tuple[int, str]]) -> Iterator[Stream]:
    """Sort numbered raw lines into streams by rank prefix."""
    found: dict[str, Stream] = {}
    previous = ""
    for number, raw in lines:
        line = clean(number, raw, previous)
        previous = line.stream
        found.setdefault(line.stream, Stream()).add(line)
    return iter(found.values())
