"""What the user asked the loop for, and how the loop ended: plain values, for the command line and supervisors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oomscope.launch.processes import Output

#: Attempts in one loop: the same failure three times is a matter for a person.
MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for, in values that JSON can carry to a supervisor."""

    command: tuple[str, ...]
    cwd: str
    device: str | None = None
    """A simulated card, without "sim:"; None: whatever the machine has."""
    steps: int | None = None
    ranks: tuple[int, ...] | None = None
    detail: bool = False
    history: bool = True
    """Record torch's allocation history; on a simulated device always."""
    output: Output = "files"
    take_best: bool = False
    """Take the recommended plan without asking."""
    chosen: tuple[str, ...] = ()
    """Fixes to take in place of the recommended plan."""
    initial: tuple[str, ...] = ()
    """Fixes of a plan file, active from the first attempt on."""
    allowed_risk: str = "rounding"
    """The highest risk class that may be taken without asking."""
    max_attempts: int = MAX_ATTEMPTS
    budget_s: float | None = None
    """No further attempt starts after so many seconds."""
    predict: bool = True

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunRequest:
        """The request that `dataclasses.asdict` and JSON made lists of."""
        fields: dict[str, Any] = {
            key: tuple(each) if isinstance(each, list) else each for key, each in value.items()
        }
        return cls(**fields)


@dataclass
class LoopOutcome:
    """How the loop ended."""

    exit_code: int
    """The exit code of the last attempt's own process."""
    oom: bool = False
    """The last attempt died of an out-of-memory error."""
    attempts: list[int] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    """`{"fix": id, "reason": sentence}` of each fix that was asked for and refused."""
