"""What a call stack says about an allocation, decided once per stack and never per row.

A million rows share a few hundred stacks, so regular expressions run over distinct frames only.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from oomscope.core.snapshot.columns import BoolArray, Frame, IntArray, StackTable


class Origin(enum.IntEnum):
    """Which part of a training program allocated; earlier members win when a stack shows several."""

    WORKSPACE = 0
    COLLECTIVE = 1
    GRADIENT = 2
    RECOMPUTE = 3
    OPTIMIZER = 4
    BACKWARD = 5
    MODEL = 6
    FORWARD = 7
    OTHER = 8
    EMPTY = 9
    """A context without frames: with stacks="python" that is what autograd's own threads leave."""
    NONE = 10
    """No context was recorded."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A frame that gives an origin away."""

    origin: Origin
    file: re.Pattern[str] | None
    function: re.Pattern[str] | None
    sign: str
    """What to tell people."""

    def matches(self, frame: Frame) -> bool:
        file_ok = self.file is None or self.file.search(frame.file) is not None
        return file_ok and (self.function is None or self.function.search(frame.function) is not None)


def _rule(origin: Origin, sign: str, *, file: str | None = None, function: str | None = None) -> Rule:
    return Rule(origin, re.compile(file) if file else None, re.compile(function) if function else None, sign)


RULES = (
    _rule(Origin.WORKSPACE, "a cuBLAS or cuDNN workspace", function=r"[wW]orkspace|getCurrentCUDABlasHandle"),
    _rule(
        Origin.COLLECTIVE,
        "a collective operation",
        function=r"ProcessGroup|c10d::|nccl|^_?all_?(gather|reduce|to_all)|^_?reduce_scatter",
    ),
    _rule(Origin.GRADIENT, "gradient accumulation (AccumulateGrad)", function=r"AccumulateGrad"),
    _rule(
        Origin.RECOMPUTE,
        "recomputation by activation checkpointing",
        file=r"torch[/\\]utils[/\\]checkpoint\.py$",
        function=r"recompute|unpack_hook|^backward$",
    ),
    _rule(Origin.OPTIMIZER, "an optimizer's step", file=r"torch[/\\]optim[/\\]|[/\\]apex[/\\]optimizers"),
    _rule(
        Origin.OPTIMIZER,
        "an optimizer's step",
        file=r"optim",
        function=r"^(step|_step|step_with_ready_grads)$",
    ),
    _rule(
        Origin.BACKWARD,
        "the autograd engine",
        function=r"autograd::Engine|PythonEngine|_engine_run_backward|autograd::generated::|THPEngine",
    ),
    _rule(
        Origin.BACKWARD,
        "loss.backward()",
        file=r"torch[/\\]autograd[/\\]__init__\.py$",
        function=r"^(_make_grads|backward)$",
    ),
    _rule(
        Origin.MODEL,
        "moving or initialising a module",
        file=r"torch[/\\]nn[/\\](modules[/\\]module|init|parameter)\.py$",
        function=r"^(_apply|convert|to|cuda|half|float|bfloat16|to_empty|__new__|.*_)$",
    ),
    _rule(Origin.FORWARD, "a module's forward", function=r"^(forward|_call_impl|_wrapped_call_impl)$"),
)

_CONSTRUCTOR = re.compile(r"^(__init__|reset_parameters|init_weights?|_init_weights)$")
_MODULES = re.compile(r"nn[/\\]modules[/\\]|model|module|layer|network")


@lru_cache(maxsize=65536)
def frame_rules(frame: Frame) -> int:
    """Bit i is set when `RULES[i]` matches."""
    return sum(1 << number for number, rule in enumerate(RULES) if rule.matches(frame))


@dataclass(slots=True)
class StackFacts:
    """Origin and telling rule of every stack; entry 0 is `NO_STACK`, stack i is entry i + 1."""

    origin: IntArray
    """(n_stacks + 1,) int64, `Origin`."""
    rule: IntArray
    """(n_stacks + 1,) int64, index into `RULES`, -1 when none matched."""
    without_grad: BoolArray
    """(n_stacks + 1,) bool: a function decorated with torch.no_grad or torch.inference_mode is on the stack."""


