"""One page per rule, shipped with the package; `oomscope rules show` prints them and the docs link to them."""

from __future__ import annotations

from importlib import resources

from oomscope.core.diagnosis.model import Rule


def page(rule: Rule) -> str:
    """The Markdown of a rule's page.

    Raises:
        FileNotFoundError: the rule has none (a test sees to it that built-in rules do).
    """
    return resources.files(__package__).joinpath(f"{rule.cause}.md").read_text(encoding="utf-8")
