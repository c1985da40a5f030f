"""What keys do: on recorded sessions, through Textual's pilot."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oomscope.errors import OomscopeError
from oomscope.protocol import layout
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.screens.dialogs import Confirm, QuitDialog
from oomscope.tui.screens.help import HelpScreen
from oomscope.tui.screens.live import LiveScreen
from oomscope.tui.screens.log import LogScreen
from oomscope.tui.widgets.fixlist import FixList
from oomscope.tui.widgets.ranktable import RankTable
from oomscope.tui.widgets.timeline import Timeline
from oomscope.views.overrule import Rewalk


def requests(session: Any) -> list[dict[str, Any]]:
    """What the viewer asked the supervisor for."""
    return [json.loads(path.read_text()) for path in sorted((session.path / "control").glob("*.json"))]


def mode(app: Any) -> str:
    return app.view.MODE if isinstance(app.view, BaseScreen) else ""


async def test_digits_walk_through_the_screens(home: Path, opened: Any, sessions: Any) -> None:
    async with opened(sessions.waiting(home)) as pilot:
        seen = []
        for key in "123456":
            await pilot.press(key)
            await pilot.pause()
            seen.append(mode(pilot.app))
        assert seen == ["live", "oom", "snapshot", "fixes", "compare", "sessions"]


async def test_alert_leads_from_the_oom_to_the_fixes(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.waiting(home)) as pilot:
        assert "out of memory: activations exceed the card; 3 fixes fit" in text_of(pilot.app)
        assert "[4] choose" in text_of(pilot.app)
        await pilot.click("AlertLine")
        await pilot.pause()
        assert mode(pilot.app) == "fixes"


async def test_growing_rank_is_selected_and_forecast(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.eight_ranks(home)) as pilot:
        assert pilot.app.rank == 5
        assert "rank 5: OOM in ~" in text_of(pilot.app)


@pytest.mark.parametrize("screen", ["oom", "fixes", "snapshot"])
async def test_screen_without_data_says_how_to_get_it(
    screen: str, home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.starting(home), start=screen) as pilot:
        text = text_of(pilot.app)
        assert {
            "oom": "No out-of-memory error so far",
            "fixes": "Nothing to fix so far",
            "snapshot": "snapshot",
        }[screen] in text


async def test_job_that_has_not_reported_yet(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    async with opened(sessions.starting(home)) as pilot:
        assert "no rank has reported yet" in text_of(pilot.app)


async def test_job_that_failed_for_another_reason(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    session = sessions.eight_ranks(home, ranks=1, steps=5)
    writer = sessions.Writer(session.attempts()[0], 0, 14000)
    kept = writer._path.read_bytes()
    writer.add("exception", sessions.NOW_NS, type="ValueError", message="shapes \x1b[31mdiffer", is_oom=False)
    writer.close()
    writer._path.write_bytes(kept + writer._path.read_bytes())
    session.set_state("failed")
    async with opened(session) as pilot:
        assert "the job failed: ValueError: shapes differ" in text_of(pilot.app)
        assert "[^l] log" in text_of(pilot.app)
        await pilot.press("2")
        await pilot.pause()
        assert "not for lack of memory" in text_of(pilot.app)


async def test_healthy_run_has_no_diagnosis(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    session = sessions.finished(home)
    for number in (1, 2):
        path = session.path / f"attempts/00{number}/findings.json"
        path.write_text(json.dumps({"verdicts": [], "flow": [{"node": "G0", "question": "Whose memory?"}]}))
    async with opened(session, start="oom") as pilot:
        assert "did not run out of memory" in text_of(pilot.app)


# -- ranks and time ------------------------------------------------------------------------------


async def test_rank_keys_wrap_around(home: Path, opened: Any, sessions: Any) -> None:
    async with opened(sessions.eight_ranks(home)) as pilot:
        pilot.app.show_rank(7)
        await pilot.press("full_stop")
        assert pilot.app.rank == 0
        await pilot.press("comma")
        assert pilot.app.rank == 7
        assert pilot.app.screen.query_one(RankTable).cursor_key == "7"


async def test_moving_in_the_table_changes_the_chart(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.eight_ranks(home)) as pilot:
        await pilot.press("g", "j", "j")
        await pilot.pause()
        assert pilot.app.rank == 2
        assert " rank 2 " in text_of(pilot.app)


async def test_more_than_16_ranks_start_with_the_least_headroom(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.eight_ranks(home, ranks=24, steps=40)) as pilot:
        table = pilot.app.screen.query_one(RankTable)
        assert table.shown_order == "headroom"
        leaking = {str(rank) for rank in range(24) if rank % 8 == 5}
        assert {row.key for row in table.rows[:3]} == leaking
        await pilot.press("o")
        await pilot.pause()
        assert "least memory left first" in text_of(pilot.app)
        await pilot.press("r")
        await pilot.pause()
        assert [row.key for row in table.rows[:3]] == ["0", "1", "2"]
        await pilot.press("O")
        assert [row.key for row in table.rows[:3]] == ["23", "22", "21"]


def on_nodes(session: Any, per_node: int) -> None:
    """Spread the ranks of a recorded session over hosts."""
    for path in sorted(session.attempts()[0].procs.iterdir()):
        found = layout.parse_proc_file(path.name)
        host = f"node-{'abcdefgh'[found.rank // per_node]}"
        path.write_text(path.read_text().replace('"host":"node-a"', f'"host":"{host}"'))
        path.rename(path.parent / layout.proc_file(found.rank, host, found.pid))


async def test_ranks_by_node(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    session = sessions.eight_ranks(home, ranks=16, steps=40)
    on_nodes(session, 8)
    async with opened(session, size=(120, 36)) as pilot:
        assert "16 ranks on 2 nodes" in text_of(pilot.app)
        table = pilot.app.screen.query_one(RankTable)
        await pilot.press("b")
        await pilot.pause()
        assert [row.key for row in table.rows] == ["node:node-a", "node:node-b"]
        assert "▲ leak?" in text_of(pilot.app)
        assert pilot.app.rank == 13
        await pilot.press("home")
        await pilot.pause()
        assert pilot.app.rank == 5, "a node stands for the rank to look at first"
        await pilot.press("end")
        await pilot.pause()
        await pilot.press("x")
        await pilot.pause()
        assert [row.key for row in table.rows][1:] == ["node:node-b", *map(str, range(8, 16))]
        await pilot.press("down", "down")
        await pilot.pause()
        assert pilot.app.rank == 9
        pilot.app.poll_now()
        await pilot.pause()
        assert table.cursor_key == "9"
        await pilot.press("x", "b")
        await pilot.pause()
        assert table.rows[0].key == "0"


async def test_what_the_driver_says_of_each_gpu(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    session = sessions.eight_ranks(home, ranks=2)
    attempt = session.attempts()[0]
    first = min(attempt.procs.iterdir())
    first.write_text(first.read_text().replace('"gpu_uuid":null', '"gpu_uuid":"2f1c"'))
    record = {"t": sessions.NOW_NS, "k": "gpu", "n": 0, "uuid": "GPU-2f1c", "utilization_pct": 97}
    (attempt.path / "host").mkdir(exist_ok=True)
    (attempt.path / "host" / "node-a.jsonl").write_text(json.dumps({**record, "power_mw": 651_000}) + "\n")
    async with opened(session, size=(160, 40)) as pilot:
        lines = text_of(pilot.app).splitlines()
        assert "util  °C    W" in lines[3]
        assert "97%   –  651" in lines[4]
        assert "–   –    –" in lines[5]


async def test_events_are_reachable_on_a_small_terminal(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.eight_ranks(home)) as pilot:
        assert "6 cudaMalloc retries so far" not in text_of(pilot.app)
        await pilot.press("v", "v", "v")
        await pilot.pause()
        assert "6 cudaMalloc retries so far" in text_of(pilot.app)


async def test_dragging_over_the_chart_reads_a_range(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.eight_ranks(home), size=(120, 36)) as pilot:
        chart = "#timeline"
        await pilot.mouse_down(chart, offset=(20, 6))
        await pilot.hover(chart, offset=(50, 6))
        await pilot.mouse_up(chart, offset=(50, 6))
        await pilot.pause()
        assert "since step" in text_of(pilot.app)
        await pilot.click(chart, offset=(30, 6))
        await pilot.pause()


async def test_right_button_opens_the_menu_of_the_screen(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.waiting(home), start="fixes") as pilot:
        await pilot.click("#fixes", offset=(10, 2), button=3)
        await pilot.pause()
        assert isinstance(pilot.app.screen, HelpScreen)
        assert "Menu: Fixes" in text_of(pilot.app)
        assert "Everywhere" not in text_of(pilot.app)
        await pilot.press("enter")
        await pilot.pause()
        await pilot.pause()
        assert pilot.app.screen.query_one(FixList).chosen == ["micro-batch"]


async def test_time_cursor_reads_the_series(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    async with opened(sessions.eight_ranks(home)) as pilot:
        chart = pilot.app.screen.query_one("#timeline", Timeline)
        history = pilot.app.frame.history(5)
        await pilot.press("p")
        assert chart.cursor_step == max(range(len(history.peak)), key=lambda i: history.peak[i])
        await pilot.press("m", "left")
        assert chart.cursor_step is not None
        await pilot.pause()
        low = history.low[chart.cursor_step] / 2**30
        assert f"step {chart.cursor_step}  low {low:.2f} (" in text_of(pilot.app)
        await pilot.press("escape")
        assert chart.cursor_step is None


async def test_zoom_shows_fewer_steps_and_fit_all(home: Path, opened: Any, sessions: Any) -> None:
    async with opened(sessions.eight_ranks(home)) as pilot:
        chart = pilot.app.screen.query_one("#timeline", Timeline)

        def in_view() -> int:
            return chart.shown.last_step - chart.shown.first_step + 1

        assert in_view() == 188
        await pilot.press("plus")
        await pilot.pause()
        assert in_view() == 94
        await pilot.press("minus")
        await pilot.pause()
        assert in_view() == 188
        await pilot.press("t")
        await pilot.pause()
        assert in_view() == 50
        await pilot.press("equals_sign")
        await pilot.pause()
        assert in_view() == 188


async def test_layers_can_be_hidden(home: Path, opened: Any, sessions: Any) -> None:
    async with opened(sessions.eight_ranks(home)) as pilot:
        chart = pilot.app.screen.query_one("#timeline", Timeline)
        await pilot.press("r", "f")
        assert chart.hidden == {"reserved", "peak"}
        await pilot.press("r", "f")
        assert not chart.hidden


async def test_pause_freezes_the_picture(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    session = sessions.eight_ranks(home)
    async with opened(session) as pilot:
        await pilot.press("space")
        await pilot.pause()
        assert pilot.app.paused
        assert "paused" in text_of(pilot.app)
        await pilot.press("space")
        assert not pilot.app.paused


async def test_views_of_the_chart(home: Path, opened: Any, sessions: Any) -> None:
    async with opened(sessions.eight_ranks(home), size=(120, 36)) as pilot:
        await pilot.press("v")
        await pilot.pause()
        await pilot.pause()
        assert len(pilot.app.screen.query("#grid Timeline")) == 8
        await pilot.press("v")
        await pilot.pause()
        assert pilot.app.screen.has_class("-phases")
        await pilot.press("v", "v")
        await pilot.pause()
        assert pilot.app.screen.has_class("-selected")


# -- out of memory -------------------------------------------------------------------------------


async def test_question_can_be_answered_otherwise(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.waiting(home), start="oom") as pilot:
        await pilot.press("space")
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()
        text = text_of(pilot.app)
        assert "with your answers:" in text
        assert "The evidence does not decide" in text
        assert "no you" in text
        assert pilot.app.screen.command_text().endswith(" --answer Q1.4=no")
        await pilot.press("u")
        await pilot.pause()
        assert "with your answers" not in text_of(pilot.app)
        assert "confidence high 0.93" in text_of(pilot.app)


@pytest.mark.parametrize("fails", [True, False])
async def test_superseded_walk_changes_nothing(
    home: Path,
    opened: Any,
    sessions: Any,
    settled: Any,
    text_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    walk, release, posted = Rewalk.walk, threading.Event(), threading.Event()
    calls: list[dict[str, str]] = []

    def slow_first(self: Rewalk, answers: dict[str, str]) -> Any:
        calls.append(answers)
        first = len(calls) == 1
        if first:
            assert release.wait(30)
            posted.set()
            if fails:
                raise OomscopeError("gone")
        return walk(self, answers)

    monkeypatch.setattr(Rewalk, "walk", slow_first)
    try:
        async with opened(sessions.waiting(home), start="oom") as pilot:
            await pilot.press("space")
            await settled(pilot)
            assert calls == [{"Q1.4": "no"}]
            assert "with your answers" not in text_of(pilot.app), "what was found still stands"
            await pilot.press("up", "space")
            for _ in range(200):
                await pilot.pause(0.02)
                if "with your answers:" in text_of(pilot.app):
                    break
            before = await settled(pilot)
            assert "with your answers:" in before
            assert len(calls) == 2
            assert len(calls[1]) == 2
            release.set()
            assert posted.wait(30)
            await pilot.pause(0.5)
            assert await settled(pilot) == before
            assert pilot.app.screen.command_text().count(" --answer ") == 2
    finally:
        release.set()


# -- fixes ---------------------------------------------------------------------------------------


async def test_tick_shows_the_predicted_peak(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    async with opened(sessions.waiting(home), start="fixes") as pilot:
        await pilot.press("space")
        await pilot.pause()
        text = text_of(pilot.app)
        assert pilot.app.screen.query_one(FixList).chosen == ["ckpt"]
        assert "14.6 GiB predicted ±0.3" in text
        assert "predicted to fit: 14.60 GiB" in text


async def test_two_fixes_have_a_peak_only_when_predicted_together(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.waiting(home), start="fixes") as pilot:
        await pilot.press("space", "down", "space")
        await pilot.pause()
        assert pilot.app.screen.query_one(FixList).chosen == ["ckpt", "micro-batch"]
        assert "not predicted together" in text_of(pilot.app)
        await pilot.press("space", "down", "space")
        await pilot.pause()
        assert "9.8 GiB predicted" in text_of(pilot.app)


async def test_fix_that_does_not_apply_cannot_be_ticked(home: Path, opened: Any, sessions: Any) -> None:
    async with opened(sessions.waiting(home), start="fixes") as pilot:
        await pilot.press("x", "end", "k", "space")
        listing = pilot.app.screen.query_one(FixList)
        assert listing.current is not None
        assert not listing.current.applicable
        assert listing.chosen == []


async def test_apply_asks_first_and_then_writes_the_request(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    session = sessions.waiting(home)
    async with opened(session, start="fixes") as pilot:
        await pilot.press("R", "A")
        await pilot.pause()
        assert isinstance(pilot.app.screen, Confirm)
        text = text_of(pilot.app)
        assert "python samples/activations_too_big.py" in text
        assert "checkpoint the 24 modules of class Block" in text
        await pilot.press("enter")  # the cursor starts on "change nothing"
        await pilot.pause()
        assert requests(session) == []
        await pilot.press("A", "y")
        await pilot.pause()
        assert [(r["do"], r["fixes"]) for r in requests(session)] == [("rerun", ["ckpt"])]
        assert mode(pilot.app) == "live"


async def test_apply_needs_a_waiting_supervisor(home: Path, opened: Any, sessions: Any) -> None:
    session = sessions.waiting(home)
    session.set_state("oom")
    async with opened(session, start="fixes", size=(120, 36)) as pilot:
        await pilot.press("space", "A")
        await pilot.pause()
        assert not isinstance(pilot.app.screen, Confirm)
        assert requests(session) == []
        assert any("oomscope fix" in note.message for note in pilot.app._notifications)


async def test_fixes_of_a_running_job_are_asked_for_its_end(home: Path, opened: Any, sessions: Any) -> None:
    session = sessions.eight_ranks(home)
    async with opened(session, start="fixes") as pilot:
        await pilot.press("P")
        await pilot.pause()
        assert [each["do"] for each in requests(session)] == ["predict"]


async def test_fixes_of_an_ended_run_are_predicted_after_a_yes(
    home: Path, opened: Any, sessions: Any, text_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oomscope.launch import supervised

    taken: list[Path] = []
    monkeypatch.setattr(supervised, "predict_ended", lambda session: taken.append(session.path))
    session = sessions.eight_ranks(home)
    session.set_state("done")
    async with opened(session, start="fixes") as pilot:
        assert "Press P" in text_of(pilot.app)
        await pilot.press("P")
        await pilot.pause()
        assert isinstance(pilot.app.screen, Confirm)
        assert "simulated device" in text_of(pilot.app)
        await pilot.press("enter")
        await pilot.pause()
        assert taken == []
        await pilot.press("P", "y")
        await pilot.pause()
        assert taken == [session.path]
    async with opened(session, start="fixes", readonly=True) as pilot:
        await pilot.press("P")
        await pilot.pause()
        assert not isinstance(pilot.app.screen, Confirm)


# -- leaving -------------------------------------------------------------------------------------


async def test_quit_leaves_the_job_running_by_default(home: Path, opened: Any, sessions: Any) -> None:
    session = sessions.eight_ranks(home)
    chosen: list[str] = []
    async with opened(session, on_quit=chosen.append) as pilot:
        await pilot.press("q")
        await pilot.pause()
        assert isinstance(pilot.app.screen, QuitDialog)
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(pilot.app.screen, LiveScreen)
        await pilot.press("ctrl+c", "enter")
        await pilot.pause()
    assert pilot.app.return_value == "leave"
    assert chosen == ["leave"]
    assert requests(session) == []


@pytest.mark.parametrize(("key", "request_"), [("s", "stop"), ("k", "kill")])
async def test_quit_can_end_the_job(key: str, request_: str, home: Path, opened: Any, sessions: Any) -> None:
    session = sessions.eight_ranks(home)
    async with opened(session) as pilot:
        await pilot.press("q", key)
        await pilot.pause()
    assert pilot.app.return_value == request_
    assert [r["do"] for r in requests(session)] == [request_]


async def test_attached_job_is_not_ours_to_stop(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    session = sessions.eight_ranks(home)
    session.info["attached"] = True
    async with opened(session) as pilot:
        await pilot.press("ctrl+k")
        await pilot.pause()
        assert isinstance(pilot.app.screen, LiveScreen)
        await pilot.press("q")
        await pilot.pause()
        text = text_of(pilot.app)
        assert "Leave it running" in text
        assert "Stop" not in text
        assert "Kill" not in text
        await pilot.press("s", "k")
        await pilot.pause()
        assert isinstance(pilot.app.screen, QuitDialog)
        await pilot.press("l")
        await pilot.pause()
    assert pilot.app.return_value == "leave"
    assert requests(session) == []


@pytest.mark.parametrize("width", [80, 100, 120, 160])
@pytest.mark.parametrize("screen", ["live", "sessions"])
async def test_footer_shows_every_screen_off_the_edge(
    width: int, screen: str, home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.eight_ranks(home), start=screen, size=(width, 30)) as pilot:
        last = text_of(pilot.app).splitlines()[29]
        assert last.endswith("6 Sessions" if width >= 100 else "6 Sess")
        assert len(last) <= width - 1


async def test_quit_while_the_supervisor_waits(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    session = sessions.waiting(home)
    async with opened(session) as pilot:
        await pilot.press("q")
        await pilot.pause()
        assert "Leave it waiting" in text_of(pilot.app)
        assert "Kill" not in text_of(pilot.app)
        await pilot.press("s")
        await pilot.pause()
    assert [r["do"] for r in requests(session)] == ["stop"]


async def test_quit_of_an_ended_session_asks_nothing(home: Path, opened: Any, sessions: Any) -> None:
    async with opened(sessions.finished(home)) as pilot:
        await pilot.press("q")
        await pilot.pause()
    assert pilot.app.return_value == "leave"


async def test_stop_is_confirmed(home: Path, opened: Any, sessions: Any) -> None:
    session = sessions.eight_ranks(home)
    async with opened(session) as pilot:
        await pilot.press("ctrl+k", "enter")
        await pilot.pause()
        assert requests(session) == []
        await pilot.press("ctrl+k", "y")
        await pilot.pause()
        assert [r["do"] for r in requests(session)] == ["stop"]


async def test_snapshot_now(home: Path, opened: Any, sessions: Any) -> None:
    session = sessions.eight_ranks(home)
    async with opened(session) as pilot:
        await pilot.press("s", "S")
        await pilot.pause()
    asked = {(r["do"], r["rank"]) for r in requests(session)}
    assert asked == {("dump", None), ("dump", 5)}


async def test_readonly_changes_nothing(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    session = sessions.waiting(home)
    async with opened(session, readonly=True, start="fixes") as pilot:
        assert "Apply" not in text_of(pilot.app).splitlines()[-1]
        await pilot.press("R", "A", "P", "s", "ctrl+k")
        await pilot.pause()
        assert requests(session) == []
        await pilot.press("q")
    assert requests(session) == []


# -- help, log, copy, theme ----------------------------------------------------------------------


async def test_help_is_searched_and_runs_an_entry(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.waiting(home)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(pilot.app.screen, HelpScreen)
        await pilot.press(*"what would help")
        await pilot.pause()
        assert "Fixes" in text_of(pilot.app)
        await pilot.press("enter")
        await pilot.pause()
        await pilot.pause()
        assert mode(pilot.app) == "fixes"
        assert not isinstance(pilot.app.screen, HelpScreen)


async def test_palette_finds_an_action_by_its_name(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.waiting(home)) as pilot:
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"compare")
        await pilot.pause(0.5)
        assert "Everywhere: Compare" in text_of(pilot.app)
        await pilot.press("enter", "enter")
        await pilot.pause(0.3)
        assert mode(pilot.app) == "compare"


async def test_log_shows_the_output_without_escape_sequences(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.waiting(home)) as pilot:
        await pilot.press("ctrl+l")
        await pilot.pause()
        assert isinstance(pilot.app.screen, LogScreen)
        text = text_of(pilot.app)
        assert "rank0/stderr.log" in text
        assert "torch.OutOfMemoryError: CUDA out of memory." in text
        await pilot.press("tab")
        await pilot.pause()
        assert "354.8 M parameters" in text_of(pilot.app)
        await pilot.press("escape")
        await pilot.pause()
        assert mode(pilot.app) == "live"


async def test_long_lines_of_the_log_are_broken_or_cut(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    session = sessions.waiting(home)
    log = session.path / "attempts/001/logs/rank0/stderr.log"
    log.write_text("RuntimeError: " + "訓練 weight of a layer, " * 20 + "the end\n" + "short\n" * 3)
    async with opened(session) as pilot:
        await pilot.press("ctrl+l")
        await pilot.pause()
        assert "the end" in text_of(pilot.app)
        await pilot.press("slash", *"short", "enter", "n")
        await pilot.pause()
        await pilot.press("w")
        await pilot.pause()
        assert "the end" not in text_of(pilot.app)
        assert "…" in text_of(pilot.app)


async def test_ended_session_does_not_offer_to_apply(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.finished(home), start="fixes") as pilot:
        await pilot.press("space")
        await pilot.pause()
        lines = text_of(pilot.app).splitlines()
        assert "the session has ended: Y copies the command" in lines[1]
        assert "[A]" not in lines[1]
        assert "A Apply" not in lines[-1]


async def test_copy_gives_the_answer_as_text(
    home: Path, opened: Any, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    async with opened(sessions.waiting(home), start="oom") as pilot:
        monkeypatch.setattr(pilot.app, "copy_to_clipboard", copied.append)
        await pilot.press("y", "4", "y", "Y")
        await pilot.pause()
    assert "oom.capacity_activations: Activations exceed the card (confidence high 0.93)" in copied[0]
    assert "ckpt: Activation checkpointing" in copied[1]
    assert copied[2].startswith("oomscope fix ")


async def test_themes_cycle_and_no_color_stays(
    home: Path, opened: Any, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(sessions.eight_ranks(home)) as pilot:
        seen = [pilot.app.theme]
        for _ in range(3):
            await pilot.press("ctrl+t")
            await pilot.pause()
            seen.append(pilot.app.theme)
        assert seen == ["oomscope-dark", "oomscope-light", "oomscope-mono", "oomscope-dark"]


async def test_jump_mode_moves_the_keyboard(home: Path, opened: Any, sessions: Any) -> None:
    async with opened(sessions.waiting(home), start="oom", size=(120, 36)) as pilot:
        assert pilot.app.screen.focused.id == "flow"
        await pilot.press("ctrl+o")
        await pilot.pause()
        await pilot.press("b")
        await pilot.pause()
        await pilot.pause()
        assert pilot.app.screen.focused.id == "evidence"


# -- terminal ------------------------------------------------------------------------------------


async def test_small_terminal_names_the_needed_size(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    async with opened(sessions.eight_ranks(home), size=(59, 15)) as pilot:
        assert "oomscope needs 60x15; this terminal is 59x15" in " ".join(text_of(pilot.app).split())
        await pilot.resize_terminal(60, 15)
        await pilot.pause()
        assert "rank alloc/resv GiB" in text_of(pilot.app)
        await pilot.resize_terminal(80, 14)
        await pilot.pause()
        assert "needs 60x15" in text_of(pilot.app)


@pytest.mark.parametrize("size", [(60, 15), (100, 31), (200, 60)])
@pytest.mark.parametrize("screen", ["live", "oom", "fixes", "compare"])
async def test_every_line_fits(
    screen: str, size: tuple[int, int], home: Path, opened: Any, sessions: Any, text_of: Callable[..., str]
) -> None:
    async with opened(sessions.finished(home), size=size, start=screen) as pilot:
        lines = text_of(pilot.app).splitlines()
        assert len(lines) == size[1]
        assert max(map(len, lines)) <= size[0]
        assert lines[0].startswith(" oomscope")


async def test_hostile_text_cannot_reach_the_terminal(
    home: Path, opened: Any, sessions: Any, text_of: Callable[..., str]
) -> None:
    session = sessions.waiting(home)
    path = session.path / "attempts/001/findings.json"
    findings = json.loads(path.read_text())
    findings["verdicts"][0]["title"] = "\x1b]0;owned\x07\x1b[2Jtitle\u202e"
    findings["flow"][0]["question"] = "\x1b[31mred?\r\n\x9b1m"
    path.write_text(json.dumps(findings))
    async with opened(session, start="oom") as pilot:
        text = text_of(pilot.app)
    assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 or c == "\u202e" for c in text)
    assert "Title" in text


async def test_torn_json_is_reported_and_survived(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    session = sessions.waiting(home)
    (session.path / "attempts/001/fixes.json").write_text('{"fixes": [')
    async with opened(session, start="fixes") as pilot:
        assert "No fixes were predicted" in text_of(pilot.app)
        assert any("fixes.json" in problem for problem in pilot.app.frame.problems)
        assert any("fixes.json" in line.text for line in pilot.app.frame.events)


async def test_terminal_without_unicode_gets_ascii(
    home: Path, opened: Any, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOMSCOPE_ASCII", "1")
    async with opened(sessions.eight_ranks(home)) as pilot:
        background = pilot.app.ansi_theme_dark.background_color
        for strip in pilot.app.screen._compositor.render_strips():
            shown = "".join(
                segment.text for segment in strip.apply_filter(pilot.app._filters[-1], background)
            )
            assert shown.isascii()
            assert "?" not in shown.replace(" ? ", "").replace(" ?  ", "").replace("leak?", "")


# -- sessions ------------------------------------------------------------------------------------


async def test_sessions_are_listed_filtered_and_opened(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    first = sessions.waiting(home)
    second = sessions.eight_ranks(home)
    async with opened(first, start="sessions") as pilot:
        pilot.app.screen.read_now()
        await pilot.pause()
        text = text_of(pilot.app)
        assert "activations_too_big.py" in text
        assert "train.py" in text
        await pilot.press("slash", *"train", "enter")
        await pilot.pause()
        assert "activations_too_big.py" not in "".join(text_of(pilot.app).splitlines()[3:])
        await pilot.press("home", "enter")
        await pilot.pause()
        assert pilot.app.model.session.path == second.path
        assert mode(pilot.app) == "live"


async def test_only_an_ended_session_that_is_not_open_is_deleted(
    home: Path, opened: Any, sessions: Any
) -> None:
    ended = sessions.finished(home)
    running = sessions.eight_ranks(home)
    async with opened(running, start="sessions") as pilot:
        screen = pilot.app.screen
        screen.read_now()
        await pilot.pause()
        listing = screen.query_one("#sessions")
        listing.select(str(running.path))
        await pilot.press("D")
        await pilot.pause()
        assert pilot.app.screen is screen
        listing.select(str(ended.path))
        await pilot.press("D")
        await pilot.pause()
        assert isinstance(pilot.app.screen, Confirm)
        await pilot.press("y")
        await pilot.pause()
    assert not ended.path.exists()
    assert running.path.exists()


async def test_session_is_pinned_and_marked(home: Path, opened: Any, sessions: Any, text_of: Any) -> None:
    other = sessions.finished(home)
    async with opened(sessions.eight_ranks(home), start="sessions") as pilot:
        screen = pilot.app.screen
        screen.read_now()
        await pilot.pause()
        listing = screen.query_one("#sessions")
        listing.select(str(other.path))
        await pilot.press("p", "m")
        screen.read_now()
        await pilot.pause()
        assert other.is_pinned
        assert next(line for line in text_of(pilot.app).splitlines() if "activations" in line)[1:3] == "mp"
        await pilot.press("5")
        await pilot.pause()
        text = text_of(pilot.app)
        assert f"marked: {other.id}" in text
        assert "marked 2" in text
        await pilot.press("6", "p", "m")
        await pilot.pause()
        assert not other.is_pinned
        await pilot.press("5")
        await pilot.pause()
        assert "marked" not in text_of(pilot.app)


async def test_mark_that_compare_gave_up_is_gone_from_the_list(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    other = sessions.finished(home)
    async with opened(sessions.eight_ranks(home), start="sessions") as pilot:
        screen = pilot.app.screen
        screen.read_now()
        await pilot.pause()
        screen.query_one("#sessions").select(str(other.path))
        await pilot.press("m")
        description = other.path / "session.json"
        kept = description.read_bytes()
        description.write_text("{")
        await pilot.press("5")
        await pilot.pause()
        assert pilot.app.marked is None
        description.write_bytes(kept)
        await pilot.press("6")
        screen.read_now()
        await pilot.pause()
        assert next(line for line in text_of(pilot.app).splitlines() if "activations" in line)[1] == " "
        await pilot.press("m")
        assert pilot.app.marked == other.path, "one press marks it again"


async def test_session_is_exported_into_one_file(
    home: Path, opened: Any, sessions: Any, text_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    other = sessions.finished(home)
    async with opened(sessions.eight_ranks(home), start="sessions", size=(120, 36)) as pilot:
        screen = pilot.app.screen
        screen.read_now()
        await pilot.pause()
        screen.query_one("#sessions").select(str(other.path))
        await pilot.press("E")
        await pilot.pause()
        assert ".tar.gz" in text_of(pilot.app)
        assert "before compression" in text_of(pilot.app)
        await pilot.press("enter")  # the cursor starts on "write nothing"
        await pilot.pause()
        assert list((tmp_path / "work").iterdir()) == []
        await pilot.press("E")
        await pilot.pause()
        await pilot.press("w")
        await pilot.pause()
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()
    assert [path.name for path in (tmp_path / "work").iterdir()] == [f"{other.id}.tar.gz"]


async def test_folders_that_cannot_be_shown_are_named(
    home: Path, opened: Any, sessions: Any, text_of: Any
) -> None:
    newer = sessions.finished(home)
    path = newer.path / "session.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    async with opened(sessions.eight_ranks(home), start="sessions", size=(120, 36)) as pilot:
        pilot.app.screen.read_now()
        await pilot.pause()
        text = text_of(pilot.app)
        assert "cannot be shown:" in text
        assert f"{newer.id} was written by a newer oomscope" in text


async def test_sessions_are_ordered_by_a_letter(home: Path, opened: Any, sessions: Any) -> None:
    first, second = sessions.finished(home), sessions.eight_ranks(home)
    async with opened(second, start="sessions") as pilot:
        pilot.app.screen.read_now()
        await pilot.press("o", "n")
        listing = pilot.app.screen.query_one("#sessions")
        assert [row.key for row in listing.rows] == [str(first.path), str(second.path)]
        await pilot.press("O")
        assert [row.key for row in listing.rows] == [str(second.path), str(first.path)]
