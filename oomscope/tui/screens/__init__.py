"""One module per screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomscope.tui.screens.base import BaseScreen


def all_screens() -> list[type[BaseScreen]]:
    """The screens that have a digit, in the order of `actions.TABS`."""
    from oomscope.tui.screens.compare import CompareScreen
    from oomscope.tui.screens.fixes import FixesScreen
    from oomscope.tui.screens.live import LiveScreen
    from oomscope.tui.screens.oom import OomScreen
    from oomscope.tui.screens.sessions import SessionsScreen
    from oomscope.tui.screens.snapshot import SnapshotScreen

    return [LiveScreen, OomScreen, SnapshotScreen, FixesScreen, CompareScreen, SessionsScreen]
