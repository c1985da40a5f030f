import pytest

from oomscope.core.diagnosis import Evidence, diagnose
from oomscope.core.diagnosis.model import Excluded, Finding, Rule, Undecided
from oomscope.launch import loop
from oomscope.live import plugin_rules
from oomscope.live.judge import judge
from oomscope.plugins import Loaded


def rule(test) -> Rule:
    return Rule("oom.mine", "mine", "mine", "Q1.3", "nothing", test)


def loaded(value: object) -> Loaded:
    return Loaded("oomscope.rules", "x", "x:y", value, None)


@pytest.fixture
def install(monkeypatch):
    def run(*values: object) -> tuple[Rule, ...]:
        monkeypatch.setattr("oomscope.plugins.load", lambda group: [loaded(value) for value in values])
        monkeypatch.setattr(plugin_rules, "is_registered", lambda: True)
        return plugin_rules.plugin_rules()

    return run


def test_a_rule_or_several(install):
    one = rule(lambda e: Finding(0.9, "because"))
    found = install(one, [one, one], None, "no rule", 7)
    assert len(found) == 3
    assert diagnose(Evidence(), extra_rules=found).verdict.rule.cause == "mine"


def test_one_place_judges_for_explain_the_loop_and_the_viewer(install):
    install(rule(lambda e: Finding(0.9, "because")))
    assert judge(Evidence()).verdict.rule.cause == "mine"
    assert loop.judge is judge


def test_a_broken_rule_stays_alone(install):
    def fails(e: Evidence) -> Finding:
        raise RuntimeError("no")

    (broken,) = install(rule(fails))
    answer = broken.test(Evidence())
    assert isinstance(answer, Undecided)
    assert "RuntimeError: no" in answer.missing[0].what
    assert diagnose(Evidence(), extra_rules=(broken,)).verdicts == ()


def test_an_answer_of_another_kind_is_none(install):
    (odd,) = install(rule(lambda e: True))
    assert isinstance(odd.test(Evidence()), Undecided)
    (fine,) = install(rule(lambda e: Excluded()))
    assert isinstance(fine.test(Evidence()), Excluded)


def test_packages_that_name_the_group_are_found(tmp_path):
    assert not plugin_rules.is_registered([str(tmp_path), str(tmp_path / "none")])
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[console_scripts]\nx = y:z\n")
    assert not plugin_rules.is_registered([str(tmp_path)])
    (info / "entry_points.txt").write_text("[oomscope.rules]\nx = y:z\n")
    assert plugin_rules.is_registered([str(tmp_path)])


def test_without_any_there_are_none(monkeypatch):
    monkeypatch.setattr(plugin_rules, "is_registered", lambda: False)
    assert plugin_rules.plugin_rules() == ()
