"""Walking the flowchart again after the user has answered a question otherwise.

The rules are asked again with the user's answers beside everything that was recorded; what comes of it says that it
rests on the user's word. The result is that of `oomscope explain --answer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oomscope.core.diagnosis import Evidence
from oomscope.live.evidence import collect
from oomscope.live.judge import judge
from oomscope.protocol import layout
from oomscope.views import diagnosis as view
from oomscope.views.diagnosis import Diagnosis, Node

#: What `space` walks through on a question.
CYCLE = ("yes", "no")


def next_answer(node: Node, given: str | None) -> str | None:
    """The answer after `given` (None: as found) when the user presses the key again."""
    choices = [answer for answer in CYCLE if answer != node.answer]
    if given is None:
        return choices[0]
    at = choices.index(given) if given in choices else len(choices)
    return choices[at + 1] if at + 1 < len(choices) else None


class Rewalk:
    """One attempt's evidence, read once (seconds where there is a large snapshot), and walked as often as asked."""

    def __init__(self, session: Path, attempt: int, rank: int | None) -> None:
        self.attempt = attempt
        self._folder = Path(layout.attempt_dir(str(session), attempt))
        self._rank = rank
        self._evidence: Evidence | None = None

    def walk(self, answers: Mapping[str, str]) -> Diagnosis:
        """The diagnosis with `answers` (question to "yes" or "no") in place of what was found.

        Raises:
            OomscopeError: the attempt's folder is gone or cannot be read.
        """
        if self._evidence is None:
            self._evidence = collect(self._folder, self._rank)
        return view.read(judge(self._evidence, answers).to_json(), attempt=self.attempt)


__all__ = ["CYCLE", "Rewalk", "next_answer"]
