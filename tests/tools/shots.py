"""Draw the screens into PNG files from recorded sessions: `shots.py docs/images`.

The sessions are recorded first, by running two samples on a simulated card (a minute or two), so that the pictures
show what the program really says. `--keep FOLDER` keeps them there, or uses those that are there already.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from svg2png import convert
from textual.pilot import Pilot

from oomscope.store.library import sessions
from oomscope.store.session import Session
from oomscope.tui import themes
from oomscope.tui.app import OomscopeApp

ROOT = Path(__file__).parents[2]
CARD = "sim:a100-40g"


@dataclass(frozen=True)
class Shot:
    """One picture."""

    name: str
    script: str
    """The sample whose session is shown."""
    screen: str
    keys: tuple[str, ...] = ()
    size: tuple[int, int] = (120, 36)
    theme: str = themes.DARK


SHOTS = (
    Shot("live", "loss_list_leak", "live"),
    Shot("live-narrow", "loss_list_leak", "live", size=(80, 24)),
    Shot("live-light", "loss_list_leak", "live", theme=themes.LIGHT),
    Shot("oom", "loss_list_leak", "oom"),
    Shot("oom-activations", "activations_too_big", "oom", size=(160, 48)),
    Shot(
        "snapshot",
        "activations_too_big",
        "snapshot",
        keys=("tab", "down", "down", "down", "down"),
        size=(140, 40),
    ),
    Shot("fixes", "activations_too_big", "fixes", keys=("R",)),
    Shot("compare", "activations_too_big", "compare", size=(100, 24)),
    Shot("help", "activations_too_big", "fixes", keys=("question_mark",)),
)


def record(home: Path) -> None:
    """Run the samples whose sessions are not in `home` yet."""
    for script, options in (("loss_list_leak", ["--no-fix"]), ("activations_too_big", ["--yes"])):
        if session_of(home, script) is not None:
            continue
        command = [sys.executable, "-m", "oomscope", "run", "--ui", "never", "--device", CARD, *options]
        environment = {**os.environ, "OOMSCOPE_HOME": str(home)}
        # The job's own exit code is passed on: the first sample is meant to fail.
        subprocess.run(
            [*command, f"samples/{script}.py"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


def session_of(home: Path, script: str) -> Session | None:
    return next((each for each in sessions(home) if script in each.id), None)


async def settled(app: OomscopeApp, pilot: Pilot[str]) -> None:
    """Wait for a screen that reads files in the background."""
    while getattr(app.view, "is_busy", False):
        await pilot.pause(0.05)


async def draw(shot: Shot, home: Path, folder: Path) -> Path:
    session = session_of(home, shot.script)
    if session is None:
        raise SystemExit(f"samples/{shot.script}.py left no session; run it by hand to see why")
    os.environ.pop("NO_COLOR", None)
    os.environ["COLORTERM"] = "truecolor"
    app = OomscopeApp(session, hz=0, start=shot.screen)
    app.theme = shot.theme
    async with app.run_test(size=shot.size) as pilot:
        await pilot.pause()
        app.poll_now()
        await pilot.pause()
        await settled(app, pilot)
        await pilot.press(*shot.keys)
        await pilot.pause()
        await settled(app, pilot)
        with tempfile.TemporaryDirectory() as scratch:
            svg = Path(app.save_screenshot(filename=f"{shot.name}.svg", path=scratch))
            target = folder / f"{shot.name}.png"
            convert(svg, target, cell=10)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "images")
    parser.add_argument("--keep", type=Path, help="folder of the recorded sessions")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        home = arguments.keep or Path(scratch)
        record(home)
        for shot in SHOTS:
            print(asyncio.run(draw(shot, home, arguments.folder)))


if __name__ == "__main__":
    main()
