"""Ending jobs: signals, budgets, what is left behind, and the supervisor that outlives its starter."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from oomscope.errors import LaunchFailed
from oomscope.launch import supervisor
from oomscope.launch.job import JobControl, JobSpec, run_job
from oomscope.live.session import SessionView, log_files
from oomscope.store.session import ProcessMark, Session, process_start_time

pytestmark = pytest.mark.integration


@pytest.fixture
def printed(tmp_path):
    """printed(text, action, ...) -> an on_poll that acts once the job of `launch` has printed each text, in order."""

    def make(*steps):
        left = list(zip(steps[::2], steps[1::2], strict=True))

        def poll():
            output = "".join(
                path.read_text()
                for path in tmp_path.glob("home/sessions/*/attempts/001/logs/rank0/stdout.log")
            )
            if left and left[0][0] in output:
                left.pop(0)[1]()

        return poll

    return make


def wait_until(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_reaches_the_script_as_ctrl_c(launch, printed):
    script = (
        "import time, torch\ntorch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1)\nprint('up', flush=True)\n"
        "try: time.sleep(60)\nexcept KeyboardInterrupt: print('saved'); raise\n"
    )
    control = JobControl()
    run = launch(script, control=control, on_poll=printed("up", lambda: control.escalate("Ctrl-C")))
    assert run.result.exit_code == 130
    assert run.output() == "up\nsaved\n"
    assert [record["signal"] for record in run.of("term")] == ["SIGINT"]
    assert [rank.state for rank in run.result.ranks] == ["stopped"]


def test_each_ctrl_c_is_stronger_than_the_last(launch, printed):
    script = (
        "import signal, time\nfor n in (2, 15): signal.signal(n, lambda *a: print('no', a[0], flush=True))\n"
        "print('up', flush=True)\nwhile True: time.sleep(0.1)\n"
    )
    control = JobControl()
    presses = printed(
        *(each for text in ("up", "no 2", "no 15") for each in (text, lambda: control.escalate("Ctrl-C")))
    )
    run = launch(script, control=control, on_poll=presses)
    assert (run.result.exit_code, run.result.signal) == (137, 9)
    assert run.output() == "up\nno 2\nno 15\n"
    sent = [record["signal"] for record in run.session.supervisor_records() if record["k"] == "signal"]
    assert sent == ["SIGINT", "SIGTERM", "SIGKILL"]


def test_a_signal_to_us_goes_on_to_the_job(launch, printed):
    script = "import time\nprint('up', flush=True)\ntime.sleep(30)\n"
    before = signal.getsignal(signal.SIGTERM)
    run = launch(script, on_poll=printed("up", lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert run.result.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_that_runs_too_long_is_ended_and_the_handle_stays_usable(tmp_path, environment):
    session = Session.create(tmp_path, name="x")
    attempt = session.new_attempt()
    control = JobControl()
    code = "import signal, time; signal.signal(15, lambda *a: None); time.sleep(60); time.sleep(60)"
    spec = JobSpec(
        command=(sys.executable, "-c", code),
        cwd=tmp_path,
        env=environment,
        device=None,
        plan={},
        steps=None,
        detail=False,
        role="attempt",
        attempt_dir=attempt.path,
    )
    result = run_job(spec, session=session, control=control, timeout_s=0.5)
    assert (result.timed_out, result.signal) == (True, 9)
    assert control.level == 0
    sent = [record["signal"] for record in session.supervisor_records() if record["k"] == "signal"]
    assert sent == ["SIGTERM", "SIGKILL"]


def test_what_the_job_leaves_behind_is_ended_and_nothing_else(launch, tmp_path):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    script = f"""
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    """
    try:
        run = launch(script)
        assert run.result.exit_code == 0
        assert process_start_time(int((tmp_path / "pid").read_text())) == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_disk_that_is_full_for_us_does_not_end_the_job(launch, monkeypatch):
    """The state cannot be replaced and the result cannot be written; the answer still comes."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    started = []
    monkeypatch.setattr("oomscope.launch.job.LaunchedProcess", _then(started, monkeypatch, full))
    run = launch("print('goes on')\n")
    assert started
    assert run.result.exit_code == 0
    assert run.output() == "goes on\n"
    assert run.attempt.result() is None


