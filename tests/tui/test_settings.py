"""The user's own theme and keys: read with mercy, shown wherever a key is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oomscope.tui import themes
from oomscope.tui.settings import Settings, config_path, load


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_place_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert config_path({}) == Path("/home/ada/.config/oomscope/config.toml")
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/oomscope/config.toml")
    assert config_path({"OOMSCOPE_CONFIG": "/own.toml", "XDG_CONFIG_HOME": "/x"}) == Path("/own.toml")


def test_missing_file_sets_nothing(tmp_path: Path) -> None:
    assert load(tmp_path / "config.toml") == Settings()


def test_theme_and_keys(tmp_path: Path) -> None:
    text = 'theme = "light"\n[keymap]\n"go.oom" = "z"\nlist.down = ["n", "down"]\napp.help = "?,f1,ctrl+h"\n'
    found = load(write(tmp_path / "c.toml", text))
    assert found.theme == themes.LIGHT
    assert found.keymap == {"go.oom": "z", "list.down": "n,down", "app.help": "question_mark,f1,ctrl+h"}
    assert found.problems == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("theme = 3", "no theme 3; there are dark, light, mono"),
        ('thema = "dark"', "unknown setting 'thema'; did you mean 'theme'?"),
        ("keymap = 1", "keymap must be a table"),
        ('[keymap]\n"go.oum" = "z"', "no action 'go.oum'; did you mean 'go.oom'?"),
        ('[keymap]\n"go.oom" = ""', "names no key"),
        ('[keymap]\n"go.oom" = "hyperspace"', "no key 'hyperspace'"),
        ('[keymap]\n"go.oom" = "4"', "4 is both go.oom and go.fixes"),
        ("[keymap", "is not TOML"),
    ],
)
def test_mistakes_are_named_and_left_out(text: str, said: str, tmp_path: Path) -> None:
    found = load(write(tmp_path / "c.toml", text))
    assert any(said in problem for problem in found.problems)
    assert all(str(tmp_path / "c.toml") in problem for problem in found.problems)


async def test_own_keys_work_and_are_shown(
    home: Path, opened: Any, sessions: Any, text_of: Callable[..., str]
) -> None:
    settings = Settings(keymap={"go.fixes": "z", "live.pause": "P", "list.down": "n,down"})
    async with opened(sessions.waiting(home), settings=settings) as pilot:
        lines = text_of(pilot.app).splitlines()
        assert lines[1].endswith("[z] choose")
        assert "P Pause" in lines[-1]
        assert "z Fix" in lines[-1]
        await pilot.press("4")
        await pilot.pause()
        assert pilot.app.view.MODE == "live"
        await pilot.press("z")
        await pilot.pause()
        assert pilot.app.view.MODE == "fixes"
        await pilot.press("question_mark", *"next line")
        await pilot.pause()
        assert "n ↓" in text_of(pilot.app)


async def test_mistake_in_the_settings_is_told_at_the_start(
    home: Path, opened: Any, sessions: Any, tmp_path: Path
) -> None:
    settings = load(write(tmp_path / "c.toml", "colour = 1"))
    async with opened(sessions.eight_ranks(home), settings=settings) as pilot:
        assert any("unknown setting 'colour'" in note.message for note in pilot.app._notifications)
