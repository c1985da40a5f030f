"""The action table: complete, unambiguous, and the page made from it up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oomscope.tui import actions
from oomscope.tui.app import OomscopeApp
from oomscope.tui.keys import main as write_keys
from oomscope.tui.screens import all_screens
from oomscope.tui.screens.dialogs import Dialog
from oomscope.tui.screens.log import LogScreen
from oomscope.tui.widgets.lines import LineList


def test_ids_are_unique() -> None:
    ids = [action.id for action in actions.all_actions()]
    assert len(ids) == len(set(ids))


def test_every_action_exists_where_it_is_bound() -> None:
    """A key whose method is missing would do nothing, silently."""
    holders: list[type[Any]] = [OomscopeApp, LineList, LogScreen, Dialog, *all_screens()]
    for holder in holders:
        for binding in holder.__dict__["BINDINGS"]:
            target, _, call = binding.action.rpartition(".")
            name = "action_" + call.partition("(")[0]
            owner = OomscopeApp if target == "app" else holder
            assert hasattr(owner, name), f"{binding.id}: no {owner.__name__}.{name}"


def test_no_key_has_two_meanings_in_one_place() -> None:
    groups: dict[str, dict[str, str]] = {}
    for action in actions.all_actions():
        for key in action.keys.split(","):
            seen = groups.setdefault(action.group, {})
            assert key not in seen, f"{key} is both {seen.get(key)} and {action.id}"
            seen[key] = action.id


def test_dangerous_keys_are_not_bare_lower_case_letters() -> None:
    for action in actions.all_actions():
        if action.changes_job and action.id not in ("app.snapshot",):
            assert all(len(key) > 1 or key.isupper() for key in action.keys.split(",")), action.id


@pytest.mark.parametrize("action", actions.all_actions(), ids=lambda action: action.id)
def test_tooltips_are_sentences(action: actions.Action) -> None:
    assert action.tooltip.endswith(".")
    assert action.label


def test_keys_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "keys.md"
    assert page.read_text(encoding="utf-8") == actions.keys_markdown(), "run: python -m oomscope.tui.keys"


def test_keys_page_is_written(tmp_path: Path) -> None:
    assert write_keys([str(tmp_path / "keys.md")]) == 0
    assert "| `1` | Live: All ranks as they run. | `go.live` |" in (tmp_path / "keys.md").read_text(
        encoding="utf-8"
    )
