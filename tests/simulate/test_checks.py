"""The compatibility list: what training scripts do, done on the simulated device. One process per script of checks."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

SCRIPTS = Path(__file__).parent / "scripts"
OPTIONS = {f"checks_{name}.py": ("--world-size", "8") for name in ("distributed", "parallel")}


def _checks() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for path in sorted(SCRIPTS.glob("checks_*.py")):
        nodes = ast.parse(path.read_text()).body
        names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
        found += [(path.name, name) for name in names if name.startswith("check_")]
    return found


CHECKS = _checks()


def test_the_list_is_long_enough() -> None:
    assert len(CHECKS) >= 80


@pytest.mark.parametrize(("script", "check"), CHECKS, ids=[f"{a[7:-3]}-{b[6:]}" for a, b in CHECKS])
def test_check(script: str, check: str, outcome: Any) -> None:
    outcome(script, check, *OPTIONS.get(script, ()))
