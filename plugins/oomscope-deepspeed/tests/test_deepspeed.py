import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from oomscope_deepspeed import FIXES, bytes_at_rest, next_configuration
from oomscope_deepspeed.__main__ import main

from oomscope.core.fixes import JobFacts

CONFIG = {
    "train_batch_size": "auto",
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "bf16": {"enabled": "auto"},
}


def test_only_the_zero_section_changes():
    made = next_configuration(CONFIG, 3, ("optimizer", "param"))
    assert made["zero_optimization"]["stage"] == 3
    assert made["zero_optimization"]["overlap_comm"] is True
    assert made["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert {k: v for k, v in made.items() if k != "zero_optimization"} == {
        k: v for k, v in CONFIG.items() if k != "zero_optimization"
    }
    assert CONFIG["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(("stage", "offload"), [(4, ()), (0, ()), (2, ("param",))])
def test_what_zero_does_not_have_is_refused(stage, offload):
    with pytest.raises(ValueError):  # noqa: PT011
        next_configuration(CONFIG, stage, offload)


def test_each_stage_holds_less_than_the_one_before():
    held = [bytes_at_rest(7 * 10**9, 8, stage, largest=10**8) for stage in range(4)]
    assert held == sorted(held, reverse=True)
    assert bytes_at_rest(10**9, 8, 3, ("param",), largest=10**7) == 4 * 10**7


def test_the_command_writes_json(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    assert main([str(path), "--stage", "2", "--parameters", "1e9", "--ranks", "4"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["zero_optimization"]["stage"] == 2
    assert "at rest" in out.err
    assert main([str(path), "--stage", "0"]) == 2


def test_fixes_are_offered_to_deepspeed_scripts_only():
    assert not any(fix.applicable(JobFacts(world_size=8)).ok for fix in FIXES)
    assert all(
        fix.applicable(JobFacts(world_size=8, frameworks=frozenset({"deepspeed"}))).ok for fix in FIXES
    )
