"""`oomscope top` and `oomscope doctor`: rows, text, JSON, screen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files

import jsonschema
import pytest
from click.testing import CliRunner

from oomscope.collect.machine import Machine, MachineWatch
from oomscope.launch import doctor as checks
from oomscope.launch.whose import Owner, Owners
from oomscope.live.state import RankState
from oomscope.views.machine import machine_json, machine_view
from oomscope.views.machine_text import bar, machine_lines

GIB = 1 << 30


def schema(name):
    return json.loads(files("oomscope").joinpath(f"schemas/{name}.1.json").read_text())


@pytest.fixture
def view_of(machine):
    def make(scenario, pids=None, owners=None, readings=None):
        fake = machine(scenario=scenario, pids=pids)
        watch = MachineWatch(["nvidia", "host"], period_s=0.1, environ=fake.environ())
        try:
            watch.first_reading()
        finally:
            watch.close()
        return machine_view(watch.machine, watch.statuses, owners or {}, readings or {})

    return make


ME = os.getpid()


def ranks(count):
    return {f"rank{i}": 2**22 - 100 + i for i in range(count)}


def test_memory_by_owner(view_of):
    pids = ranks(8) | {"rank0": ME}
    readings = {ME: RankState(rank=0, pid=ME, allocated_bytes=30 * GIB, reserved_bytes=36 * GIB)}
    view = view_of("8xh100", pids, {ME: Owner("train.py", 0, False)}, readings)
    first = view.gpus[0]
    assert first.allocated_bytes == 30 * GIB
    assert first.cached_bytes == 6 * GIB
    assert first.other_cuda_bytes == (41500 << 20) - 36 * GIB
    assert first.unaccounted_bytes == 500 << 20
    cells = bar(first, 40)
    assert sum(len(text) for text, _ in cells) == 40
    assert [name for _, name in cells] == ["allocated", "inactive", "baseline", "other", "free"]
    assert sum(len(text) for text, name in cells if name != "free") == round(
        (42000 << 20) / first.total_bytes * 40
    )
    value = machine_json(view)
    jsonschema.validate(value, schema("machine"))
    assert value["gpus"][0]["processes"][0]["job"] == "train.py"
    assert value["gpus"][0]["processes"][0]["rss_bytes"] > 1 << 20
    # A rank that does not tell is a rank all the same; the others on this machine belong to no job.
    silent = view_of("8xh100", pids, {ME: Owner("train.py", 0, False)}).gpus
    assert [name for _, name in bar(silent[0], 40)] == ["baseline", "other", "free"]
    assert [name for _, name in bar(silent[1], 40)] == ["other", "free"]
    text = "\n".join(machine_lines(view))
    assert "train.py r0" in text
    assert "power cap" in text
    assert all(len(line) <= 130 for line in machine_lines(view)[:12])


@pytest.mark.parametrize("scenario", ["mig", "lost", "driver470", "refusals"])
def test_every_machine_keeps_the_schema(view_of, scenario):
    view = view_of(scenario, ranks(4))
    jsonschema.validate(machine_json(view), schema("machine"))
    assert machine_lines(view)


def test_warnings(view_of):
    view = view_of("lost")
    assert any("fell off the bus" in note for note in view.notes)
    pids = ranks(4) | {"rank0": ME, "rank1": os.getppid()}
    owners = {ME: Owner("train.py", 0, False), os.getppid(): Owner("train.py", 1, False)}
    crowded = view_of("crowded", pids, owners)
    assert any("2 ranks of train.py (0, 1) have a context here" in note for note in crowded.notes)
    foreign = view_of("foreign", ranks(2) | {"other": ME})
    assert any("GPU 1: 5.9 GiB belong to no process" in note for note in foreign.notes)


def test_a_mig_parent_does_not_repeat_the_processes_of_its_instances(view_of):
    view = view_of("mig", {"rank0": ME})
    assert [row.label for row in view.gpus] == ["0", "0:7", "0:8", "0:9", "1"]
    assert view.gpus[0].processes == ()
    assert [process.pid for process in view.gpus[2].processes] == [ME]


def test_an_xid_of_the_kernel_log_finds_its_gpu():
    machine = Machine()
    machine.take({"k": "gpu", "uuid": "a", "gpu": 0, "bus": "00000000:3B:00.0", "t": 1})
    machine.take({"k": "gpu", "uuid": "b", "gpu": 1, "bus": "00000000:5E:00.0", "t": 1})
    machine.take({"k": "xid", "t": 2, "bus": "0000:3b:00", "code": 79, "source": "kernel log"})
    view = machine_view(machine, {}, {}, {}, now_ns=2)
    assert view.gpus[0].warnings == ("Xid 79 in the kernel log",)
    assert view.gpus[1].warnings == ()


def test_old_readings_are_marked():
    machine = Machine()
    machine.take({"k": "gpu", "uuid": "a", "gpu": 0, "t": 1, "total_bytes": GIB, "used_bytes": 5})
    assert machine_view(machine, {}, {}, {}, now_ns=60 * 10**9).gpus[0].stale


def test_owners_of_processes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('ready', flush=True)\nsys.stdin.read()\n")
    process = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        process.stdout.readline()
        owners = Owners()
        assert owners.of([process.pid, 2**22 - 7]) == {process.pid: Owner("train.py", 0, False)}
        assert owners.of([process.pid])[process.pid].job == "train.py"
        process.kill()


def test_top_without_a_gpu_says_why(monkeypatch):
    from oomscope.cli.top import top

    done = CliRunner().invoke(top, ["--json"])
    assert done.exit_code == 0, done.output
    value = json.loads(done.output)
    jsonschema.validate(value, schema("machine"))
    assert value["collectors"]["host"]["state"] == "ok"


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_the_screen(view_of, size):
    from oomscope.tui.screens.machine import MachineApp
    from oomscope.tui.widgets.gpulist import GpuList

    pids = ranks(8) | {"rank0": ME}
    view = view_of("8xh100", pids, {ME: Owner("train.py", 0, False)})
    app = MachineApp(start=False)
    async with app.run_test(size=size) as pilot:
        app.show(view)
        await pilot.pause()
        text = "\n".join("".join(s.text for s in strip) for strip in app.screen._compositor.render_strips())
        assert all(f" {index} " in text or f"›{index} " in text for index in range(8))
        assert "41.0/80" in text
        assert "train.py r0" in text
        assert "power cap" in text
        assert ("ECC" in text) == (size[0] >= 110)
        assert ("last readings" in text) == (size[0] >= 130)
        await pilot.press("j", "f")
        await pilot.pause()
        assert app.query_one(GpuList).current.index == 1
        text = "\n".join("".join(s.text for s in strip) for strip in app.screen._compositor.render_strips())
        assert "train.py r0" not in text, "only the processes of the selected GPU"
        await pilot.press("o", "space", "ctrl+t")
        await pilot.pause()
        assert "PAUSED" in "".join(
            s.text for strip in app.screen._compositor.render_strips()[:1] for s in strip
        )


@pytest.mark.parametrize(
    ("environ", "themes"),
    [
        ({"COLORTERM": "truecolor"}, ["oomscope-dark", "oomscope-light", "oomscope-mono", "oomscope-dark"]),
        ({"TERM": "screen"}, ["oomscope-16", "oomscope-mono", "oomscope-16", "oomscope-mono"]),
        ({"COLORTERM": "truecolor", "NO_COLOR": "1"}, ["oomscope-mono"] * 4),
    ],
)
async def test_the_screen_walks_through_the_themes_of_the_terminal(monkeypatch, environ, themes):
    from oomscope.tui.screens.machine import MachineApp

    for name in ("NO_COLOR", "COLORTERM", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    app = MachineApp(start=False)
    async with app.run_test(size=(80, 24)) as pilot:
        seen = [app.theme]
        for _ in range(3):
            await pilot.press("ctrl+t")
            await pilot.pause()
            seen.append(app.theme)
    assert seen == themes


async def test_the_screen_without_a_gpu():
    from oomscope.collect.base import State
    from oomscope.collect.supervisor import Status
    from oomscope.tui.screens.machine import MachineApp

    view = machine_view(
        Machine(), {"nvidia": Status(State.UNAVAILABLE, "no_library", "no driver here")}, {}, {}
    )
    app = MachineApp(start=False)
    async with app.run_test(size=(80, 24)) as pilot:
        app.show(view)
        await pilot.pause()
        text = "\n".join("".join(s.text for s in strip) for strip in app.screen._compositor.render_strips())
        assert "There is no GPU to show." in text
        assert "no driver here" in text


def test_doctor(tmp_path, monkeypatch):
    from oomscope.cli.doctor import doctor

    monkeypatch.setenv("OOMSCOPE_HOME", str(tmp_path))
    done = CliRunner().invoke(doctor, ["--json", "--quick"])
    value = json.loads(done.output)
    jsonschema.validate(value, schema("doctor"))
    found = {check["id"]: check for check in value["checks"]}
    assert found["state"]["status"] == "ok"
    assert found["system"]["status"] in ("ok", "warn")
    assert "torch" not in found
    assert done.exit_code == (0 if value["ok"] else 1)


def test_doctor_names_a_broken_plugin_and_goes_on(monkeypatch):
    from oomscope.plugins import Loaded

    bad = Loaded("oomscope.rules", "mine", "mine:Rule", None, "ImportError: no mine")
    monkeypatch.setattr(checks.plugins, "load", lambda group: [bad] if group == "oomscope.rules" else [])
    check = checks._plugins()
    assert check.status == "error"
    assert "mine:Rule" in check.text
    assert check.remedy


def test_doctor_on_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OOMSCOPE_HOME", str(tmp_path / "file" / "state"))
    check = checks._state_folder()
    assert check.status == "error"
    assert "OOMSCOPE_HOME" in check.remedy


@pytest.mark.parametrize(("scenario", "status"), [("8xh100", "ok"), ("upgraded", "error"), ("lost", "error")])
def test_doctor_and_the_driver(machine, monkeypatch, scenario, status):
    fake = machine(scenario=scenario, pids=ranks(8))
    for name, value in fake.environ().items():
        monkeypatch.setenv(name, value)
    check = checks._nvidia()
    assert check.status == status, check
    assert check.remedy or status == "ok"


def test_doctor_says_which_interpreter_has_no_torch(tmp_path):
    check = checks._torch(str(tmp_path / "none"))
    assert check.status == "error"
    assert "--python" in check.remedy
