"""What an agent that came into a running job says of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from oomscope.agent.attached import Attached


class Model:
    """Stands for a module."""


def attached_to(modules: Any) -> tuple[Attached, list[Any]]:
    told: list[Any] = []
    attached = Attached.__new__(Attached)
    attached.stopped = attached._seen_first_step = False
    attached._told_root = lambda: None
    attached.agent = SimpleNamespace(  # type: ignore[assignment]
        modules=modules,
        _tell_rank=lambda: None,
        _tell_model=lambda: told.append(modules.root if modules is not None else None),
    )
    return attached, told


def test_a_part_of_the_model_that_was_called_first_is_corrected() -> None:
    layer, whole = Model(), Model()
    modules = SimpleNamespace(root=layer)  # we came in the middle of a forward
    attached, told = attached_to(modules)
    attached._after_step(None, None, None)
    modules.root = whole
    for _ in range(3):
        attached._after_step(None, None, None)
    assert told == [layer, whole]


def test_the_first_step_is_told_without_a_model_and_the_model_when_it_is_seen() -> None:
    modules = SimpleNamespace(root=None)
    attached, told = attached_to(modules)
    attached._after_step(None, None, None)
    attached._after_step(None, None, None)
    modules.root = model = Model()
    attached._after_step(None, None, None)
    attached._after_step(None, None, None)
    assert told == [None, model]


def test_without_modules_there_is_one_record_and_none_after_the_end() -> None:
    attached, told = attached_to(None)
    attached._after_step(None, None, None)
    attached._after_step(None, None, None)
    assert told == [None]
    attached.stopped = True
    attached._seen_first_step = False
    attached._after_step(None, None, None)
    assert told == [None]
