"""Opening a source line in the user's editor, with the screens put aside meanwhile."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from textual.app import App, SuspendNotSupported

#: Editors that take the line as `+N FILE`; the others get the file alone or their own form.
_PLUS_LINE = {"vi", "vim", "nvim", "nano", "emacs", "emacsclient", "micro", "kak", "joe", "ne", "mg", "view"}
_COLON_LINE = {"hx", "helix", "subl", "zed"}
_GOTO = {"code", "codium", "cursor", "windsurf"}


def editor_command(editor: str, file: str, line: int) -> list[str]:
    """The command that opens `file` at `line` in `editor`, which may carry arguments of its own."""
    parts = shlex.split(editor) or ["vi"]
    name = Path(parts[0]).name
    if name in _PLUS_LINE:
        return [*parts, f"+{line}", file]
    if name in _COLON_LINE:
        return [*parts, f"{file}:{line}"]
    if name in _GOTO:
        return [*parts, "--goto", f"{file}:{line}"]
    return [*parts, file]


def edit(app: App[Any], file: str, line: int) -> None:
    """Open `file` at `line` in $VISUAL or $EDITOR, else vi."""
    if not Path(file).is_file():
        app.notify(f"{file} is not on this machine", severity="warning")
        return
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        command = editor_command(editor, str(Path(file).absolute()), line)
        with app.suspend():
            subprocess.run(command, check=False)
    except SuspendNotSupported:
        app.notify("this terminal cannot be handed to an editor", severity="warning")
    except (OSError, ValueError) as error:
        app.notify(f"cannot start {editor}: {error}", severity="error")
