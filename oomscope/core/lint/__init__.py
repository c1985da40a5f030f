"""Pitfalls and leaks that can be seen in source code, without running it."""

from __future__ import annotations

from oomscope.core.lint.features import Feature, features
from oomscope.core.lint.rules import RULES
from oomscope.core.lint.script import Finding, Script

__all__ = ["Feature", "Finding", "features", "lint"]


def lint(source: str) -> list[Finding]:
    """All findings in `source`, by line; [] for text that is not Python."""
    try:
        script = Script(source)
        found = [finding for rule in RULES for finding in rule(script)]
    except (SyntaxError, ValueError, RecursionError):
        return []
    return sorted(dict.fromkeys(found), key=lambda finding: (finding.line, finding.rule))
