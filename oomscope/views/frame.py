"""One picture of a session at one moment, immutable: what a poll makes and every screen reads."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oomscope.store.session import default_home
from oomscope.views.compare import Comparison
from oomscope.views.composition import Composition
from oomscope.views.diagnosis import Diagnosis
from oomscope.views.events import EventLine, Progress
from oomscope.views.fixes import Fixes
from oomscope.views.headline import Alert, Headline
from oomscope.views.movers import Movers
from oomscope.views.ranks import RankRow
from oomscope.views.series import EMPTY, History

#: States in which the job itself runs.
RUNNING = frozenset({"starting", "running", "stopping"})
#: States in which the supervisor still works on the session.
ACTIVE = RUNNING | {"diagnosing", "predicting", "waiting"}


@dataclass(frozen=True)
class Frame:
    """Everything the screens show, as of one poll."""

    path: Path
    state: str
    attempt: int
    headline: Headline
    alert: Alert | None
    ranks: tuple[RankRow, ...] = ()
    histories: Mapping[int, History] = field(default_factory=dict)
    """Rank to its per-step series."""
    phase_peaks: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Rank to phase to the highest allocated bytes seen in it; empty without `--detail`."""
    events: tuple[EventLine, ...] = ()
    progress: Progress | None = None
    diagnosis: Diagnosis | None = None
    """Of the newest attempt that has one."""
    diagnosis_attempt: int = 0
    composition: Composition | None = None
    """What was in memory at the peak of the diagnosed attempt's failing rank."""
    fixes: Fixes | None = None
    fixes_attempt: int = 0
    comparison: Comparison | None = None
    movers: Movers | None = None
    """What the peaks of the first and of the newest attempt consist of; None before there are two."""
    attempt_histories: Mapping[int, History] = field(default_factory=dict)
    """Attempt to the series of its fullest rank."""
    command: tuple[str, ...] = ()
    """The command line of the current attempt, paths below `cwd` relative to it."""
    cwd: str = ""
    is_attached: bool = False
    """Whether the job was found running: the session does not own it and cannot stop it."""
    device_word: str = "measured"
    """"simulated" or "measured": what the current attempt's device numbers are."""
    exception: str = ""
    """What ended the job, when it was an exception."""
    problems: tuple[str, ...] = ()
    """What could not be read, one sentence each."""

    @property
    def target(self) -> str:
        """How the session is named to `oomscope`: by its id where commands look for it, else by its path."""
        known = self.path.parent == default_home() / "sessions"
        return shlex.quote(self.path.name if known else str(self.path))

    @property
    def is_active(self) -> bool:
        """Whether anything can still change."""
        return self.state in ACTIVE

    def problem_with(self, file: str) -> str:
        """Why `file` of an attempt cannot be read; empty when it can, or is not there."""
        return next((problem for problem in self.problems if file in problem), "")

    def row(self, rank: int) -> RankRow | None:
        return next((row for row in self.ranks if row.rank == rank), None)

    def history(self, rank: int) -> History:
        return self.histories.get(rank, EMPTY)
