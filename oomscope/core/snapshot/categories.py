"""What the memory was for: a category per allocation, and the evidence for it.

The stack says which part of the program allocated; the lifetime says whether it was kept: an optimizer's
allocation that outlives its step is state, a forward's that is still there when the backward begins is an
activation. What neither shows is "unknown", never a guess.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from oomscope.core.snapshot.columns import Action, BoolArray, IntArray
from oomscope.core.snapshot.lifetimes import BEFORE, Lifetimes
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot
from oomscope.core.snapshot.stack_rules import RULES, Origin, StackFacts
from oomscope.core.snapshot.steps import Steps


class Category(enum.IntEnum):
    """Kinds of memory, in the order in which they are listed."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER_STATE = 2
    ACTIVATIONS = 3
    TEMPORARIES = 4
    COLLECTIVES = 5
    WORKSPACES = 6
    BEFORE_HISTORY = 7
    UNKNOWN = 8

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", "-" if self is Category.BEFORE_HISTORY else " ")


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one category at one moment."""

    category: Category
    bytes: int
    blocks: int
    evidence: str


def categories(
    snapshot: Snapshot, device: DeviceSnapshot, lives: Lifetimes, facts: StackFacts, steps: Steps
) -> IntArray:
    """(n,) int64 `Category` of each allocation."""
    origin = facts.origin[lives.stack + 1]
    found = np.full(len(lives), int(Category.UNKNOWN), np.int64)
    old = lives.birth == BEFORE
    kept = _outlives_step(lives, steps)
    reaches_backward = _reaches_backward(device, lives, facts)

    def put(which: BoolArray, category: Category) -> None:
        found[which] = int(category)

    put(old & np.isin(origin, (Origin.NONE, Origin.EMPTY)), Category.BEFORE_HISTORY)
    put(origin == Origin.WORKSPACE, Category.WORKSPACES)
    put(origin == Origin.COLLECTIVE, Category.COLLECTIVES)
    put(origin == Origin.GRADIENT, Category.GRADIENTS)
    put(origin == Origin.RECOMPUTE, Category.ACTIVATIONS)
    put((origin == Origin.OPTIMIZER) & (kept | old), Category.OPTIMIZER_STATE)
    put((origin == Origin.OPTIMIZER) & ~(kept | old), Category.TEMPORARIES)
    backward = (origin == Origin.BACKWARD) | ((origin == Origin.EMPTY) & ~old)
    outlives = _outlives_backward(device, lives, facts)
    put(backward & (outlives | old), Category.GRADIENTS)
    put(backward & ~(outlives | old), Category.TEMPORARIES)
    put(origin == Origin.MODEL, Category.PARAMETERS)
    forward = origin == Origin.FORWARD
    put(forward & reaches_backward, Category.ACTIVATIONS)
    put(forward & ~reaches_backward, Category.TEMPORARIES)
    if not len(_rows_of(device, facts, Origin.BACKWARD, Origin.GRADIENT, Origin.EMPTY)):
        # Without a backward in sight, what a forward made and kept may as well be a cache of keys and values. When
        # memory runs out in the first forward of a training there is no backward either; then only no_grad tells.
        unlikely = facts.without_grad[lives.stack + 1] if _ran_out(device) else np.ones(len(lives), np.bool_)
        put(forward & (old | (lives.death >= lives.n_events)) & unlikely, Category.UNKNOWN)
    _from_profile(snapshot, device, lives, found)
    return found


def _ran_out(device: DeviceSnapshot) -> bool:
    return bool((device.events.action == Action.OOM).any())


def _rows_of(device: DeviceSnapshot, facts: StackFacts, *wanted: Origin) -> IntArray:
    is_wanted = np.isin(facts.origin, wanted)  # per stack, of which there are few
    rows: IntArray = np.flatnonzero(
        (device.events.action == Action.ALLOC) & is_wanted[device.events.stack + 1]
    )
    return rows


def _reaches_backward(device: DeviceSnapshot, lives: Lifetimes, facts: StackFacts) -> BoolArray:
    """Whether a backward allocation happens while the allocation is alive; True when it is never freed.

    An error counts like a backward: it frees what the forward had kept for one.
    """
    rows = _rows_of(device, facts, Origin.BACKWARD, Origin.GRADIENT, Origin.EMPTY)
    ooms = np.flatnonzero(device.events.action == Action.OOM)
    return _crosses(np.sort(np.concatenate([rows, ooms])) if len(ooms) else rows, lives)


def _outlives_backward(device: DeviceSnapshot, lives: Lifetimes, facts: StackFacts) -> BoolArray:
    """Whether the allocation is still there when the next forward or optimizer allocates, or never freed."""
    return _crosses(_rows_of(device, facts, Origin.FORWARD, Origin.OPTIMIZER), lives)


def _crosses(rows: IntArray, lives: Lifetimes) -> BoolArray:
    place = np.searchsorted(rows, lives.birth, side="right")
    following = np.append(rows, lives.n_events)[place]
    crosses: BoolArray = following < lives.death
    return crosses | (lives.death >= lives.n_events)


def _outlives_step(lives: Lifetimes, steps: Steps) -> BoolArray:
    """Whether the allocation lives beyond the step it was made in; without known steps, to the end."""
    alive = lives.death >= lives.n_events
    if not len(steps.rows):
        return alive
    later: BoolArray = steps.of(lives.death) > steps.of(np.maximum(lives.birth, 0))
    return later | alive


_PROFILE = {
    "parameter": Category.PARAMETERS, "gradient": Category.GRADIENTS, "optimizer_state":
    Category.OPTIMIZER_STATE, "activation": Category.ACTIVATIONS, "autograd_detail": Category.ACTIVATIONS,
    "temporary": Category.TEMPORARIES,
}  # fmt: skip
"""Categories that torch's memory profiler assigns. Source: torch/profiler/_memory_profiler.py, Category."""


