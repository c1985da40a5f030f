"""The largest value of a script's own option with which it fits on a simulated card.

Each probe runs the script on a device without a limit, so that the peak is known also where it does not
fit. Live bytes above the capacity cannot fit and reserved bytes below it always do; in between, a second
run with the card's own capacity decides.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oomscope.errors import JobError, UsageError
from oomscope.launch.job import JobResult, JobSpec, run_job
from oomscope.store.session import Attempt, Session

#: Bytes of the device of a probe: more than any card, so that the peak is always reached.
UNLIMITED_BYTES = 1 << 46
#: Probes that are made at most; bisection of a million values needs twenty.
MAX_PROBES = 40


@dataclass(frozen=True, slots=True)
class Point:
    """One value that was tried."""

    value: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    fits: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True)
class Option:
    """How a script spells one of its options, and the command line without it."""

    flag: str
    """ "--batch-size"."""
    joined: bool
    """Written as --name=value."""
    current: int | None
    command: tuple[str, ...]

    def with_value(self, value: int) -> tuple[str, ...]:
        """The command line with this value."""
        last = (f"{self.flag}={value}",) if self.joined else (self.flag, str(value))
        return (*self.command, *last)


def find_option(name: str, command: Sequence[str], script: Path | None) -> Option:
    """Find the script's option `name` ("batch_size", with dashes or underscores).

    It is looked for on the command line, then in the text of the script and of its neighbours that it
    imports.

    Raises:
        UsageError: the script has no such option, or its value is not a number.
    """
    bare = name.lstrip("-").rstrip("=")
    spellings = ["--" + bare.replace("_", "-"), "--" + bare.replace("-", "_")]
    words = list(command)
    for position, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag not in spellings and not _is_key(flag, bare, alone=not equals):
            continue
        if equals:
            return Option(flag, True, _number(flag, value), tuple(words[:position] + words[position + 1 :]))
        if position + 1 < len(words):
            rest = tuple(words[:position] + words[position + 2 :])
            return Option(flag, False, _number(flag, words[position + 1]), rest)
    text = _text(script)
    for flag in spellings:
        if re.search(rf"[\"']{re.escape(flag)}[\"']", text):
            return Option(flag, False, _default(text, flag), tuple(words))
    assigned = re.search(rf"^{re.escape(bare.replace('-', '_'))}\s*=\s*(\d+)", text, re.M)
    if assigned:  # scripts whose settings are global variables, overridden by --name=value
        return Option("--" + bare.replace("-", "_"), True, int(assigned.group(1)), tuple(words))
    if re.search(_HIDDEN_OPTIONS, text):  # the options are fields of classes elsewhere
        return Option("--" + bare.replace("-", "_"), False, None, tuple(words))
    if name.startswith("--") or name.endswith("="):  # spelled out: whether it is one shows in the peaks
        return Option(name.rstrip("="), name.endswith("="), None, tuple(words))
    known = sorted(set(re.findall(r"[\"'](--[A-Za-z][\w-]*)[\"']", text)))
    near = difflib.get_close_matches(spellings[0], known, n=1, cutoff=0.4)
    raise UsageError(
        f"--max {name}: {script.name if script else 'the command'} has no option {spellings[0]}",
        hint=f"did you mean {near[0]}?"
        if near
        else f"write it as the script takes it: --max --{bare}, or --max {bare}= for {bare}=8",
    )


#: Parsers that make options of the fields of dataclasses, such as TrainingArguments.
_HIDDEN_OPTIONS = r"\b(HfArgumentParser|TrlParser)\b"


def _is_key(word: str, name: str, *, alone: bool) -> bool:
    """Whether `word` is the key of a setting "group.name" of that name, as hydra and option groups write it."""
    if not word.startswith("--") and (alone or word.startswith("-")):
        return False
    key = word.lstrip("-+").replace("-", "_")
    wanted = name.replace("-", "_")
    return key == wanted or key.endswith("." + wanted)


def _number(flag: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{flag} {value}: not a whole number") from None


def _text(script: Path | None) -> str:
    """The script and the modules beside it that it imports."""
    if script is None:
        return ""
    text = _read(script)
    for name in re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.M):
        text += "\n" + _read(script.parent / f"{name}.py")
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _default(text: str, flag: str) -> int | None:
    """The default that an argparse script gives the option."""
    try:
        tree = ast.parse(text.replace("from __future__", "from builtins"))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(
            isinstance(a, ast.Constant) and a.value == flag for a in node.args
        ):
            for keyword in node.keywords:
                value = keyword.value
                if (
                    keyword.arg == "default"
                    and isinstance(value, ast.Constant)
                    and isinstance(value.value, int)
                ):
                    return value.value
    return None


def largest(
    probe: Callable[[int], Point],
    start: int,
    *,
    limit: int,
    lowest: int = 1,
    highest: int | None = None,
    multiple: int = 1,
) -> tuple[int | None, list[Point]]:
    """The largest multiple of `multiple` in [`lowest`, `highest`] that fits, and every point tried, by value.

    Memory grows almost linearly with such options, so the next value is guessed from the points around the
    border and from `limit`, the card's bytes; every third time the middle is taken, as guesses may creep
    along one side. None when not even `lowest` fits.
    """
    points: dict[int, Point] = {}
    bottom = -(-lowest // multiple) * multiple
    top = None if highest is None else max(highest // multiple * multiple, bottom)
    low: int | None = None
    high: int | None = None
    value: int | None = max(bottom, start // multiple * multiple)
    if top is not None and value is not None:
        value = min(value, top)
    while value is not None and len(points) < MAX_PROBES:
        points[value] = probe(value)
        _must_matter(points)
        if points[value].fits:
            low = value
        else:
            high = value
        at_an_end = value == (top if points[value].fits else bottom)
        value = None if at_an_end else _next(points, low, high, bottom, top, multiple, limit)
    return low, [points[each] for each in sorted(points)]


def _must_matter(points: dict[int, Point]) -> None:
    """Give up on an option that changes nothing.

    Raises:
        UsageError: sixteen times the value needs the same memory to the byte.
    """
    first, last = min(points), max(points)
    if last >= 16 * first and len({(each.peak_allocated_bytes, each.fits) for each in points.values()}) == 1:
        raise UsageError(
            f"the option given to --max changes nothing: the peak is the same with {first} and with {last}",
            hint="name the option by which the script takes its batch size or length, as it spells it",
        )


def _next(
    points: dict[int, Point],
    low: int | None,
    high: int | None,
    bottom: int,
    top: int | None,
    multiple: int,
    limit: int,
) -> int | None:
    """The next value to try; None when the border is found."""
    if low is None:
        assert high is not None
        return max(bottom, high // 2 // multiple * multiple)
    if high is not None and high - low <= multiple:
        return None
    known = sorted(points)
    first, second = (low, high) if high is not None else (known[-2:] if len(known) > 1 else (low, low))
    guess = _crossing(points[first], points[second], limit)
    if high is None:
        value = min(max(guess or low * 2, low + multiple), low * 8) // multiple * multiple
        return value if top is None else min(value, top)
    if guess is None or len(points) % 3 == 0:
        guess = (low + high) // 2
    return min(max(guess // multiple * multiple, low + multiple), high - multiple)


def _crossing(first: Point, second: Point, limit: int) -> int | None:
    """Where the line through two points reaches `limit`, None when it never does."""
    rise = second.peak_reserved_bytes - first.peak_reserved_bytes
    if rise <= 0:
        return None
    return first.value + int((limit - first.peak_reserved_bytes) * (second.value - first.value) / rise)


class Prober:
    """Runs the script with one value after another."""

    def __init__(
        self, spec: JobSpec, session: Session, attempt: Attempt, option: Option, capacity: int
    ) -> None:
        self.spec = spec
        self.session = session
        self.attempt = attempt
        self.option = option
        self.capacity = capacity
        """Bytes that the card hands out to one rank."""
        self.assumed: dict[str, int] = {}

    def __call__(self, value: int) -> Point:
        """Run with this value; one or two runs.

        Raises:
            JobError: the script fails for another reason than memory.
        """
        result = self._run(value, UNLIMITED_BYTES, "")
        ranks = [rank for rank in result.ranks if rank.peak_allocated_bytes is not None]
        if result.exit_code != 0 or not ranks:
            raise JobError(
                f"the script fails with {self.option.flag} {value}: {_why(result)}",
                hint=f"its output is in {self.attempt.path}",
            )
        for rank in ranks:
            for name, count in rank.assumed_values.items():
                self.assumed[name] = max(self.assumed.get(name, 0), int(count))
        allocated = max(rank.peak_allocated_bytes or 0 for rank in ranks)
        reserved = max(rank.peak_reserved_bytes or 0 for rank in ranks)
        fits = reserved <= self.capacity
        if not fits and allocated <= self.capacity:
            fits = self._run(value, None, "-limited").exit_code == 0
        return Point(value, allocated, reserved, fits)

    def _run(self, value: int, capacity: int | None, suffix: str) -> JobResult:
        folder = self.attempt.prediction(f"{self.option.flag.strip('-')}-{value}{suffix}")
        spec = replace(
            self.spec,
            command=self.option.with_value(value),
            attempt_dir=folder.path,
            capacity_bytes=capacity,
        )
        return run_job(spec, session=self.session)


def _why(result: JobResult) -> str:
    for rank in result.ranks:
        if rank.exception:
            return str(rank.exception).splitlines()[0]
    return f"exit code {result.exit_code}"
