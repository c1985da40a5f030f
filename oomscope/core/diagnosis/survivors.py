"""What was alive at the failure, and what outlived its step, from a snapshot's analysis.

Judged just before the `oom` row, not at the end of the file: a snapshot taken after the exception has unwound
shows a card that is almost empty, and would make every shortage look like fragmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from oomscope.core.diagnosis.evidence import GrowthGroup, LiveGroup, Where
from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.core.snapshot.categories import Category
from oomscope.core.snapshot.columns import BoolArray, Frame, IntArray
from oomscope.core.snapshot.lifetimes import BEFORE
from oomscope.core.snapshot.stack_rules import is_user_code

MAX_GROUPS = 40
MIN_BIRTH_STEPS = 3
"""Survivors of fewer steps are state that appeared, not growth."""
WARM_UP_STEPS = 2
"""Steps 0 and 1 make gradients and optimizer state, which rightly survive."""

NAMES = {
    Category.PARAMETERS: "parameter",
    Category.GRADIENTS: "gradient",
    Category.OPTIMIZER_STATE: "optimizer",
    Category.ACTIVATIONS: "activation",
    Category.TEMPORARIES: "temporary",
    Category.COLLECTIVES: "communication",
    Category.WORKSPACES: "workspace",
    Category.BEFORE_HISTORY: "before",
    Category.UNKNOWN: "other",
}
SourceLine = Callable[[str, int], str]
"""(file, line) -> the text of that line, "" when unknown."""


@dataclass(frozen=True)
class StepEnds:
    """Ends of the steps that the agent saw; parallel, ascending."""

    steps: tuple[int, ...]
    time_us: tuple[int, ...]


def user_chain(frames: Sequence[Frame]) -> list[Frame]:
    """Frames in the user's own files, innermost first."""
    return [frame for frame in frames if is_user_code(frame)]


def _where(frame: Frame | None, source: SourceLine) -> Where | None:
    if frame is None:
        return None
    return Where(frame.file, frame.line, frame.function, source(frame.file, frame.line))


def live_groups(analysis: DeviceAnalysis, source: SourceLine) -> tuple[LiveGroup, ...]:
    """The live set at the focus, grouped by category and innermost user line, largest first."""
    alive = np.flatnonzero(analysis.alive(analysis.focus.row))
    lives, stacks = analysis.lives, analysis.snapshot.stacks
    key = lives.stack[alive].astype(np.int64) * len(Category) + analysis.category[alive]
    groups: dict[tuple[str, Frame | None], list[int]] = {}
    callers: dict[tuple[str, Frame | None], Frame | None] = {}
    for number in np.unique(key).tolist():
        sizes = lives.size[alive[key == number]]
        stack, kind = divmod(number, len(Category))
        user = user_chain(stacks[stack]) if stack >= 0 else []
        group = (NAMES[Category(kind)], user[0] if user else None)
        entry = groups.setdefault(group, [0, 0, 0])
        entry[0] += int(sizes.sum())
        entry[1] += len(sizes)
        entry[2] = max(entry[2], int(sizes.max()))
        callers.setdefault(group, user[-1] if user else None)
    ranked = sorted(groups.items(), key=lambda item: -item[1][0])[:MAX_GROUPS]
    return tuple(
        LiveGroup(total, count, kind, _where(frame, source), _where(callers[kind, frame], source), biggest)
        for (kind, frame), (total, count, biggest) in ranked
    )


def growth(analysis: DeviceAnalysis, ends: StepEnds, source: SourceLine) -> GrowthGroup | None:
    """Survivors of earlier steps at the focus, if at least `MIN_BIRTH_STEPS` steps left some."""
    if len(ends.steps) < MIN_BIRTH_STEPS or not analysis.device.events.has_times:
        return None
    lives = analysis.lives
    alive = np.flatnonzero(analysis.alive(analysis.focus.row) & (lives.birth > BEFORE))
    step = _birth_steps(analysis.device.events.time_us[lives.birth[alive]], ends)
    alive, step = alive[step >= WARM_UP_STEPS], step[step >= WARM_UP_STEPS]
    stack = lives.stack[alive]
    growing = [
        one for one in np.unique(stack).tolist() if len(np.unique(step[stack == one])) >= MIN_BIRTH_STEPS
    ]
    if not growing:
        return None
    chosen: BoolArray = np.isin(stack, np.asarray(growing))
    births = np.unique(step[chosen]).tolist()
    chains = [user_chain(analysis.snapshot.stacks[one])[::-1] for one in growing if one >= 0]
    caller, inner = _shared(chains)
    total = int(lives.size[alive[chosen]].sum())
    kinds = {NAMES[Category(each)] for each in np.unique(analysis.category[alive[chosen]]).tolist()}
    return GrowthGroup(
        bytes=total,
        count=int(chosen.sum()),
        per_step_bytes=total / len(births),
        births=tuple(births),
        where=_where(inner, source),
        caller=_where(caller, source),
        stacks=len(growing),
        categories=tuple(sorted(kinds)),
    )


def _birth_steps(time_us: IntArray, ends: StepEnds) -> IntArray:
    """Step in which each time lies; -1 for the step that was running at the failure."""
    numbers = np.asarray([*ends.steps, -1], np.int64)
    place = np.searchsorted(np.asarray(ends.time_us, np.int64), time_us, side="left")
    found: IntArray = numbers[place]
    return found


def _shared(chains: Sequence[Sequence[Frame]]) -> tuple[Frame | None, Frame | None]:
    """(line of the loop, innermost line) that the chains of user frames, outermost first, have in common.

    Where the chains share only the way into the loop's function (`main()`), the line of that function from
    which most of them come counts; lines of a module's forward are below the loop, and never stand for it.
    """
    useful = [chain for chain in chains if chain]
    if not useful:
        return None, None
    common: list[Frame] = []
    for frames in zip(*useful, strict=False):
        if any(frame != frames[0] for frame in frames):
            break
        common.append(frames[0])
    following = [chain[len(common)] for chain in useful if len(chain) > len(common)]
    usual = max(dict.fromkeys(following), key=following.count, default=None)
    if not common:
        return usual, usual
    loop = _outside_modules(common)
    if usual is not None and loop is common[-1] and usual.file == loop.file and not _is_module_code(usual):
        return usual, usual
    return loop, common[-1]


def _outside_modules(common: Sequence[Frame]) -> Frame:
    """The innermost shared frame above any module's forward."""
    loop = common[0]
    for frame in common:
        if _is_module_code(frame):
            break
        loop = frame
    return loop


def _is_module_code(frame: Frame) -> bool:
    return frame.function in ("forward", "__call__", "training_step")
