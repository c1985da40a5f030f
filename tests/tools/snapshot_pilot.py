"""Drives the Snapshot screen in a test: opens a file, presses keys, and waits until the screen has answered."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from oomscope.tui.app import OomscopeApp
from oomscope.tui.screens.snapshot import SnapshotScreen


def made(folder: Path, name: str, raw: Any) -> Path:
    path = folder / name
    path.write_bytes(pickle.dumps(raw))
    return path


def screen_of(pilot: Pilot[Any]) -> SnapshotScreen:
    view = pilot.app.view  # type: ignore[attr-defined]
    assert isinstance(view, SnapshotScreen)
    return view


async def settled(pilot: Pilot[Any]) -> SnapshotScreen:
    """Wait until the file is read and replayed, and the last wish is answered."""
    await pilot.pause()
    for _ in range(2000):
        view = screen_of(pilot)
        if not view.is_busy:
            await pilot.pause()
            return view
        await pilot.pause(0.01)
    raise AssertionError("the screen never settled")


async def press(pilot: Pilot[Any], *keys: str) -> SnapshotScreen:
    for key in keys:
        await pilot.press(key)
        await settled(pilot)
    return screen_of(pilot)


def app_for(path: Path) -> OomscopeApp:
    return OomscopeApp(snapshot=path, start="snapshot", hz=0)
