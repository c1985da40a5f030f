"""Runs scripts on the simulated device in child processes: a device once simulated stays so for its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    """What one child process left."""

    exit_code: int
    stdout: str
    stderr: str
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def peak(self) -> dict[str, Any]:
        return self.records["peak"]

    @property
    def simulated(self) -> dict[str, Any]:
        return self.records["simulated"]

    def composition(self) -> dict[str, int]:
        return {row["category"]: row["bytes"] for row in self.peak["composition"]}

    def value(self, name: str) -> Any:
        """The JSON value that the script printed as `name=…`."""
        for line in self.stdout.splitlines():
            if line.startswith(f"{name}="):
                return json.loads(line[len(name) + 1 :])
        raise AssertionError(f"the script printed no {name}=\n{self.stdout}\n{self.stderr[-3000:]}")


def environment(**extra: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTORCH_", "OOMSCOPE_"))}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def run_simulated(
    script: Path | str,
    *arguments: str,
    card: str = "a100-40g",
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    tmp: Path | None = None,
    timeout: float = 240,
    python: str = sys.executable,
) -> Run:
    """Run a script file, or the text of one, on a simulated card."""
    if "\n" in str(script):
        assert tmp is not None
        path = tmp / "script.py"
        path.write_text(str(script))
    else:
        path = SCRIPTS / script
    head = [python, "-W", "ignore", "-m", "oomscope.simulate", "--card", card]
    command = [*head, *options, str(path), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(**(env or {})),
        timeout=timeout,
        cwd=tmp or ROOT,
    )
    run = Run(done.returncode, done.stdout, done.stderr)
    for line in done.stderr.splitlines():
        if line.startswith('{"k":'):
            record = json.loads(line)
            run.records[record["k"]] = record
    return run


def run_plain(script: Path | str, *arguments: str, timeout: float = 240) -> Run:
    """Run a script without any simulation."""
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=timeout)
    return Run(done.returncode, done.stdout, done.stderr)


_groups: dict[tuple[str, ...], dict[str, str]] = {}


def check_outcome(script: str, check: str, *options: str) -> None:
    """Fail unless `check` of a script of checks passed; the script runs once for all its checks."""
    key = (script, *options)
    if key not in _groups:
        run = run_simulated(script, card="h100-80g", options=options)
        lines = [line for line in run.stdout.splitlines() if line.startswith("check ")]
        _groups[key] = dict(line[len("check ") :].split(": ", 1) for line in lines)
        _groups[key]["*"] = f"exit {run.exit_code}\n{run.stderr[-4000:]}"
    found = _groups[key]
    assert check in found, f"{script} did not get to {check}: {found['*']}"
    assert found[check] == "ok", found[check]


@pytest.fixture(scope="session")
def simulate() -> Any:
    """Run a script of `scripts/` on a simulated card."""
    return run_simulated


@pytest.fixture(scope="session")
def plain() -> Any:
    """Run a script of `scripts/` without any simulation."""
    return run_plain


@pytest.fixture(scope="session")
def outcome() -> Any:
    """Fail unless one check of a script of checks passed."""
    return check_outcome


@pytest.fixture
def simulate_text(tmp_path: Path) -> Any:
    """Run the text of a script on a simulated card, in an empty folder."""

    def run(text: str, *arguments: str, **kwargs: Any) -> Run:
        return run_simulated(text, *arguments, tmp=tmp_path, **kwargs)

    return run
