"""Every screen as text at three sizes, compared with a file.

`OOMSCOPE_UPDATE_GOLDENS=1 pytest tests/tui/test_goldens.py` writes the files anew; look at the difference before you
commit it. Layout differs between versions of Textual, so the files count for the pinned version only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

GOLDENS = Path(__file__).parent / "goldens"
PINNED = next(
    line.partition("==")[2].strip()
    for line in (Path(__file__).parents[2] / "constraints-dev.txt").read_text().splitlines()
    if line.startswith("textual==")
)
UPDATE = bool(os.environ.get("OOMSCOPE_UPDATE_GOLDENS"))

pytestmark = pytest.mark.skipif(
    version("textual") != PINNED, reason=f"the golden files were made with textual {PINNED}"
)

#: name -> (recorded session, first screen, keys)
SCREENS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "live": ("eight_ranks", "live", ()),
    "live-cursor": ("eight_ranks", "live", ("p", "m", "h", "h", "h", "h")),
    "live-all": ("eight_ranks", "live", ("v",)),
    "live-nodes": ("eight_ranks", "live", ("b", "x")),
    "live-sort": ("eight_ranks", "live", ("o",)),
    "live-events": ("waiting", "live", ("v", "v", "v")),
    "live-cpu": ("cpu_job", "live", ()),
    "live-waiting": ("waiting", "live", ()),
    "live-predicting": ("predicting", "live", ()),
    "live-phases": ("finished", "live", ("v", "v")),
    "oom": ("waiting", "oom", ()),
    "oom-all-questions": ("waiting", "oom", ("d", "k")),
    "oom-none": ("eight_ranks", "oom", ()),
    "fixes": ("waiting", "fixes", ()),
    "fixes-ticked": ("waiting", "fixes", ("space", "d")),
    "fixes-confirm": ("waiting", "fixes", ("space", "A")),
    "compare": ("finished", "compare", ()),
    "compare-one": ("waiting", "compare", ()),
    "log": ("waiting", "live", ("ctrl+l",)),
    "help": ("eight_ranks", "live", ("question_mark",)),
    "quit": ("eight_ranks", "live", ("q",)),
}
SIZES = ((80, 24), (120, 36), (160, 48))


def check(name: str, text: str) -> None:
    path = GOLDENS / f"{name}.txt"
    if UPDATE:
        path.write_text(text, encoding="utf-8")
        return
    assert path.is_file(), f"no golden file {path.name}: run with OOMSCOPE_UPDATE_GOLDENS=1"
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", SCREENS)
async def test_screen(
    name: str, size: tuple[int, int], home: Path, opened: Any, sessions: Any, settled: Callable[..., Any]
) -> None:
    record, screen, keys = SCREENS[name]
    async with opened(getattr(sessions, record)(home), size=size, start=screen) as pilot:
        await pilot.press(*keys)
        await pilot.pause()
        check(f"{name}-{size[0]}x{size[1]}", await settled(pilot))


@pytest.mark.parametrize("name", ["live", "oom", "fixes-ticked", "compare", "help", "quit"])
async def test_screen_without_colour(
    name: str,
    home: Path,
    opened: Any,
    sessions: Any,
    settled: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same text, whole-cell patterns, and not one colour in what is sent to the terminal."""
    monkeypatch.setenv("NO_COLOR", "1")
    record, screen, keys = SCREENS[name]
    async with opened(getattr(sessions, record)(home), start=screen) as pilot:
        await pilot.press(*keys)
        await pilot.pause()
        text = await settled(pilot)
        check(f"{name}-80x24-no-colour", text)
        if name == "live":
            assert not set(text) & set("▁▂▃▄▅▆▇"), "fractional blocks cannot be told apart without colour"
        for strip in pilot.app.screen._compositor.render_strips():
            for segment in strip.apply_filter(
                pilot.app._filters[-1], pilot.app.ansi_theme_dark.background_color
            ):
                style = segment.style
                assert style is None or style.color is None or style.color.is_default
                assert style is None or style.bgcolor is None or style.bgcolor.is_default


async def test_many_ranks(home: Path, opened: Any, sessions: Any, settled: Callable[..., Any]) -> None:
    async with opened(sessions.eight_ranks(home, ranks=64, steps=40), size=(120, 36)) as pilot:
        check("live-64-ranks-120x36", await settled(pilot))
