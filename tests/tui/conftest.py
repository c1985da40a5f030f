"""A frozen clock, a clean environment and a way to open the viewer on a recorded session."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import recorded_sessions as recorded
from textual.pilot import Pilot

from oomscope.store.session import Session
from oomscope.tui.app import OomscopeApp

Opener = Callable[..., AbstractAsyncContextManager[Pilot[str]]]


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment for which the sessions were recorded, in UTC, with no variable that changes the screens."""
    for name in ("NO_COLOR", "TEXTUAL_THEME", "TEXTUAL_FPS", "TEXTUAL_ANIMATIONS", "TEXTUAL_FILTERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr("time.time_ns", lambda: recorded.NOW_NS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder."""
    monkeypatch.setenv("OOMSCOPE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def screen_text(app: OomscopeApp) -> str:
    """Everything on the screen as text, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


async def settled_text(pilot: Pilot[str]) -> str:
    """The screen's text once it no longer changes: scroll bars follow a layout one refresh later."""
    before, text = "", screen_text(pilot.app)
    for _ in range(40):
        await pilot.pause(0.03)
        before, text = text, screen_text(pilot.app)
        if before == text:
            break
    return text


@asynccontextmanager
async def _opened(
    session: Session | None, *, size: tuple[int, int] = (80, 24), **options: Any
) -> AsyncIterator[Pilot[str]]:
    options.setdefault("hz", 0)
    app = OomscopeApp(session, clock=lambda: recorded.NOW_NS / 1e9, **options)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        app.poll_now()
        await pilot.pause()
        yield pilot


@pytest.fixture
def opened() -> Opener:
    """Opens the viewer on a session, polled once: `async with opened(session) as pilot`."""
    return _opened


@pytest.fixture
def sessions() -> Any:
    """The module that records sessions."""
    return recorded


@pytest.fixture
def settled() -> Callable[..., Any]:
    return settled_text


@pytest.fixture
def text_of() -> Callable[[OomscopeApp], str]:
    return screen_text
