"""The fixes in the real Trainer, on the CPU.

Needs an interpreter with transformers and accelerate: this one, or the one that OOMSCOPE_FRAMEWORKS_PYTHON names.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHON = os.environ.get("OOMSCOPE_FRAMEWORKS_PYTHON", sys.executable)

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@cache
def missing() -> str | None:
    """Why the tests cannot run."""
    done = subprocess.run(
        [PYTHON, "-c", "import torch, transformers, accelerate"], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no interpreter"])[-1]


@cache
def train(*words: str) -> dict:
    if missing():
        pytest.skip(f"{missing()} (OOMSCOPE_FRAMEWORKS_PYTHON can name an interpreter that has them)")
    folders = [str(HERE.parents[2]), str(HERE.parent)]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "OOMSCOPE"))
    }
    environment.update(
        PYTHONPATH=os.pathsep.join(folders), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=""
    )
    done = subprocess.run(
        [PYTHON, str(HERE / "real_trainer.py"), *words],
        capture_output=True, text=True, check=False, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", [(), ("--seq2seq",)], ids=["TrainingArguments", "a subclass"])
def test_checkpointing_is_on_and_the_losses_are_equal(kind):
    plain, fixed = train(*kind), train("hf-checkpointing", *kind)
    assert plain["checkpointing"] is False
    assert fixed["checkpointing"] is True
    assert fixed["losses"] == plain["losses"]
    assert fixed["records"][-1]["state"] == "applied"


def test_accumulation_sees_the_same_samples_in_smaller_parts():
    plain, fixed = train(), train("hf-accumulate")
    assert (fixed["batch"], fixed["accumulation"]) == (4, 2)
    assert fixed["losses"] == pytest.approx(plain["losses"], abs=1e-4)  # the Trainer logs four digits


@pytest.mark.parametrize("fix", ["hf-bf16", "accelerate-bf16"])
def test_bfloat16_is_on_and_the_losses_are_close(fix):
    plain, fixed = train(), train(fix)
    assert plain["precision"] == "no"
    assert fixed["precision"] == "bf16"
    assert fixed["losses"] == pytest.approx(plain["losses"], rel=0.01)


def test_the_built_in_bfloat16_gives_the_trainers_own_losses():
    ours, native = train("amp-bf16"), train("hf-bf16")
    assert ours["precision"] == "no"
    assert ours["records"][-1]["state"] == "applied"
    assert ours["losses"] == native["losses"] != train()["losses"]


def test_built_in_checkpointing_gives_the_losses_of_the_plain_run():
    assert train("ckpt")["losses"] == train()["losses"]
    assert train("ckpt")["records"][-1]["detail"].startswith("2 × GPT2Block")


def test_adafactor_takes_the_place_of_adam():
    assert train()["optimizer"] == "AdamW"
    fixed = train("hf-adafactor")
    assert fixed["optimizer"] == "Adafactor"
    assert len(fixed["losses"]) == 4
