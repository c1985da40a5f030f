"""Attaching to real jobs: ladder, agent, detach, lease, refusals."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from oomscope.launch import attach_place, attach_session, preflight
from oomscope.launch.attach_session import AttachSession
from oomscope.launch.attachment import Options, Rung
from oomscope.launch.discover import discover
from oomscope.store.tail import read_records
from oomscope.views.attach import attach_json

from .conftest import JOBS, free_port, lines, oomscope, wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or sys.platform != "linux",
        reason="the ptrace injector is for x86-64 Linux",
    ),
]


@pytest.fixture(autouse=True)
def ptrace_is_allowed(start):
    process = start("-c", "import time; print('up', flush=True); time.sleep(60)")
    process.stdout.readline()
    verdict = preflight.check(process.pid)
    if not verdict.ok:
        pytest.skip(f"ptrace is not allowed here: {verdict.why}")
    process.kill()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The machine may be busy: nothing here measures how fast an agent comes and goes."""
    monkeypatch.setattr(attach_session, "_LEAVE_S", 60.0)


def attach(target, **options):
    options = {"agent": True, "answer_s": 60.0, **options}
    session = AttachSession(discover(str(target)), Options(**options))
    session.climb()
    return session


def records(session, each):
    name = next(
        path for path in session.attempt.procs.iterdir() if f"-{each.rank.namespace_pid}." in path.name
    )
    return read_records(name)


def losses(job, ranks=2):
    return [
        [line.split()[1] for line in Path(f"{job.beat}.{rank}").read_text().splitlines()]
        for rank in range(ranks)
    ]


def test_forty_cycles_leave_the_job_as_it_was(torchrun, tmp_path):
    """With DataLoader workers: a record written to a reused descriptor number would land in their sockets."""
    settings = {"STEP_MS": "20", "WORKERS": "2"}
    stop = tmp_path / "stop"
    job = torchrun(**settings, STOP=str(stop), SECONDS="3600")
    session = AttachSession(discover(str(job.pid)), Options(agent=True, answer_s=60.0))
    # The agent looks for orders twice a second; the cycles shall not take as long as that.
    cycles = 0
    while cycles < 40 and job.poll() is None:
        session.attach_agents()
        assert [each.agent for each in session.ranks] == ["active", "active"], [
            each.why_not_higher for each in session.ranks
        ]
        assert session.detach() == []
        for each in session.ranks:
            each.place.lease.write_text("")
        session.view = type(session.view)(session.session)
        for path in session.attempt.procs.iterdir():
            rows = [row["k"] for row in read_records(path)]
            assert rows.count("hello") == 1
            assert "agent_error" not in rows
            path.unlink()
        cycles += 1
    assert cycles == 40
    last = max(lines(Path(f"{job.beat}.{rank}")) for rank in range(2)) + 50
    (tmp_path / "new").write_text(str(last))
    (tmp_path / "new").rename(stop)
    assert job.wait(240) == 0
    session.refresh()
    session.close()
    calm = torchrun(**settings, STEPS=str(min(last, 400)))
    assert calm.wait(240) == 0
    first = [each[:400] for each in losses(job)]
    assert first == losses(calm), "losses must not change"


