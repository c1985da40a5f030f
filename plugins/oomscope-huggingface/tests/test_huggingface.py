import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("torch")

from oomscope_huggingface import FIXES

from oomscope.agent.apply import apply
from oomscope.core.fixes import JobFacts

BY_ID = {fix.id: fix for fix in FIXES}
JOB = JobFacts(frameworks=frozenset({"transformers", "accelerate"}), world_size=2, compute_capability=(8, 0))

STAND_IN = """
import dataclasses

@dataclasses.dataclass
class TrainingArguments:
    output_dir: str = "o"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    bf16: bool = False
    gradient_checkpointing: bool = False
    optim: str = "adamw_torch"

    def __post_init__(self):
        self.total = self.per_device_train_batch_size * self.gradient_accumulation_steps

@dataclasses.dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    predict_with_generate: bool = False
"""


@pytest.fixture
def transformers(tmp_path, monkeypatch):
    """A stand-in with the form of the real class: what is tested is the hook, not the library."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "training_args.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("transformers", "transformers.training_args"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ("transformers", "transformers.training_args"):
        sys.modules.pop(name, None)


def made(fix_id, kind="TrainingArguments", **arguments):
    records = []
    plan = BY_ID[fix_id].plan(JOB)
    fixes = [{"id": name, "options": dict(options)} for name, options in plan.runtime.items()]
    runtime = apply({"fixes": fixes}, records.append)
    try:
        module = importlib.import_module("transformers.training_args")
        return getattr(module, kind)(**arguments), records
    finally:
        runtime.undo()


def test_arguments_are_changed_where_the_script_makes_them(transformers):
    args, records = made("hf-bf16", output_dir="x")
    assert args.bf16 is True
    assert args.output_dir == "x"
    assert records[-1]["state"] == "applied"
    from transformers.training_args import TrainingArguments

    assert TrainingArguments().bf16 is False, "undone"


def test_a_subclass_with_an_init_of_its_own_is_changed_too(transformers):
    args, records = made("hf-checkpointing", "Seq2SeqTrainingArguments", predict_with_generate=True)
    assert args.gradient_checkpointing is True
    assert args.predict_with_generate is True
    assert records[-1]["state"] == "applied"


def test_the_number_of_samples_in_a_step_stays(transformers):
    args, _ = made("hf-accumulate", per_device_train_batch_size=32, gradient_accumulation_steps=3)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 96
    assert args.per_device_train_batch_size == 16


def test_an_odd_batch_is_left_and_what_is_active_is_said(transformers):
    args, records = made("hf-accumulate", per_device_train_batch_size=7)
    assert args.per_device_train_batch_size == 7
    _, records = made("hf-checkpointing", gradient_checkpointing=True)
    assert records[-1]["state"] == "refused"


def test_fixes_are_offered_to_scripts_of_the_framework_only():
    assert all(fix.applicable(JOB).ok for fix in FIXES)
    assert not any(fix.applicable(JobFacts()).ok for fix in FIXES)
    active = JobFacts(frameworks=JOB.frameworks, checkpointing="model.gradient_checkpointing is True")
    assert "already active" in BY_ID["hf-checkpointing"].applicable(active).why
    env = JobFacts(frameworks=JOB.frameworks, env={"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert not BY_ID["accelerate-bf16"].applicable(env).ok
    assert BY_ID["accelerate-bf16"].plan(JOB).env == {"ACCELERATE_MIXED_PRECISION": "bf16"}
