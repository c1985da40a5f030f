"""Training frameworks, where they are installed.

`OOMSCOPE_FRAMEWORKS_PYTHON` names an interpreter that has torch and them; without it, this one is asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow
PYTHON = os.environ.get("OOMSCOPE_FRAMEWORKS_PYTHON", sys.executable)


def needs(*packages: str) -> None:
    """Skip with the reason when the interpreter lacks a package."""
    for package in ("torch", *packages):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
        if subprocess.run([PYTHON, "-c", code], timeout=120).returncode:
            pytest.skip(f"{package} is not installed in {PYTHON}")


@pytest.mark.parametrize(
    "options", [(), ("fp16",), ("checkpointing",)], ids=["plain", "fp16", "checkpointing"]
)
def test_trainer_of_transformers(options: tuple[str, ...], simulate: Any) -> None:
    needs("transformers", "accelerate")
    run = simulate("hf_trainer.py", *options, python=PYTHON)
    assert run.exit_code == 0, run.stderr[-3000:]
    assert run.value("device") == "cuda:0"
    assert run.value("steps") == 3
    assert run.value("peak") == run.peak["peak_allocated_bytes"]


def test_models_of_transformers(simulate: Any) -> None:
    needs("transformers")
    run = simulate("hf_models.py", python=PYTHON)
    assert run.exit_code == 0, run.stderr[-3000:]
    assert all(run.value(name) > 8 << 20 for name in ("gpt2", "llama", "mixtral", "bert", "t5"))
    assert run.simulated["unsupported"] == []


@pytest.mark.parametrize("ranks", [1, 8])
def test_accelerate(ranks: int, simulate: Any) -> None:
    needs("accelerate")
    options = ("--world-size", str(ranks)) if ranks > 1 else ()
    run = simulate("accelerate_loop.py", python=PYTHON, options=options)
    assert run.exit_code == 0, run.stderr[-3000:]
    assert run.value("processes") == ranks


def test_lightning(simulate: Any) -> None:
    needs("pytorch_lightning")
    run = simulate("lightning_fit.py", python=PYTHON)
    assert run.exit_code == 0, run.stderr[-3000:]
    assert run.value("steps") == 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(stage: int, simulate: Any) -> None:
    needs("deepspeed")
    run = simulate("deepspeed_zero.py", str(stage), python=PYTHON, options=("--world-size", "4"))
    assert run.exit_code == 0, run.stderr[-3000:]
    assert run.value("peak") > 0


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(8, 1), (8, 2), (64, 8)])
def test_the_style_of_torchtitan(ranks: int, tensor_parallel: int, simulate: Any) -> None:
    peaks = []
    for rank in (0, ranks - 1):
        options = ("--world-size", str(ranks), "--rank", str(rank))
        run = simulate("titan_style.py", str(tensor_parallel), options=options)
        assert run.exit_code == 0, run.stderr[-3000:]
        assert run.value("local") <= run.value("whole") / ranks * 1.1
        peaks.append(run.value("peak"))
        assert run.composition()["optimizer state"] >= 2 * 4 * run.value("local")
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
