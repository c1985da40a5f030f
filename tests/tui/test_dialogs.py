"""Dialogs under a fast typist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from textual import events

from oomscope.tui.screens.dialogs import QuitDialog


async def test_only_the_first_of_two_quick_keys_answers(home: Path, opened: Any, sessions: Any) -> None:
    chosen: list[str] = []
    async with opened(sessions.eight_ranks(home), on_quit=chosen.append) as pilot:
        await pilot.press("q")
        dialog = pilot.app.screen
        assert isinstance(dialog, QuitDialog)
        for key in ("l", "l", "k"):
            dialog.on_key(events.Key(key, key))
        dialog.action_cancel()
        await pilot.pause()
    assert chosen == ["leave"]
