"""From any trace of an out-of-memory failure to its cause: evidence, flowchart, rules and verdict.

Parsing of texts.

diagnosis = diagnose(evidence)
diagnosis.to_json()["verdicts"][0]["cause"]
"""

from __future__ import annotations

from oomscope.core.diagnosis.engine import diagnose
from oomscope.core.diagnosis.evidence import Evidence
from oomscope.core.diagnosis.model import Diagnosis, Finding, FlowNode, Rule, Verdict

__all__ = ["Diagnosis", "Evidence", "Finding", "FlowNode", "Rule", "Verdict", "diagnose"]
