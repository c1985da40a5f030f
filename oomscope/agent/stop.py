"""The end of a job after a number of steps.

As an exception that the interpreter itself treats as a normal exit.
"""

from __future__ import annotations


class StopTraining(SystemExit):
    """Raised out of the optimizer hook when the requested number of steps is done.

    It is a `SystemExit` with code 0: not an `Exception`, so training loops do not swallow it, and the
    interpreter ends with exit code 0 and no traceback; `finally` blocks and atexit handlers run as usual.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(0)
        self.steps = steps
