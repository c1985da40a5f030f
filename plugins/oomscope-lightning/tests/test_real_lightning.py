"""A fix in the real Trainer, on the CPU.

Needs an interpreter with lightning or pytorch_lightning: this one, or the one that OOMSCOPE_FRAMEWORKS_PYTHON names.
The FSDP strategy needs GPUs and is not tried here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHON = os.environ.get("OOMSCOPE_FRAMEWORKS_PYTHON", sys.executable)
_FIND = (
    "import importlib.util as u, sys; sys.exit(not any(map(u.find_spec, ('lightning', 'pytorch_lightning'))))"
)

pytestmark = [pytest.mark.slow, pytest.mark.integration]


def train(*words: str) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[2]), str(HERE.parent)])
    done = subprocess.run(
        [PYTHON, str(HERE / "real_lightning.py"), *words],
        capture_output=True, text=True, check=False, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def _lightning():
    if subprocess.run([PYTHON, "-c", _FIND], check=False).returncode:
        pytest.skip("no lightning (OOMSCOPE_FRAMEWORKS_PYTHON can name an interpreter that has it)")


def test_the_built_in_bfloat16_gives_lightnings_own_losses():
    ours, native = train("amp-bf16"), train("lightning-bf16")
    assert ours["precision"] == "32-true"
    assert ours["records"][-1]["state"] == "applied"
    assert ours["losses"] == native["losses"]


@pytest.mark.parametrize("fix", ["optim-in-bwd", "microbatch-exact"])
def test_built_in_fixes_keep_the_losses_although_the_step_takes_a_closure(fix):
    fixed = train(fix)
    assert fixed["records"][-1]["state"] == "applied"
    assert fixed["losses"] == pytest.approx(train()["losses"], rel=1e-6)


def test_bfloat16_is_on_and_the_losses_are_close():
    plain, fixed = train(), train("lightning-bf16")
    assert plain["types"] == ["torch.float32"]
    assert fixed["types"] == ["torch.bfloat16"]
    assert fixed["precision"] == "bf16-mixed"
    assert fixed["records"][-1]["state"] == "applied"
    assert len(plain["losses"]) == 4
    assert fixed["losses"] == pytest.approx(plain["losses"], rel=0.02)
