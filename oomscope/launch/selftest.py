"""Does the simulated device work with the job's own interpreter? Asked in a child, before the user's script runs."""

from __future__ import annotations

import subprocess

from oomscope.errors import SetupError, TorchMissing
from oomscope.simulate import selftest

#: Importing torch from a cold disk takes most of it.
_TIMEOUT_S = 180.0


def check_simulator(python: str) -> None:
    """Run the self-test with `python`.

    Raises:
        TorchMissing: the interpreter has no torch.
        SetupError: the platform or this torch version cannot simulate a device; the message says which.
    """
    try:
        done = subprocess.run(
            selftest.command(python),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"the simulated device's self-test took more than {_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise SetupError(
            f"cannot start {python}: {error.strerror}", hint="choose another with --python"
        ) from error
    found = selftest.judge(done.returncode, done.stdout)
    if found["ok"]:
        return
    if found["torch"] is None and "cannot import torch" in str(found["reason"]):
        raise TorchMissing(
            f"sim: needs torch in the job's interpreter: {found['reason']}",
            hint=f"{python} -m pip install torch, or choose another interpreter with --python",
        )
    raise SetupError(f"sim: {found['reason']}", hint="run on a real GPU: leave out --device")
