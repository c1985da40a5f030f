"""Write docs/keys.md from the action table: `python -m oomscope.tui.keys docs/keys.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from oomscope.tui.actions import keys_markdown


def main(arguments: list[str]) -> int:
    """Write the page to the file named by the first argument, docs/keys.md by default."""
    target = Path(arguments[0]) if arguments else Path("docs/keys.md")
    target.write_text(keys_markdown(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
