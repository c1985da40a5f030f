"""What was alive at the failure, and what outlived its step, from a snapshot's analysis.

Judged just before the `oom` row, not at the end of the file: a snapshot taken after the exception has unwound
shows a card that is almost empty, and would make every shortage look like fragmentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from oomscope.core.diagnosis.evidence import GrowthGroup, LiveGroup, Where
from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.core.snapshot.categories import Category
from oomscope.core.snapshot.columns import Action, BoolArray, Frame, IntArray, StackTable
from oomscope.core.snapshot.lifetimes import BEFORE
from oomscope.core.snapshot.stack_rules import Origin, is_user_code

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
        loaded = stack >= 0 and _is_loaded(stacks[stack], user, source)
        name = "loaded" if loaded else NAMES[Category(kind)]
        if name == "other" and analysis.facts.origin[stack + 1] == Origin.FORWARD:
            name = "forward"  # no backward was seen yet, so nobody can tell whether it would have been kept for one
        group = (name, user[0] if user else None)
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


_LOADS = re.compile(r"\btorch\.load\(|\bload_file\(|\bload_checkpoint\(")


def _is_loaded(frames: Sequence[Frame], user: Sequence[Frame], source: SourceLine) -> bool:
    """Made by torch.load: a checkpoint's own tensors."""
    if any(frame.file.replace("\\", "/").endswith("torch/serialization.py") for frame in frames):
        return True
    return bool(user) and _LOADS.search(source(user[0].file, user[0].line)) is not None


def growth(analysis: DeviceAnalysis, ends: StepEnds, source: SourceLine) -> GrowthGroup | None:
    """Survivors of earlier steps at the focus, if at least `MIN_BIRTH_STEPS` steps left some.

    Where no optimizer steps were seen (inference, a total summed before one backward) the iterations of the loop
    take their place.
    """
    lives = analysis.lives
    alive = np.flatnonzero(analysis.alive(analysis.focus.row) & (lives.birth > BEFORE))
    if len(ends.steps) >= MIN_BIRTH_STEPS and analysis.device.events.has_times:
        born = _birth_steps(analysis.device.events.time_us[lives.birth[alive]], ends)
        return _survivors(analysis, alive, born, source, unit="step")
    iterations = loop_iterations(analysis)
    if iterations is None:
        return None
    return _survivors(analysis, alive, iterations[lives.birth[alive]], source, unit="iteration")


def _survivors(
    analysis: DeviceAnalysis, alive: IntArray, born: IntArray, source: SourceLine, *, unit: str
) -> GrowthGroup | None:
    """Of the allocations `alive`, born in the steps `born`, those whose stacks left some in several steps."""
    lives = analysis.lives
    alive, born = alive[born >= WARM_UP_STEPS], born[born >= WARM_UP_STEPS]
    stack = lives.stack[alive]
    growing = [
        one for one in np.unique(stack).tolist() if len(np.unique(born[stack == one])) >= MIN_BIRTH_STEPS
    ]
    if not growing:
        return None
    chosen: BoolArray = np.isin(stack, np.asarray(growing))
    births = np.unique(born[chosen]).tolist()
    chains = [user_chain(analysis.snapshot.stacks[one])[::-1] for one in growing if one >= 0]
    caller, inner = _shared(chains)
    total = int(lives.size[alive[chosen]].sum())
    return GrowthGroup(
        bytes=total,
        count=int(chosen.sum()),
        per_step_bytes=total / len(births),
        births=tuple(births),
        where=_where(inner, source),
        caller=_where(caller, source),
        stacks=len(growing),
        categories=_kinds(analysis, alive[chosen]),
        unit=unit,
    )


def _kinds(analysis: DeviceAnalysis, chosen: IntArray) -> tuple[str, ...]:
    """Categories of allocations; what a forward made and nobody can judge further is "forward"."""
    found = {NAMES[Category(each)] for each in np.unique(analysis.category[chosen]).tolist()}
    unknown = chosen[analysis.category[chosen] == Category.UNKNOWN]
    origin = analysis.facts.origin[analysis.lives.stack[unknown] + 1]
    if len(origin) and bool((origin == Origin.FORWARD).any()):
        found.add("forward")
    return tuple(sorted(found))


def loop_iterations(analysis: DeviceAnalysis) -> IntArray | None:
    """(n_events,) int64: iteration of the user's loop in which each allocation was made, -1 elsewhere.

    Counted since the last backward or optimizer step. A loop shows in the lines of its function: each time they go
    back, a new iteration has begun. None when no function on the failing stack goes back `MIN_BIRTH_STEPS` times.
    """
    events, stacks = analysis.device.events, analysis.snapshot.stacks
    last = min(analysis.focus.row, len(events) - 1)
    rows = np.flatnonzero(events.action[: last + 1] == Action.ALLOC)
    origin = analysis.facts.origin[events.stack[rows] + 1]
    ends = np.flatnonzero(np.isin(origin, (Origin.BACKWARD, Origin.GRADIENT, Origin.OPTIMIZER, Origin.EMPTY)))
    rows = rows[ends[-1] + 1 :] if len(ends) else rows
    if len(rows) < MIN_BIRTH_STEPS:
        return None
    failing = analysis.ooms[-1].stack if analysis.ooms else int(events.stack[rows[-1]])
    best: IntArray | None = None
    most = MIN_BIRTH_STEPS
    for candidate in _above_modules(stacks[failing] if failing >= 0 else []):
        line = _line_in(candidate, stacks)[events.stack[rows]]
        inside = rows[line >= 0]
        line = line[line >= 0]
        back = np.concatenate([[False], line[1:] < line[:-1]]) if len(line) else np.zeros(0, np.bool_)
        if int(back.sum()) > most:
            most = int(back.sum())
            best = np.full(len(events), -1, np.int64)
            best[inside] = np.cumsum(back)
    return best


def _above_modules(frames: Sequence[Frame]) -> list[Frame]:
    """The user's frames above any module's forward, outermost first: where loops over batches are."""
    found = []
    for frame in reversed(frames):
        if frame.function in ("forward", "_call_impl", "_wrapped_call_impl"):
            break
        if is_user_code(frame):
            found.append(frame)
    return found


def _line_in(function: Frame, stacks: StackTable) -> IntArray:
    """(n_stacks,) int64: the line of each stack in that function, -1 for stacks that do not pass through it."""
    lines = np.full(len(stacks), -1, np.int64)
    for number in range(len(stacks)):
        for frame in stacks[number]:
            if frame.file == function.file and frame.function == function.function:
                lines[number] = frame.line
                break
    return lines


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