def test_the_ladder_of_a_torchrun_job(torchrun):
    job = torchrun("nightly", WORKERS="1", SECONDS="60")
    session = attach("nightly")
    session.wait_for_readings(10)
    assert [each.rung for each in session.ranks] == [Rung.AGENT, Rung.AGENT]
    assert [session.number_of(each) for each in session.ranks] == [0, 1]
    assert all(len(each.rank.workers) == 1 for each in session.ranks)
    for each in session.ranks:
        state = session.state_of(each)
        # Steps go on from the optimizer's own count, not from the attach.
        assert state.step > 2
        assert state.model["parameters_bytes"] == 76840
        # The model was built long before; its calls are seen all the same.
        wait_until(
            lambda state=state: (session.refresh(), state.model["root_class"])[1] == "DistributedDataParallel"
        )
        assert records(session, each)[-1]["k"] != "agent_error"
        assert any(row.get("input_numel") == 32 * 64 for row in records(session, each) if row["k"] == "step")
        assert state.agent_errors == []
        assert each.report.injector == "ptrace"
        assert each.report.thread != each.rank.pid, "the training thread is not stopped"
        assert each.stack.main.frames[-1].file.endswith("train.py")
    assert session.dump() == 2
    wait_until(
        lambda: all(any(row["k"] == "dump" for row in records(session, each)) for each in session.ranks)
    )
    before = [lines(Path(f"{job.beat}.{rank}")) for rank in range(2)]
    session.close()
    for each in session.ranks:
        assert each.agent == "left"
        rows = records(session, each)
        assert [row["k"] for row in rows][-2:] == ["detached", "bye"]
    wait_until(lambda: all(lines(Path(f"{job.beat}.{rank}")) > before[rank] + 3 for rank in range(2)))
    assert session.session.state()["state"] == "done"
    assert (session.attempt.path / "host").is_dir()
    assert job.poll() is None


PHASES = """
import sys, time, torch
class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(float(sys.argv[1]))
        return super().forward(x)
model = Slow(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
if sys.argv[2:]:
    model = torch.compile(model, backend="eager")
while True:
    loss = model(torch.ones(2, 4)).sum()
    loss.register_hook(lambda grad: time.sleep(float(sys.argv[1])))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", flush=True)
"""


@pytest.mark.parametrize("compiled", [False, True])
def test_phases_of_a_model_that_was_built_before(start, compiled):
    """Forward, backward and the rest as in a launched run, except in compiled code, which is left alone and said."""
    job = start("-c", PHASES, "0.3", *(["compiled"] if compiled else []))
    for _ in range(2):
        assert job.stdout.readline() == "step\n"
    session = attach(job.pid)
    (each,) = session.ranks
    wait_until(lambda: (session.refresh(), session.state_of(each) and session.state_of(each).step > 3)[1], 60)
    phases = set()

    def seen():
        session.refresh()
        phases.add(session.state_of(each).phase)
        return {"backward", "other" if compiled else "forward"} <= phases

    wait_until(seen, 60)
    notes = [note for note in attach_json(session)["notes"] if "torch.compile" in note]
    assert len(notes) == compiled
    assert session.state_of(each).agent_errors == []
    session.close()
    assert session.ranks[0].agent == "left"
    assert job.stdout.readline() == "step\n"


def test_mp_spawn_ranks_learn_their_numbers_from_the_agent(start):
    job = start(str(JOBS / "spawned.py"), str(free_port()), "60")
    assert job.stdout.readline() == "training\n"
    found = discover(str(job.pid))
    assert [rank.rank for rank in found.ranks] == [None, None]
    assert any("torch.multiprocessing.spawn" in problem for problem in found.problems)
    session = attach(job.pid)
    wait_until(lambda: (session.refresh(), None not in map(session.number_of, session.ranks))[1], 40)
    assert sorted(session.number_of(each) for each in session.ranks) == [0, 1]
    session.close()
    assert job.poll() is None


def test_the_agent_leaves_when_nobody_renews_the_lease(torchrun, monkeypatch):
    monkeypatch.setattr(attach_place, "LEASE_S", 1.0)
    job = torchrun(ranks=1, SECONDS="60")
    session = attach(job.pid)
    (each,) = session.ranks
    assert each.agent == "active"
    # From here on nobody calls refresh(), as if the viewer had been killed.
    wait_until(lambda: [row for row in records(session, each) if row["k"] == "detached"])
    (gone,) = [row for row in records(session, each) if row["k"] == "detached"]
    assert gone["why"] == "the lease expired"
    again = attach(job.pid)
    assert again.ranks[0].agent == "active", "a new attach works after the old agent has left"
    again.close()
    session.close()


def test_a_second_attach_is_told_of_the_first(torchrun):
    job = torchrun(ranks=1, SECONDS="60")
    first = attach(job.pid)
    second = attach(job.pid)
    assert second.ranks[0].agent == "already"
    assert str(first.attempt.path) in second.ranks[0].why_not_higher
    assert second.ranks[0].rung is Rung.STACKS
    second.close()
    first.refresh()
    assert first.ranks[0].agent == "active", "the second one leaving does not take the first one away"
    first.close()


