"""The plan file: the fixes that a project decided on, for `oomscope run --plan`.

::

    schema = "oomscope.plan/1"
    fixes = ["expandable", "ckpt"]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from oomscope.errors import SetupError, UsageError
from oomscope.launch.patches import replace_file
from oomscope.launch.predict_catalogue import find

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
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]
        except ModuleNotFoundError as error:
            raise SetupError(
                "reading a plan file with Python 3.10 needs tomli", hint="pip install tomli"
            ) from error
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the plan {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    if data.get("schema") != SCHEMA:
        raise UsageError(f"{path}: schema is {data.get('schema')!r}, this program reads {SCHEMA!r}")
    fixes = data.get("fixes")
    if not isinstance(fixes, list) or not all(isinstance(each, str) for each in fixes):
        raise UsageError(f'{path}: fixes must be a list of names, as in fixes = ["ckpt"]')
    return PlanFile(tuple(find(each).id for each in fixes))


def write_plan(path: Path, fixes: tuple[str, ...]) -> None:
    """Write a plan; an existing file is replaced as a whole."""
    names = ", ".join(f'"{each}"' for each in fixes)
    text = f'schema = "{SCHEMA}"\nfixes = [{names}]\n'
    if path.exists():
        replace_file(path, text.encode())
    else:
        path.write_text(text, encoding="utf-8")
