"""Live bytes of the simulated device against torch's own allocation events on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

#: Named differences: cuBLAS keeps a workspace for each thread (that of cuBLASLt is switched off here), and blocks of a
#: card share the outputs of a sum (a card without multiprocessors has none).
CUBLAS = 2 * (4096 * 2 + 16 * 8) * 1024
WITHOUT_LT = {"CUBLASLT_WORKSPACE_SIZE": "0"}
CARD = "a100-40g,sms=0"


@pytest.mark.parametrize("family", ["gpt", "llama", "vit", "moe"])
def test_live_bytes_are_those_of_the_cpu(family: str, simulate: Any, plain: Any) -> None:
    on_cpu = plain("families.py", family, "cpu").value("peak")
    run = simulate("families.py", family, "cuda", card=CARD, env=WITHOUT_LT)
    assert abs(run.value("peak") - CUBLAS - on_cpu) <= 0.0005 * on_cpu
    assert run.simulated["assumed_values"] == {}