def test_a_killed_job_is_not_called_out_of_memory_without_proof(target):
    process = target("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    session = attach(process.pid, agent=False)
    session.wait_for_readings(5)
    process.kill()
    process.wait()
    wait_until(lambda: (session.refresh(), session.is_over)[1])
    session.recorder.settle()
    session.close()
    notes = [row.get("text", "") for row in session.session.supervisor_records() if row["k"] == "note"]
    assert (
        any("SIGKILL" in note and "scheduler" in note for note in notes)
        or session.ranks[0].exit_status is None
    ), notes
    assert session.session.state()["state"] == ("failed" if session.ranks[0].exit_status else "done")


def test_a_python_that_is_too_old_is_refused_before_anything_is_sent(target, monkeypatch):
    process = target("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    monkeypatch.setattr(attach_session, "python_version", lambda pid: (2, 7))
    session = attach(process.pid)
    assert session.ranks[0].agent == "failed"
    assert "Python 2.7" in session.ranks[0].why_not_higher
    assert session.ranks[0].report is None
    session.close()


def test_a_job_without_torch(target):
    process = target(
        "import threading, time\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    session = attach(process.pid)
    (each,) = session.ranks
    assert (each.agent, each.rung) == ("failed", Rung.STACKS)
    assert "torch" in each.why_not_higher
    session.close()
    assert process.poll() is None


def test_ranks_without_an_agent_are_shown_from_outside(torchrun):
    job = torchrun(SECONDS="60")
    session = attach(job.pid, agent=False)
    wait_until(lambda: session.refresh() and len(session.view.ranks) == 2, 15)
    for state in session.view.ranks:
        assert state.hello["role"] == "observed"
        assert state.rss_bytes > 1 << 20
        assert state.step > 0, "guessed from the local variable `step`"
        assert state.state == "running"
    assert all(session.state_of(each) is None for each in session.ranks), "a guess is not what an agent told"
    session.attach_agents()
    session.wait_for_readings(10)
    assert all(session.state_of(each).hello["role"] == "attached" for each in session.ranks)
    session.close()


def test_a_stuck_job_shows_where_it_is(start):
    process = start(str(JOBS / "stuck.py"))
    process.stdout.readline()
    session = attach(process.pid, agent=False)
    (each,) = session.ranks
    assert each.stack.main.frames[0].line == 11
    session.close()


def test_once_json_keeps_its_schema(torchrun):
    job = torchrun("json-run", SECONDS="60")
    schema = json.loads(files("oomscope").joinpath("schemas/attach.1.json").read_text())
    for extra in (["--observe-only"], [], ["--agent"]):
        done = oomscope("attach", str(job.pid), "--once", "--json", *extra)
        assert done.returncode == 0, done.stderr
        value = json.loads(done.stdout)
        jsonschema.validate(value, schema)
        rungs = {row["rung"] for row in value["ranks"]}
        assert rungs == {"observe" if "--observe-only" in extra else "agent" if extra else "stacks"}
        assert value["job"]["run_id"] == "json-run"
        assert all(row["rss_bytes"] > 1 << 20 for row in value["ranks"])
    assert [row["rank"] for row in value["ranks"]] == [0, 1]
    assert all(row["step"] > 0 for row in value["ranks"])
    text = oomscope("attach", "json-run", "--once")
    assert text.returncode == 0
    assert "not asked for" in text.stdout


def test_a_program_that_is_not_python(start):
    process = subprocess.Popen(["sleep", "60"])
    try:
        done = oomscope("attach", str(process.pid), "--once")
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 5
    assert "no process of it trains with Python" in done.stderr
    assert "oomscope top" in done.stderr


def test_a_python_without_symbols():
    """It calls itself Python and exports nothing: what a static build without symbols looks like."""
    process = subprocess.Popen(["python3", "60"], executable=shutil.which("sleep"))
    try:
        done = oomscope("attach", str(process.pid), "--once", "--json", "--agent")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["ranks"]
    assert row["rung"] == "observe"
    assert "exports no PyGILState_Ensure" in row["why_not_higher"]
    assert "start the job with oomscope run" in row["why_not_higher"]


@pytest.mark.parametrize(
    ("target_name", "code", "words"),
    [
        ("4194000", 5, "no process"),
        ("1", 5, "trains nothing itself"),
        ("9" * 20, 5, "no process"),
        ("no-such-script", 5, "nothing matches"),
        ("slurm:99", 5, "Slurm job 99"),
    ],
)
def test_wrong_targets(target_name, code, words):
    done = oomscope("attach", target_name, "--once")
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_zombie():
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        done = oomscope("attach", str(process.pid), "--once")
    assert done.returncode == 5
    assert "zombie" in done.stderr


def test_several_jobs_of_one_name_are_listed(start):
    jobs = [start(str(JOBS / "stuck.py")) for _ in range(2)]
    for job in jobs:
        job.stdout.readline()
    done = oomscope("attach", "stuck.py", "--once")
    assert done.returncode == 2
    assert all(str(job.pid) in done.stderr for job in jobs)


def test_a_process_that_is_traced_already(target):
    process = target("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    tracer = subprocess.Popen(
        [
            sys.executable, "-c",
            f"import ctypes, time; l = ctypes.CDLL(None); print(l.ptrace(0x4206, {process.pid}, 0, 0), "
            "flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with tracer:
        assert tracer.stdout.readline().strip() == "0"
        verdict = preflight.check(process.pid)
        assert verdict.code == "traced"
        assert str(tracer.pid) in verdict.why
        session = attach(process.pid)
        assert session.ranks[0].rung is Rung.STACKS, "non-blocking stacks work beside a tracer"
        assert session.ranks[0].agent == "failed"
        session.close()
        tracer.kill()


def test_under_a_seccomp_profile(target, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler for the seccomp wrapper")
    wrapper = tmp_path / "noptrace"
    subprocess.run(["gcc", "-o", str(wrapper), str(Path(__file__).parent / "noptrace.c")], check=True)
    process = target(
        "import threading, time\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    done = oomscope("attach", str(process.pid), "--once", "--json", "--agent", prefix=(str(wrapper),))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["ranks"]
    assert row["rung"] == "stacks"
    assert "SYS_PTRACE" in row["why_not_higher"] or "seccomp" in row["why_not_higher"]


AS_NOBODY = """
import os, sys
import oomscope.cli.attach, oomscope.cli.attach_live
from oomscope.cli.main import main
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(["attach", sys.argv[1], "--once", "--json", "--agent"]))
"""


def test_another_users_process(target):
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    process = target("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    with tempfile.TemporaryDirectory() as home:  # not below pytest's folder, which others may not enter
        os.chmod(home, 0o777)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(process.pid)],
            capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "OOMSCOPE_HOME": home},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["ranks"]
    assert row["rung"] == "observe"
    assert "belongs to uid 0, we are uid 65534" in row["why_not_higher"]
    assert "sudo" in row["why_not_higher"]
    assert process.poll() is None


def test_a_job_in_another_pid_and_mount_namespace(start, state_folder, tmp_path):
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare")
    outer = start(
        str(JOBS / "train.py"), env={"SECONDS": "90", "HEARTBEAT": str(tmp_path / "beat")},
        prefix=(unshare, "--pid", "--fork", "--mount-proc", "--mount", "--kill-child"),
    )  # fmt: skip
    wait_until(lambda: lines(tmp_path / "beat.0") > 2, 90)
    pid = _python_child(outer.pid)
    session = attach(pid)
    (each,) = session.ranks
    if each.rank.namespace_pid == each.rank.pid:
        pytest.skip("unshare made no pid namespace")
    assert each.place.is_spool
    session.wait_for_readings(10)
    assert each.rung is Rung.AGENT, each.why_not_higher
    assert session.state_of(each).step > 0
    spool = each.place.outside
    session.close()
    assert not spool.exists(), "the spool is removed after the agent has left"


def _python_child(pid):
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None