def stack_facts(stacks: StackTable) -> StackFacts:
    """What each stack says."""
    bits = np.array([frame_rules(frame) for frame in stacks.frames] or [0], np.int64)
    builds = np.array([_builds_model(frame) for frame in stacks.frames] or [False], np.bool_)
    python = np.array([frame.is_python for frame in stacks.frames] or [False], np.bool_)
    count = len(stacks)
    origin = np.full(count + 1, int(Origin.NONE), np.int64)
    rule = np.full(count + 1, -1, np.int64)
    filled = np.flatnonzero(np.diff(stacks.offsets) > 0)
    origin[1:] = int(Origin.EMPTY)
    without_grad = np.zeros(count + 1, np.bool_)
    if not len(filled):
        return StackFacts(origin, rule, without_grad)
    starts = stacks.offsets[filled]
    seen = np.bitwise_or.reduceat(bits[stacks.frame_ids], starts)
    has_python = np.logical_or.reduceat(python[stacks.frame_ids], starts)
    constructs = np.logical_or.reduceat(builds[stacks.frame_ids], starts)
    found = np.full(len(filled), int(Origin.OTHER), np.int64)
    telling = np.full(len(filled), -1, np.int64)
    for number in range(len(RULES) - 1, -1, -1):
        hit = (seen >> number) & 1 == 1
        found[hit], telling[hit] = int(RULES[number].origin), number
    # Without a Python frame it is a thread of C++: in a training program, autograd's.
    found[(found == Origin.OTHER) & ~has_python] = int(Origin.BACKWARD)
    found[(found == Origin.OTHER) & constructs] = int(Origin.MODEL)
    origin[filled + 1], rule[filled + 1] = found, telling
    decorated = np.array([_is_no_grad(frame) for frame in stacks.frames], np.bool_)
    without_grad[filled + 1] = np.logical_or.reduceat(decorated[stacks.frame_ids], starts)
    return StackFacts(origin, rule, without_grad)


def _is_no_grad(frame: Frame) -> bool:
    return frame.function == "decorate_context" and frame.file.endswith("_contextlib.py")


def _builds_model(frame: Frame) -> bool:
    return _CONSTRUCTOR.match(frame.function) is not None and _MODULES.search(frame.file.lower()) is not None


_LIBRARY = re.compile(
    r"(site|dist)-packages[/\\]|[/\\]lib(64)?[/\\]python\d|^<|[/\\]torch[/\\]_?(nn|optim|autograd|utils|functional)"
)


@lru_cache(maxsize=65536)
def is_user_code(frame: Frame) -> bool:
    """Whether the frame is the program's own Python: no standard library, no installed package."""
    return frame.file.endswith(".py") and _LIBRARY.search(frame.file) is None


def user_frame(stacks: StackTable, stack: int) -> Frame | None:
    """The innermost frame of the program itself, else the innermost Python frame, else None."""
    frames = stacks[stack]
    for frame in frames:
        if is_user_code(frame):
            return frame
    return next((frame for frame in frames if frame.file.endswith(".py")), None)


def shown_frames(frames: list[Frame]) -> list[Frame]:
    """Frames that people want to see, innermost first: Python, and C++ frames that name an operation.

    Never empty for a stack that has frames: the innermost one stays.
    """
    kept = [frame for frame in frames if frame.is_python or _names_operation(frame)]
    return kept or frames[:1]


_PLUMBING = frozenset(
    {"_wrapped_call_impl", "_call_impl", "decorate_context", "wrapper", "__torch_function__", "_fn", "inner"}
)
"""torch's own functions that only pass a call on."""


def tree_frames(frames: list[Frame]) -> list[Frame]:
    """`shown_frames` without those of torch that only pass a call on: for trees, where each takes a line."""
    shown = shown_frames(frames)
    kept = [frame for frame in shown if frame.function not in _PLUMBING or is_user_code(frame)]
    return kept or shown


_OPERATION = re.compile(
    r"torch::autograd::generated::\w+Backward\w*::apply|^at::_ops::\w+::call|^c10d::|AccumulateGrad::apply"
)


@lru_cache(maxsize=65536)
def _names_operation(frame: Frame) -> bool:
    return _OPERATION.search(frame.function) is not None
