"""What can be told apart on the screen: few colours, no colours, the focused pane, the screen below a dialog."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.color import ColorType
from rich.style import Style

from oomscope.tui.app import OomscopeApp
from oomscope.tui.ascii import wants_ascii


def styles(app: OomscopeApp, text: str) -> list[Style]:
    """The styles of all segments that contain `text`."""
    strips = app.screen._compositor.render_strips()
    return [each.style for strip in strips for each in strip if text in each.text and each.style is not None]


async def test_terminal_of_16_colours_gets_its_own_colours(
    home: Path, opened: Any, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is mixed from red, green and blue, and the cursor's row is reversed: red on grey cannot be read."""
    monkeypatch.delenv("COLORTERM")
    monkeypatch.setenv("TERM", "screen")
    async with opened(sessions.eight_ranks(home)) as pilot:
        assert pilot.app.theme == "oomscope-16"
        for strip in pilot.app.screen._compositor.render_strips():
            for segment in strip:
                for colour in (segment.style.color, segment.style.bgcolor) if segment.style else ():
                    assert colour is None or colour.type in (ColorType.DEFAULT, ColorType.STANDARD), segment
        assert all(style.reverse for style in styles(pilot.app, "leak?"))


@pytest.mark.parametrize(
    ("environ", "ascii_only"),
    [
        ({}, False),
        ({"LANG": "en_US.UTF-8"}, False),
        ({"LANG": "C.UTF-8"}, False),
        ({"LANG": "C"}, True),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),  # as Python leaves it when started with LANG=C
        ({"LANG": "C", "LC_CTYPE": "de_DE.utf8"}, False),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "POSIX"}, True),
        ({"LANG": "en_US.ISO-8859-1"}, True),
        ({"LANG": "en_US.UTF-8", "TERM": "linux"}, True),
        ({"LANG": "C", "OOMSCOPE_ASCII": "0"}, False),
        ({"LANG": "en_US.UTF-8", "OOMSCOPE_ASCII": "1"}, True),
    ],
)
def test_when_there_is_only_ascii(environ: dict[str, str], ascii_only: bool) -> None:
    assert wants_ascii(environ) is ascii_only


async def test_terminal_without_abilities_gets_no_colour(
    home: Path, opened: Any, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    async with opened(sessions.eight_ranks(home)) as pilot:
        assert pilot.app.theme == "oomscope-mono"


async def test_focused_pane_is_seen_without_colour(
    home: Path, opened: Any, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the list with the keyboard has a lit line, and the title of its pane is reversed."""
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(sessions.waiting(home), start="oom") as pilot:
        assert any(style.reverse for style in styles(pilot.app, "Activations exceed the card?"))
        assert not any(style.reverse for style in styles(pilot.app, "Evidence"))
        await pilot.press("tab")
        await pilot.pause()
        assert not any(style.reverse for style in styles(pilot.app, "Activations exceed the card?"))
        assert any(style.reverse for style in styles(pilot.app, "Evidence"))


@pytest.mark.parametrize("keys", [("q",), ("ctrl+o",), ("question_mark",)])
async def test_dialogs_leave_the_screen_below_in_view(
    keys: tuple[str, ...], home: Path, opened: Any, sessions: Any, text_of: Callable[..., str]
) -> None:
    async with opened(sessions.eight_ranks(home), size=(120, 40)) as pilot:
        await pilot.press(*keys)
        await pilot.pause()
        assert "train.py · 8 ranks" in text_of(pilot.app).splitlines()[0]


async def test_heights_of_a_node_stay_upright_on_the_cursors_row(
    home: Path, opened: Any, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(sessions.eight_ranks(home)) as pilot:
        await pilot.press("b")
        await pilot.pause()
        found = [style for style in styles(pilot.app, "▅") if not style.bold]
        assert found
        assert not any(style.reverse for style in found)
