"""The command table, lazy loading, and the one place that reports errors."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest

from oomscope.cli import main as main_module
from oomscope.cli.main import COMMANDS, main
from oomscope.errors import ExitCode, OomscopeError, SnapshotError


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from oomscope.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        "heavy = {'numpy', 'textual', 'torch', 'rich', 'msgspec', 'psutil', 'libcst'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_table_exists_and_has_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, attribute, _ = COMMANDS[name]
    assert isinstance(getattr(importlib.import_module(module), attribute), click.Command)
    assert main([name, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_a_misspelt_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspct", "x.pickle"]) == ExitCode.USAGE
    assert "Did you mean 'inspect'?" in capsys.readouterr().err


def test_a_script_without_run_says_how_to_run_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    assert main([str(script)]) == ExitCode.USAGE
    assert f"oomscope run {script}" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "run"])
def test_an_empty_argument_does_not_mean_this_folder(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, ""]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith(f"oomscope: an argument of {name} is empty\n")


def _command_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    @click.command()
    def broken() -> None:
        raise error

    monkeypatch.setattr(main_module.LazyGroup, "get_command", lambda self, ctx, name: broken)


def test_an_error_of_ours_is_one_sentence_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _command_that_raises(monkeypatch, SnapshotError("a.pickle is empty", hint="record it again"))
    assert main(["inspect"]) == ExitCode.INPUT
    assert capsys.readouterr().err == "oomscope: a.pickle is empty\n  hint: record it again\n"


def test_a_bug_leaves_a_crash_file_and_exit_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _command_that_raises(monkeypatch, ZeroDivisionError("1/0"))
    assert main(["inspect"]) == ExitCode.BUG
    assert "ZeroDivisionError: 1/0" in capsys.readouterr().err
    (crash,) = tmp_path.glob("oomscope-crash-*.txt")
    assert "Traceback" in crash.read_text()


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    _command_that_raises(monkeypatch, KeyboardInterrupt())
    assert main(["inspect"]) == ExitCode.INTERRUPTED


def test_every_error_class_has_a_documented_exit_code() -> None:
    from oomscope import errors

    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    documented = {each.__name__ for each in classes if issubclass(each, OomscopeError)}
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in documented)
