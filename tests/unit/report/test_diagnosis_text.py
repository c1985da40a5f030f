from oomscope.core.diagnosis import Evidence, diagnose
from oomscope.core.diagnosis.evidence import Fact, OomFact, Recovery, Where
from oomscope.core.diagnosis.model import Finding, Rule
from oomscope.report.diagnosis import headline, markdown, nothing_found, sureness, text
from oomscope.report.run import diagnosis_lines
from oomscope.units import GIB
from oomscope.views import diagnosis as diagnosis_view

OOM = OomFact(
    step=7, phase="forward", requested_bytes=2 * GIB, device_free_bytes=GIB, capacity_bytes=24 * GIB
)


def findings(confidence: float = 0.9, **more: object) -> dict:
    where = Where("/home/u/train.py", 7, "main", "y = model(x)  # a `long` comment " + "x" * 90)
    finding = Finding(
        confidence, "Because | of *this*. " * 12, (Fact("a fact <b>", "steps", 3),), where=where
    )
    rule = Rule("oom.mine", "mine", "my cause", "Q1.4", "x", lambda e: finding, ("expandable",))
    return diagnose(Evidence(oom=OOM, notes=("a note",)), extra_rules=(rule,)).to_json()


def test_the_headline():
    assert headline(findings()) == "step 7 · forward · tried 2.00 GiB, 1.00 GiB free · card 24.00 GiB"


def test_the_headline_of_host_memory_says_what_was_asked_for():
    found = {
        "subject": {"line": 3, "requested_bytes": None},
        "messages": [{"line": 3, "kind": "cpu_alloc", "cpu_bytes": 47 * GIB}],
    }
    assert headline(found) == "tried 47.00 GiB of host memory"


def test_sureness():
    assert [sureness(x) for x in (0.9, 0.6, 0.3)] == ["high 0.90", "likely 0.60", "possible 0.30"]


def test_eighty_columns_and_no_colour():
    out = text(findings())
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "\x1b" not in out
    assert "oom.mine: my cause  (high 0.90)" in out
    assert "at /home/u/train.py:7 in main" in out
    assert "Note: a note" in out
    assert "> First iteration?" in out


def test_weak_findings_take_one_line():
    out = text(findings(0.4))
    assert "Cause not decided" in out
    assert "Less likely: oom.mine 0.40" in out


def test_a_healthy_run():
    found = diagnose(Evidence()).to_json()
    assert "No memory problem found." in text(found)
    assert "No memory problem found." in markdown(found)


def test_markdown_is_escaped():
    out = markdown(findings())
    assert "&lt;b\\>" in out
    assert "Because \\| of \\*this\\*" in out
    assert "<details>" in out


def test_nothing_found():
    assert nothing_found(0, 1) == "no out-of-memory event found; no traceback in 1 line"
    assert nothing_found(1, 2000) == "no out-of-memory event found; 1 traceback of other kinds in 2,000 lines"


def test_a_failure_that_the_job_survived_is_told_as_such():
    recovered = Recovery(
        events=2, steps_after=37, retried_steps=1, cost_ns=3_200_000_000, kept_bytes=64 << 20
    )
    oom = OomFact(step=5, requested_bytes=1 << 30, device_free_bytes=1 << 20, capacity_bytes=8 << 30)
    findings = diagnose(Evidence(oom=oom, recovered=recovered, finished=True)).to_json()
    assert findings["recovered"]["events"] == 2
    for shown in (text(findings), markdown(findings)):
        words = " ".join(shown.split())
        assert "Recovered from out of memory: step 5" in words
        assert "2 out-of-memory errors were caught; training went on for 37 steps" in words
        assert "took 3.2 s longer than usual; 64.00 MiB stayed allocated since" in words
    view = diagnosis_view.read(findings)
    lines = diagnosis_lines(view)
    assert any("RECOVERED" in line for line in lines)
    assert not any("VERDICT" in line for line in lines)
    assert diagnosis_view.sentences(view)[0].startswith("recovered from out of memory")
