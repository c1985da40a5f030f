"""The plan file: the fixes that a project decided on, for `oomscope run --plan`.

::

    schema = "oomscope.plan/1"
    fixes = ["expandable", "ckpt"]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oomscope.core.fixes import How
from oomscope.errors import FixError, UsageError
from oomscope.launch.patches import replace_file
from oomscope.launch.predict_catalogue import find
from oomscope.store.toml_file import read_toml

SCHEMA = "oomscope.plan/1"
DEFAULT_NAME = "oomscope.toml"


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan file says."""

    fixes: tuple[str, ...]


def read_plan(path: Path) -> PlanFile:
    """Read a plan.

    Raises:
        UsageError: missing, not TOML, newer than this program, or without a list of fixes.
        FixError: it names a fix that does not exist.
        SetupError: Python 3.10 without tomli.
    """
    data = read_toml(path, "the plan")
    if data.get("schema") != SCHEMA:
        raise UsageError(f"{path}: schema is {data.get('schema')!r}, this program reads {SCHEMA!r}")
    fixes = data.get("fixes")
    if not isinstance(fixes, list) or not all(isinstance(each, str) for each in fixes):
        raise UsageError(f'{path}: fixes must be a list of names, as in fixes = ["ckpt"]')
    return PlanFile(tuple(_kept(each) for each in fixes))


def _kept(fix_id: str) -> str:
    """The id of a fix that a plan can hold.

    Raises:
        FixError: there is no such fix, or it is an option of one script.
    """
    fix = find(fix_id)
    if fix.how == (How.ARGV,):
        raise FixError(
            f"{fix.id} is an option of the script's own: a plan cannot hold it",
            hint="oomscope fix SESSION --apply ID prints the options; put them on the script's command line",
        )
    return fix.id


def write_plan(path: Path, fixes: tuple[str, ...]) -> None:
    """Write a plan; an existing file is replaced as a whole.

    Raises:
        FixError: a fix that a plan cannot hold.
    """
    names = ", ".join(f'"{_kept(each)}"' for each in fixes)
    text = f'schema = "{SCHEMA}"\nfixes = [{names}]\n'
    if path.exists():
        replace_file(path, text.encode())
    else:
        path.write_text(text, encoding="utf-8")
