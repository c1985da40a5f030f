"""Live bytes of the simulated device against torch's own allocation events on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

#: The one named difference: cuBLAS keeps a workspace for the forward and one for the backward thread.
CUBLAS = 2 * (4096 * 2 + 16 * 8) * 1024


@pytest.mark.parametrize("family", ["gpt", "llama", "vit", "moe"])
def test_live_bytes_are_those_of_the_cpu(family: str, simulate: Any, plain: Any) -> None:
    on_cpu = plain("families.py", family, "cpu").value("peak")
    run = simulate("families.py", family, "cuda", env={"CUBLASLT_WORKSPACE_SIZE": "0"})
    assert abs(run.value("peak") - CUBLAS - on_cpu) <= 0.0005 * on_cpu
    assert run.simulated["assumed_values"] == {}
