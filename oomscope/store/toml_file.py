"""Reading TOML with errors that name the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from oomscope.errors import SetupError, UsageError


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of `path`, which is `what` ("the plan") to people.

    Raises:
        UsageError: it cannot be read, or is not TOML.
        SetupError: Python 3.10 without tomli.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]
        except ModuleNotFoundError as error:
            raise SetupError(
                f"reading {what} with Python 3.10 needs tomli", hint="pip install tomli"
            ) from error
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    return data
