import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("torch")

from oomscope_lightning import FIXES

from oomscope.agent.apply import apply
from oomscope.core.fixes import JobFacts

BY_ID = {fix.id: fix for fix in FIXES}
JOB = JobFacts(frameworks=frozenset({"lightning"}), world_size=2, compute_capability=(8, 0))


@pytest.fixture
def lightning(tmp_path, monkeypatch):
    """A stand-in for the module that defines Trainer: what is tested is the hook, not the library."""
    folder = tmp_path / "lightning" / "pytorch" / "trainer"
    folder.mkdir(parents=True)
    for place in (tmp_path / "lightning", tmp_path / "lightning/pytorch", folder):
        (place / "__init__.py").write_text("")
    (folder / "trainer.py").write_text(
        "class Trainer:\n    def __init__(self, **kwargs):\n        self.given = kwargs\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "lightning"]:
        sys.modules.pop(name)


def test_arguments_are_changed_where_the_script_makes_the_trainer(lightning):
    records = []
    runtime = apply(
        {"fixes": [{"id": "lightning-arguments", "options": {"precision": "bf16-mixed"}}]}, records.append
    )
    try:
        from lightning.pytorch.trainer.trainer import Trainer

        assert Trainer(max_epochs=2).given == {"max_epochs": 2, "precision": "bf16-mixed"}
        assert records[-1] == {
            "k": "fix", "id": "lightning-arguments", "state": "applied", "detail": "precision=bf16-mixed"
        }  # fmt: skip
    finally:
        runtime.undo()
    assert Trainer(max_epochs=2).given == {"max_epochs": 2}


def test_fixes_are_offered_to_scripts_of_the_framework_only():
    assert all(fix.applicable(JOB).ok for fix in FIXES)
    assert not any(fix.applicable(JobFacts(world_size=2)).ok for fix in FIXES)
    assert not BY_ID["lightning-fsdp"].applicable(JobFacts(frameworks=JOB.frameworks)).ok
    assert not BY_ID["lightning-bf16"].applicable(JobFacts(frameworks=JOB.frameworks, autocast=True)).ok
