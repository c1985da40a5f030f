"""Real processes to attach to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

JOBS = Path(__file__).parent / "jobs"


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OOMSCOPE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "state"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python process; everything started is ended after the test."""
    running: list[subprocess.Popen[str]] = []

    def make(
        *arguments: str, env: Mapping[str, str] | None = None, prefix: tuple[str, ...] = (), **options: Any
    ) -> Any:
        command = [*prefix, sys.executable, *arguments] if arguments else list(prefix)
        environ = {**os.environ, **(env or {})}
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, **options)
        running.append(process)
        return process

    yield make
    for process in running:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
        if process.stdout is not None:
            process.stdout.close()
        process.wait()


@pytest.fixture
def target(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Starts a program given as text, and waits until it prints "ready"."""

    def make(code: str, **options: Any) -> subprocess.Popen[str]:
        process = start("-c", code, **options)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        return process

    return make


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def torchrun(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> Callable[..., subprocess.Popen[str]]:
    """Starts a two-rank gloo job; waits until both ranks have made steps."""

    def make(run_id: str = "none", ranks: int = 2, **env: str) -> subprocess.Popen[str]:
        beat = tmp_path / f"beat-{time.monotonic_ns()}"
        process = start(
            "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port()),
            "--rdzv-id", run_id, str(JOBS / "train.py"), env={"HEARTBEAT": str(beat), **env},
        )  # fmt: skip
        process.beat = beat  # type: ignore[attr-defined]
        wait_until(lambda: all(lines(Path(f"{beat}.{rank}")) > 2 for rank in range(ranks)), 240)
        return process

    return make


def oomscope(*arguments: str, prefix: tuple[str, ...] = (), timeout: float = 60, **options: Any) -> Any:
    """Runs the command line; its exit code, stdout and stderr."""
    return subprocess.run(
        [*prefix, sys.executable, "-m", "oomscope", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False, **options,
    )  # fmt: skip


def lines(path: Path) -> int:
    try:
        return path.read_text().count("\n")
    except OSError:
        return 0


def wait_until(check: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if check():
            return
        time.sleep(0.02)
    raise AssertionError("nothing happened in time")
