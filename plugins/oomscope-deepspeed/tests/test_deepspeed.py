import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1]))

from oomscope_deepspeed import FIXES, bytes_at_rest, next_configuration
from oomscope_deepspeed.__main__ import main

from oomscope.agent.apply import apply
from oomscope.core.fixes import JobFacts

BY_ID = {fix.id: fix for fix in FIXES}
JOB = JobFacts(world_size=8, frameworks=frozenset({"deepspeed"}))

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


@pytest.fixture
def deepspeed(tmp_path, monkeypatch):
    """A stand-in that returns what `initialize` was given."""
    (tmp_path / "deepspeed.py").write_text(
        "def initialize(args=None, model=None, config=None, config_params=None):\n"
        "    return args, config, config_params\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    yield
    sys.modules.pop("deepspeed", None)


def initialize(fix_id, *args, **kwargs):
    records = []
    plan = BY_ID[fix_id].plan(JOB)
    fixes = [{"id": name, "options": dict(options)} for name, options in plan.runtime.items()]
    runtime = apply({"fixes": fixes}, records.append)
    try:
        return importlib.import_module("deepspeed").initialize(*args, **kwargs), records
    finally:
        runtime.undo()


@pytest.mark.parametrize("name", ["config", "config_params"])
def test_the_configuration_is_changed_where_the_engine_is_made(deepspeed, name):
    given = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    (_, config, other), records = initialize("deepspeed-stage3", **{name: given})
    assert config["zero_optimization"] == {"stage": 3, "overlap_comm": True}
    assert config["bf16"] == {"enabled": True}
    assert other is None
    assert given["zero_optimization"]["stage"] == 1, "the script's own dictionary stays"
    assert (records[-1]["state"], records[-1]["detail"]) == ("applied", "ZeRO stage 3")


def test_a_file_named_on_the_command_line_is_read(deepspeed, tmp_path):
    class Args:
        deepspeed_config = str(tmp_path / "ds.json")

    Path(Args.deepspeed_config).write_text(json.dumps(CONFIG))
    (args, config, _), records = initialize("deepspeed-offload", Args())
    assert args.deepspeed_config is None
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert config["zero_optimization"]["stage"] == 2
    assert records[-1]["detail"] == "ZeRO stage 2 with offload_optimizer"


def test_what_is_active_or_not_understood_is_refused(deepspeed):
    (_, config, _), records = initialize("deepspeed-stage3", config={"zero_optimization": {"stage": 3}})
    assert records[-1]["state"] == "refused"
    assert "already active: ZeRO stage 3" in records[-1]["detail"]
    (_, config, _), records = initialize("deepspeed-stage2", config="nowhere.json")
    assert config == "nowhere.json"
    assert records[-1]["state"] == "refused"


@pytest.mark.parametrize("zero", [True, "stage3", None])
def test_a_configuration_in_another_form_does_not_stop_the_job(deepspeed, zero):
    (_, config, _), records = initialize("deepspeed-stage3", config={"zero_optimization": zero})
    if zero is None:
        assert config["zero_optimization"]["stage"] == 3
    else:
        assert config == {"zero_optimization": zero}
        assert records[-1]["state"] == "refused"


def test_a_file_with_comments_does_not_stop_the_job(deepspeed, tmp_path):
    class Args:
        deepspeed_config = str(tmp_path / "ds.json")

    Path(Args.deepspeed_config).write_text("{# half precision\n}")
    (args, config, _), records = initialize("deepspeed-offload", Args())
    assert args.deepspeed_config == Args.deepspeed_config
    assert config is None
    assert records[-1]["state"] == "refused"
