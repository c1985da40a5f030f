"""Live bytes of the simulated device against torch's own allocation events on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

#: The named difference: cuBLAS keeps a workspace for each thread. That of cuBLASLt is switched off here.
CUBLAS = 2 * (4096 * 2 + 16 * 8) * 1024
WITHOUT_LT = {"CUBLASLT_WORKSPACE_SIZE": "0"}


@pytest.mark.parametrize("family", ["gpt", "llama", "vit", "moe", "written"])
def test_live_bytes_are_those_of_the_cpu(family: str, simulate: Any, plain: Any) -> None:
    on_cpu = plain("families.py", family, "cpu").value("peak")
    run = simulate("families.py", family, "cuda", env=WITHOUT_LT)
    assert abs(run.value("peak") - CUBLAS - on_cpu) <= 0.0005 * on_cpu
    assert run.simulated["assumed_values"] == {}
