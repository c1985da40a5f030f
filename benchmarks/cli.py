"""How long `oomscope --help` takes, and what it imports: CPU time of the child process, minimum of ten."""

from __future__ import annotations

import os
import resource
import subprocess
import sys


def cpu_ms(command: list[str]) -> float:
    """CPU milliseconds (user and system) of one run of `command`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "80"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


def main() -> None:
    command = [sys.executable, "-m", "oomscope", "--help"]
    print(f"oomscope --help       {min(cpu_ms(command) for _ in range(10)):6.0f} ms CPU   (goal 150)")
    print(
        f"python -c pass        {min(cpu_ms([sys.executable, '-c', 'pass']) for _ in range(10)):6.0f} ms CPU"
    )
    code = "import sys, oomscope.cli.main; print(sorted({'numpy','textual','torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    print(f"heavy imports         {done.stdout.strip()}   (goal [])")


if __name__ == "__main__":
    main()