def _from_profile(snapshot: Snapshot, device: DeviceSnapshot, lives: Lifetimes, found: IntArray) -> None:
    """Put torch's own category where the file has one; changes `found`."""
    given = device.events.category
    if given is None:
        return
    codes = [int(_PROFILE.get(text, Category.UNKNOWN)) for text in snapshot.texts]
    meaning = np.array([*codes, -1], np.int64)
    born = lives.birth >= 0
    told = meaning[given[lives.birth[born]]]
    found[np.flatnonzero(born)[told >= 0]] = told[told >= 0]


def composition(lives: Lifetimes, category: IntArray, alive: BoolArray, facts: StackFacts) -> list[Share]:
    """Bytes per category of the allocations that `alive` selects; empty categories are left out."""
    shares = []
    for one in Category:
        which = alive & (category == one)
        blocks = int(which.sum())
        if blocks:
            shares.append(
                Share(one, int(lives.size[which].sum()), blocks, _evidence(one, lives, which, facts))
            )
    return shares


_KEPT = {
    Category.GRADIENTS: "kept after the backward pass",
    Category.OPTIMIZER_STATE: "kept after the step",
    Category.ACTIVATIONS: "kept until a backward pass or the error",
    Category.TEMPORARIES: "freed soon after",
}


def _evidence(category: Category, lives: Lifetimes, which: BoolArray, facts: StackFacts) -> str:
    """One sentence: where the stacks point, and what the lifetimes show."""
    count = int(which.sum())
    blocks = f"{count} block{'s' if count != 1 else ''}"
    old = int((which & (lives.birth == BEFORE)).sum())
    if category is Category.BEFORE_HISTORY:
        return f"{blocks} allocated before recording began; no stack is known"
    if category is Category.UNKNOWN:
        bare = int((which & (lives.stack < 0)).sum())
        return f"{blocks}; {bare} without a recorded stack, the others allocated by code that matches no rule"
    rules = facts.rule[lives.stack[which] + 1]
    weights = np.bincount(rules + 1, weights=lives.size[which], minlength=len(RULES) + 1)
    main = int(np.argmax(weights)) - 1
    sign = (
        RULES[main].sign if main >= 0 else "stacks without Python frames (autograd threads) or constructors"
    )
    text = f"{blocks} allocated by {sign}"
    if category in _KEPT:
        text += f", {_KEPT[category]}"
    if old:
        text += f"; {old} of them before recording began"
    return text
