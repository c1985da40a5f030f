"""The What-if overlay, with a real replay of a made trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.synth import SyntheticProcess, to_bytes
from oomscope.core.allocator.synth_workloads import fragmented_oom
from oomscope.tui.screens.whatif import WhatIfScreen


async def test_replay_answers_in_the_overlay(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    session = sessions.waiting(home)
    process = SyntheticProcess(AllocatorConfig(), capacity=12 * 42 << 20)
    fragmented_oom(process)
    snapshot = session.path / "attempts/001/snapshots/r00000-step000000-oom.pickle"
    snapshot.write_bytes(to_bytes(process.snapshot()))
    async with opened(session, start="oom", size=(120, 36)) as pilot:
        await pilot.press("w")
        await pilot.pause()
        assert isinstance(pilot.app.screen, WhatIfScreen)
        assert "Replaying the recorded trace" in text_of(pilot.app)
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()
        text = text_of(pilot.app)
        assert "defaults (as it was)" in text
        assert "expandable_segments:True" in text
        assert "Live blocks alone come to" in text
        await pilot.press("escape")
        await pilot.pause()
        assert not isinstance(pilot.app.screen, WhatIfScreen)


async def test_without_a_snapshot_it_says_so(home: Path, opened: Any, sessions: Any) -> None:
    async with opened(sessions.waiting(home), start="oom") as pilot:
        await pilot.press("w")
        await pilot.pause()
        assert any("no memory snapshot" in note.message for note in pilot.app._notifications)


async def test_file_that_is_no_snapshot(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    session = sessions.waiting(home)
    (session.path / "attempts/001/snapshots/r00000-step000000-oom.pickle").write_bytes(b"nonsense")
    async with opened(session, start="oom") as pilot:
        await pilot.press("w")
        await pilot.pause()
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()
        assert "not a" in text_of(pilot.app) or "cannot" in text_of(pilot.app)
