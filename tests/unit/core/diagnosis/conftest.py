"""Where the collected public texts are: they are not part of this repository."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="session")
def cases() -> Callable[[str], list[dict[str, Any]]]:
    """Rows of a collection; skips with the reason where the collection is not at hand."""

    def load(name: str) -> list[dict[str, Any]]:
        folder = Path(os.environ.get("OOMSCOPE_CASES") or ROOT.parent / "shared" / "cases")
        path = folder / name
        if not path.is_file():
            pytest.skip(f"no collection {name}: set OOMSCOPE_CASES to the folder that holds it")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]

    return load