def _then(started, monkeypatch, full):
    from oomscope.launch.processes import LaunchedProcess

    def start(*args, **kwargs):
        process = LaunchedProcess(*args, **kwargs)
        started.append(process)
        monkeypatch.setattr("oomscope.store.session.write_json", full)
        monkeypatch.setattr("oomscope.store.files.write_json", full)
        return process

    return start


def test_the_output_passes_through_byte_for_byte(launch, capfdbinary):
    script = "import os\nos.write(1, bytes(range(256)))\nos.write(2, b'\\xff\\r\\n')\n"
    run = launch(script, output="through")
    assert run.result.exit_code == 0
    captured = capfdbinary.readouterr()
    assert captured.out == bytes(range(256))
    assert captured.err == b"\xff\r\n"


def test_a_missing_program_is_no_job(tmp_path, environment):
    from oomscope.launch.processes import LaunchedProcess

    with pytest.raises(LaunchFailed, match="no-such-program"):
        LaunchedProcess(["no-such-program"], cwd=tmp_path, env=environment, output="through")


def test_output_can_be_kept_and_shown_at_once(tmp_path, environment):
    """`tee`: both streams into their files and on our stderr; stdout stays free for one JSON object."""
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from oomscope.launch.processes import LaunchedProcess
        child = LaunchedProcess([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr)"],
                                cwd=Path({str(tmp_path)!r}), env={{}}, output="tee",
                                logs=(Path({str(tmp_path / "o.log")!r}), Path({str(tmp_path / "e.log")!r})))
        while child.poll() is None: pass
        child.finish()
        print("{{}}")
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout == "{}\n"
    assert sorted(done.stderr.split()) == ["err", "out"]
    assert (tmp_path / "o.log").read_text() == "out\n"
    assert (tmp_path / "e.log").read_text() == "err\n"


SCRIPT = """
import time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(400):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


def test_the_supervisor_outlives_its_starter_and_the_job_is_seen_live(tmp_path, environment):
    """A starter process ends at once; the job goes on, can be watched, and is stopped by a request."""
    (tmp_path / "train.py").write_text(SCRIPT)
    starter = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from oomscope.launch import supervisor
        from oomscope.store.session import Session
        session = Session.create(Path({str(tmp_path / "home")!r}), name="train.py")
        payload = {{"command": [sys.executable, {str(tmp_path / "train.py")!r}], "cwd": {str(tmp_path)!r}}}
        supervisor.start(session, "oomscope.launch.supervised:supervise", payload)
        print(session.path)
    """)
    done = subprocess.run(
        [sys.executable, "-c", starter],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=True,
    )
    session = Session.open(done.stdout.strip())
    mark = ProcessMark.from_json(session.state()["supervisor"])
    try:
        view = SessionView(session)
        assert wait_until(lambda: view.poll() and view.ranks and view.ranks[0].step > 3)
        assert view.ranks[0].state == "running"
        assert view.state == "running"
        assert os.getsid(mark.pid) == mark.pid
        from oomscope.store import control

        request = control.send(session, "stop")
        assert wait_until(lambda: session.current_state() == "failed")
        view.poll()
        answers = [record for record in view.events if record["k"] == "answer"]
        assert [record["id"] for record in answers] == [request.id]
        assert view.ranks[0].state == "stopped", "it ended when asked"
        finished = [record for record in view.events if record["k"] == "finished"]
        assert finished[0]["exit_code"] == 130
        assert [(each.rank, each.stream) for each in log_files(view.attempt.path)] == [
            (0, "stdout"),
            (0, "stderr"),
        ]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(mark.pid, signal.SIGTERM)


def test_an_error_in_the_supervisor_reaches_the_session(tmp_path, environment):
    session = Session.create(tmp_path, name="x")
    supervisor.start(session, "oomscope.launch.supervised:supervise", {}, env=environment)
    assert wait_until(lambda: session.current_state() == "failed")
    finished = session.supervisor_records()[-1]
    assert finished["exit_code"] == 70
    assert "missing" in finished["text"]
    assert "TypeError" in (session.path / "supervisor.log").read_text()


def test_the_supervisor_runs_nothing_but_ours(tmp_path, environment):
    session = Session.create(tmp_path, name="x")
    with contextlib.suppress(LaunchFailed):
        supervisor.start(session, "os:system", {"command": ["true"]}, env=environment)
    assert wait_until(lambda: "not an entry" in (session.path / "supervisor.log").read_text())
    assert json.loads((session.path / "state.json").read_text())["state"] in ("starting", "failed")
