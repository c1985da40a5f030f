"""Whether screens are drawn."""

import os
import sys

import pytest

from oomscope.cli.terminal import has_screens
from oomscope.errors import NotATerminal


class Terminal:
    """A stream that says it is a terminal, and keeps what is written to it."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def write(self, text: str) -> None:
        self.text += text


def terminal(monkeypatch):
    """Called within the test: pytest replaces the streams once more after the fixtures have run."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdin", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    return stream


@pytest.mark.parametrize(("size", "drawn"), [((60, 15), True), ((59, 15), False), ((60, 14), False)])
def test_a_terminal_that_is_too_small_is_told(monkeypatch, size, drawn):
    stream = terminal(monkeypatch)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size(size))
    assert has_screens("auto") is drawn
    assert ("plain text instead" in stream.text) is not drawn


def test_screens_that_were_asked_for_need_a_terminal(monkeypatch):
    terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    assert not has_screens("auto")
    with pytest.raises(NotATerminal):
        has_screens("always")
