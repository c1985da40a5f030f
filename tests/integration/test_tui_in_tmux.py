"""The viewer in a real terminal: keys, resize, leaving, and the terminal as it was before."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import recorded_sessions as recorded

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]


_TRAINING = """\
import time, torch
weight = torch.zeros(1000, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range({steps}):
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
open({finished!r}, "w").close()
"""


class Terminal:
    """One tmux window on a server of its own."""

    def __init__(self, folder: Path, *, columns: int, rows: int) -> None:
        self._base = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        # COLUMNS and LINES, which parallel test runs set, would win over the size of this terminal.
        environment = {
            k: v for k, v in os.environ.items() if k not in ("TMUX", "NO_COLOR", "CI", "COLUMNS", "LINES")
        }
        environment |= {"OOMSCOPE_HOME": str(folder / "state"), "TERM": "xterm-256color"}
        shell = "env 'PS1=READY ' bash --norc --noprofile"
        command = ["new-session", "-d", "-x", str(columns), "-y", str(rows), shell]
        subprocess.run([*self._base, *command], env=environment, check=True)

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run([*self._base, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def run(self, command: str) -> None:
        self._tmux("send-keys", "-l", command)
        self.press("Enter")

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def text(self) -> str:
        return self._tmux("capture-pane", "-p")

    def wait(self, condition: Callable[[str], bool], *, seconds: float = 90) -> str:
        """The screen's text once `condition` holds."""
        deadline = time.monotonic() + seconds
        while True:
            text = self.text()
            if condition(text):
                return text
            assert time.monotonic() < deadline, f"not seen in {seconds} s; the screen shows:\n{text}"
            time.sleep(0.1)

    def flag(self, name: str) -> str:
        return self._tmux("display-message", "-p", f"#{{{name}}}").strip()

    def close(self) -> None:
        subprocess.run([*self._base, "kill-server"], check=False, capture_output=True)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path, columns=100, rows=32)
    try:
        yield made
    finally:
        made.close()


def attach(session: Path, *options: str) -> str:
    return shlex.join([sys.executable, "-m", "oomscope", "attach", "--ui", "always", *options, str(session)])


def test_keys_resize_and_leaving(terminal: Terminal, tmp_path: Path) -> None:
    session = recorded.waiting(tmp_path / "state")
    terminal.run(attach(session.path) + "; echo code=$?")
    terminal.wait(lambda text: "out of memory: activations exceed the card" in text)
    assert terminal.flag("alternate_on") == "1"
    terminal.press("4")
    terminal.wait(lambda text: "saves GiB" in text)
    terminal.press("Space")
    terminal.wait(lambda text: "14.6 GiB predicted" in text)
    terminal.resize(50, 12)
    terminal.wait(lambda text: "oomscope needs 60x15; this terminal is 50x12" in " ".join(text.split()))
    terminal.resize(80, 24)
    terminal.wait(lambda text: "[x] ckpt" in text)
    terminal.press("q")
    terminal.wait(lambda text: "Leave it waiting" in text)
    terminal.press("Enter")
    text = terminal.wait(lambda text: "code=0" in text)
    assert "READY" in text
    assert terminal.flag("alternate_on") == "0"
    assert terminal.flag("cursor_flag") == "1"
    assert terminal.flag("mouse_any_flag") == "0"
    assert list((session.path / "control").iterdir()) == []


def test_terminated_viewer_gives_the_terminal_back(terminal: Terminal, tmp_path: Path) -> None:
    session = recorded.eight_ranks(tmp_path / "state", steps=20)
    terminal.run(
        "sh -c 'echo $$ > " + shlex.quote(str(tmp_path / "pid")) + "; exec " + attach(session.path) + "'"
    )
    terminal.wait(lambda text: "usable limit" in text)
    os.kill(int((tmp_path / "pid").read_text()), 15)
    terminal.wait(lambda text: text.rstrip().endswith("READY"))
    assert terminal.flag("alternate_on") == "0"
    assert terminal.flag("mouse_any_flag") == "0"


def test_viewer_is_suspended_and_comes_back(terminal: Terminal, tmp_path: Path) -> None:
    session = recorded.waiting(tmp_path / "state")
    terminal.run(attach(session.path))
    terminal.wait(lambda text: "out of memory: activations exceed the card" in text)
    terminal.press("C-z")
    terminal.wait(lambda text: "Stopped" in text and text.rstrip().endswith("READY"))
    assert terminal.flag("alternate_on") == "0"
    terminal.run("fg")
    terminal.wait(lambda text: "out of memory: activations exceed the card" in text)
    terminal.press("4")
    terminal.wait(lambda text: "saves GiB" in text)


def test_lost_terminal_ends_the_viewer_and_not_the_job(terminal: Terminal, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_TRAINING.format(steps=100, finished=str(tmp_path / "finished")))
    terminal.run(f"{shlex.quote(sys.executable)} -m oomscope run --ui always {shlex.quote(str(script))}")
    terminal.wait(lambda text: "CPU, host memory" in text, seconds=60)
    terminal.close()
    assert not (tmp_path / "finished").exists()
    deadline = time.monotonic() + 60
    while not (tmp_path / "finished").exists():
        assert time.monotonic() < deadline, "the job did not outlive its terminal"
        time.sleep(0.1)


def test_closed_viewer_can_be_opened_again_on_the_running_job(terminal: Terminal, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_TRAINING.format(steps=400, finished=str(tmp_path / "finished")))
    python = shlex.quote(sys.executable)
    terminal.run(f"{python} -m oomscope run --ui always {shlex.quote(str(script))}")
    terminal.wait(lambda text: "CPU, host memory" in text, seconds=60)
    terminal.press("q")
    terminal.wait(lambda text: "Leave it running" in text)
    terminal.press("Enter")
    terminal.wait(lambda text: "shows it again" in text)
    assert terminal.flag("alternate_on") == "0"
    terminal.run(f"{python} -m oomscope attach --ui always last")
    terminal.wait(lambda text: "LIVE" in text and "CPU, host memory" in text)
    terminal.wait(lambda text: "DONE" in text, seconds=60)
    terminal.press("q")
    terminal.wait(lambda text: text.rstrip().endswith("READY"))
    assert (tmp_path / "finished").exists()
