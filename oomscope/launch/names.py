"""Names that other programs gave: containers, asked of their runtime, and Slurm jobs, asked of Slurm."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from oomscope.collect.procfs import Process
from oomscope.errors import AttachFailed

#: Programs that turn a container's name into its id, in the order asked.
RUNTIMES = ("docker", "podman", "nerdctl")
_TIMEOUT_S = 10.0
_ID = re.compile(r"[0-9a-f]{12,64}")


def container_pids(name: str, processes: Iterable[Process]) -> list[int]:
    """The processes on this host of a container, given by (the start of) its id or by its name.

    Raises:
        AttachFailed: no such container here, or nobody to ask for a name.
    """
    processes = list(processes)
    if re.fullmatch(r"[0-9a-f]{6,64}", name):
        found = _of_container(name, processes)
        if found:
            return found
    runtime = next((each for each in RUNTIMES if shutil.which(each)), None)
    if runtime is None:
        if re.fullmatch(r"[0-9a-f]{6,64}", name):
            raise AttachFailed(f"no process of a container {name} runs on this host", hint=_others(processes))
        raise AttachFailed(
            f"container:{name}: {', '.join(RUNTIMES[:-1])} and {RUNTIMES[-1]} are not on PATH, so a container's name "
            "cannot be looked up",
            hint=f"give its id. {_others(processes)}",
        )
    identifier = _ask_runtime(runtime, name)
    found = _of_container(identifier, processes)
    if not found:
        raise AttachFailed(
            f"{runtime} knows the container {name} ({identifier[:12]}), but no process of it is visible here",
            hint="it may have stopped, or run on another host or in a virtual machine: docker ps",
        )
    return found


def _of_container(identifier: str, processes: Iterable[Process]) -> list[int]:
    return [each.pid for each in processes if (each.container or "").startswith(identifier)]


def _others(processes: Iterable[Process]) -> str:
    known = sorted({each.container[:12] for each in processes if each.container})
    return f"containers here: {', '.join(known[:6])}" if known else "no process here runs in a container"


def _ask_runtime(runtime: str, name: str) -> str:
    code, out, err = run(runtime, "inspect", "-f", "{{.Id}}", "--", name)
    identifier = out.strip().splitlines()[0] if out.strip() else ""
    if code == 0 and _ID.fullmatch(identifier):
        return identifier
    if "no such" not in err.lower():
        raise AttachFailed(f"{runtime} could not look up the container {name}: {err or f'exit code {code}'}")
    names = run(runtime, "ps", "--format", "{{.Names}}")[1].split()
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or sorted(names)[:8]
    raise AttachFailed(
        f"{runtime} knows no container {name}",
        hint=f"running: {', '.join(near)}" if near else "none is running",
    )


def slurm_pids(job: str, processes: Iterable[Process], host: str) -> list[int]:
    """The processes on this host of a Slurm job, `4242` or `4242_7` for one task of an array.

    Their environment or cgroup says so; where it may not be read, `scontrol listpids` is asked.

    Raises:
        AttachFailed: it is not a job's number, or nothing of it runs here; squeue tells where it is.
    """
    if not re.fullmatch(r"\d+(?:_\d+)?", job):
        raise AttachFailed(f"slurm:{job} is not the number of a job", hint="squeue --me lists them")
    processes = list(processes)
    found = [each.pid for each in processes if job in (each.slurm_job, array_task(each.environ))]
    if found:
        return found
    known = {each.pid for each in processes}
    listed = [pid for pid in _listed(job) if pid in known]
    if listed:
        return listed
    raise _elsewhere(job, host)


def array_task(environ: dict[str, str] | None) -> str | None:
    """`JOB_TASK` of a process of a Slurm job array."""
    if not environ or "SLURM_ARRAY_JOB_ID" not in environ:
        return None
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID')}"


def _listed(job: str) -> list[int]:
    """Pids out of `scontrol listpids`: a table whose first column is PID; -1 where a step has ended."""
    if shutil.which("scontrol") is None:
        return []
    rows = run("scontrol", "listpids", job)[1].splitlines()
    first = (row.split()[0] for row in rows[1:] if row.split())
    return [int(each) for each in first if each.isdigit()]


def _elsewhere(job: str, host: str) -> AttachFailed:
    here = f"no process of Slurm job {job} on this host ({host})"
    if shutil.which("squeue") is None:
        return AttachFailed(
            f"{here}, and squeue is not on PATH to ask where it runs",
            hint=f"run oomscope on a node of the job: scontrol show job {job} | grep NodeList",
        )
    code, out, err = run("squeue", "--noheader", "--jobs", job, "--format", "%T|%N")
    rows = [row.partition("|") for row in out.splitlines() if row.strip()]
    if code != 0 or not rows:
        reason = err if err and "invalid job id" not in err.lower() else "it has ended, or never existed"
        return AttachFailed(f"{here}: {reason}", hint="squeue --me lists the jobs")
    state, _, nodes = rows[0]
    if state.strip() != "RUNNING":
        return AttachFailed(f"{here}: it is {state.strip()}", hint=f"squeue --jobs {job} --start")
    return AttachFailed(f"{here}: it runs on {nodes.strip()}", hint="run oomscope attach there")


def run(*command: str) -> tuple[int, str, str]:
    """(exit code, stdout, the last line of stderr) of a short command that asks nothing."""
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            list[str](command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        return 127, "", str(error.strerror)
    except subprocess.TimeoutExpired:
        return 124, "", f"it did not answer within {_TIMEOUT_S:.0f} s"
    return done.returncode, done.stdout, _last(done.stderr.splitlines())


def _last(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
