"""inspect, diff, export and scrub: their JSON against the schemas, their files read by other tools."""

from __future__ import annotations

import csv
import importlib.util
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from made_snapshots import MIB, like_torch_2_0, like_torch_2_13, training

from oomscope.cli.main import main
from oomscope.errors import ExitCode

SCHEMAS = Path(__file__).resolve().parents[2] / "oomscope" / "schemas"
SHAPES: dict[str, Callable[[], Any]] = {
    "plain": training,
    "leak": lambda: training(steps=8, leak=True),
    "late": lambda: training(late=True),
    "oom": lambda: training(oom=True),
    "oldest": lambda: like_torch_2_0(training()),
    "newest": lambda: like_torch_2_13(training()),
    "no-frames": lambda: training(frames=False),
    "list": lambda: training()["segments"],
    "no-events": lambda: {**training(), "device_traces": [[], []]},
    "one-event": lambda: {**training(), "device_traces": [training()["device_traces"][0][-1:]]},
    "cut": lambda: {**training(), "segments": []},
    "nothing": lambda: {"segments": [], "device_traces": []},
}


@pytest.fixture(params=SHAPES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"rank_3_{request.param}.pickle"
    path.write_bytes(pickle.dumps(SHAPES[request.param]()))
    return path


def made(tmp_path: Path, name: str, raw: Any) -> str:
    path = tmp_path / name
    path.write_bytes(pickle.dumps(raw))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(list(args)) == code
    return capsys.readouterr().out


def valid(name: str, text: str) -> Any:
    found = json.loads(text)
    jsonschema.validate(found, json.loads((SCHEMAS / name).read_text()))
    return found


def test_inspect_json_follows_its_schema(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = valid("snapshot.1.json", run(capsys, "inspect", str(path), "--json"))
    assert found["rank"] == 3
    for device in found["devices"]:
        total = sum(share["bytes"] for share in device["composition"])
        assert total == device["at"]["live_bytes"]
        assert (device["peak_event_index"] is None) == (device["history"] == "none")


def test_the_timeline_of_streams_and_pools_adds_up(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device in json.loads(run(capsys, "inspect", str(path), "--json"))["devices"]:
        timeline = device["timeline"]
        assert (timeline is None) == (device["history"] in ("none", "ring", "cut"))
        if timeline is not None:
            # Before the first row another level may have been higher: an older block.
            assert (
                max(timeline["live_bytes"]) == device["peak_requested_bytes"]
                or device["peak_event_index"] < 0
            )
            for parts in (timeline["streams"], timeline["pools"]):
                sums = [sum(levels) for levels in zip(*(part["live_bytes"] for part in parts), strict=True)]
                assert sums == timeline["live_bytes"]


def test_inspect_text_in_all_rankings(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for by in ("stack", "line", "module", "size"):
        text = run(capsys, "inspect", str(path), "--by", by)
        assert text.startswith(path.name)
        assert max(map(len, text.splitlines())) < 220


def test_every_export_can_be_read(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def export(form: str) -> Path:
        target = tmp_path / f"out.{form}"
        run(capsys, "export", str(path), "--to", form, "-o", str(target))
        return target

    raw = pickle.loads(export("memory-viz").read_bytes())
    assert {"segments", "device_traces"} <= raw.keys()
    valid("allocations.1.json", export("json").read_text())
    assert json.loads(export("perfetto").read_text())["traceEvents"] is not None
    rows = list(csv.reader(export("csv").read_text().splitlines()))
    assert {len(row) for row in rows} == {11}
    for line in export("flamegraph").read_text().splitlines():
        assert re.fullmatch(r".+ \d+", line)
    page = export("html").read_text()
    assert not re.search(r"""(src|href)\s*=|https?://|@import""", page)
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    assert data["categories"][0] == "parameters"


def test_oom_is_shown_before_its_unwinding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, "a.pickle", training(oom=True))
    (device,) = json.loads(run(capsys, "inspect", path, "--json"))["devices"]
    (oom,) = device["oom"]
    assert oom["requested_bytes"] == 64 * MIB
    assert device["at"] == {
        "reason": "oom",
        "event_index": oom["event_index"] - 1,
        "live_bytes": oom["live_bytes"],
    }
    text = run(capsys, "inspect", path)
    assert "OUT OF MEMORY" in text
    assert "Just before the out-of-memory error" in text


def test_selection_keeps_event_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, "a.pickle", training(steps=6))
    whole = json.loads(run(capsys, "inspect", path, "--json"))["devices"][0]
    last = json.loads(run(capsys, "inspect", path, "--json", "--last", "40"))["devices"][0]
    assert last["events"] == 40
    assert last["skipped_events"] == whole["events"] - 40
    assert last["peak_event_index"] >= last["skipped_events"] - 1
    window = json.loads(run(capsys, "inspect", path, "--json", "--range", "0:5"))["devices"][0]
    assert window["peak_event_index"] < 5
    for bad in ("5", "9:3", "x:y"):
        run(capsys, "inspect", path, "--range", bad, code=ExitCode.USAGE)
    run(capsys, "inspect", path, "--range", "0:5", "--last", "3", code=ExitCode.USAGE)


def test_folder_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        made(tmp_path, f"rank_{rank}.pickle", training())
    (tmp_path / "rank_2.pickle").write_bytes(b"broken")
    found = valid("snapshots.1.json", run(capsys, "inspect", str(tmp_path), "--json"))
    for each in found["snapshots"]:
        valid("snapshot.1.json", json.dumps(each))
    assert [each["rank"] for each in found["snapshots"]] == [0, 1]


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = made(tmp_path, "a.pickle", training(steps=3, leak=True))
    b = made(tmp_path, "b.pickle", training(steps=6, leak=True))
    found = valid("diff.1.json", run(capsys, "diff", a, b, "--at", "end", "--json"))
    assert [each["bytes"] for each in found["grown"]] == [15 * MIB]
    assert "log_loss" in " ".join(found["grown"][0]["frames"])
    assert "+15.00 MiB" in run(capsys, "diff", a, b, "--at", "end")
    run(capsys, "diff", a, b, "--at", "end", "--fail-over", "1MiB", code=ExitCode.ANSWER_IS_NO)
    run(capsys, "diff", a, b, "--at", "end", "--fail-over", "1GiB")
    steps = valid("diff.1.json", run(capsys, "diff", b, "--at", "step:1", "--to", "step:4", "--json"))
    assert steps["after"]["bytes"] > steps["before"]["bytes"]
    run(capsys, "diff", a, code=ExitCode.USAGE)


def test_diff_of_a_file_with_itself_is_empty(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path.stem.endswith("nothing"):
        run(capsys, "diff", str(path), str(path), code=ExitCode.USAGE)
        return
    found = valid("diff.1.json", run(capsys, "diff", str(path), str(path), "--json"))
    assert found["added"] == found["removed"] == found["grown"] == found["shrunk"] == []


def test_scrub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, "a.pickle", training())
    text = run(capsys, "scrub", path)
    assert "alice -> user01" in text
    assert b"alice" not in (tmp_path / "a.scrubbed.pickle").read_bytes()
    found = valid("scrub.1.json", run(capsys, "scrub", path, "--force", "--json"))
    assert found["replaced"] == {"alice": "user01"}
    run(capsys, "scrub", path, code=ExitCode.USAGE)  # never replaces a file unasked
    run(capsys, "scrub", path, "-o", path, "--force", code=ExitCode.USAGE)
    one = json.loads(run(capsys, "inspect", path, "--json"))
    other = json.loads(run(capsys, "inspect", str(tmp_path / "a.scrubbed.pickle"), "--json"))
    for key in ("reserved_bytes", "peak_requested_bytes", "peak_event_index", "composition"):
        assert one["devices"][0][key] == other["devices"][0][key]


def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.pickle"
    bad.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for command in (["inspect"], ["export", "--to", "html"], ["scrub"]):
        output = [] if command[0] == "inspect" else ["-o", str(tmp_path / "o")]
        assert main([command[0], str(bad), *command[1:], *output]) == 3
        assert "refused" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert main(["inspect", str(tmp_path)]) == 3


def test_terminal_codes_in_names_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = training()
    for rows in raw["device_traces"]:
        rows[1]["frames"] = [{"name": "f\x1b[31m\n", "filename": "/w/a\x07.py", "line": 1}]
    raw["segments"][0]["blocks"][0]["frames"] = raw["device_traces"][0][1]["frames"]
    path = made(tmp_path, "a.pickle", raw)
    for args in (["inspect", path], ["diff", path, path], ["inspect", path, "--by", "line"]):
        text = run(capsys, *args)
        assert "\x1b" not in text
        assert "\x07" not in text


def test_open_needs_a_terminal_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, "a.pickle", training())
    assert main(["open", path]) == ExitCode.SETUP
    assert "oomscope inspect" in capsys.readouterr().err
    assert main(["open", str(tmp_path / "missing")]) == ExitCode.INPUT
    assert main(["open", path, "--range", "x"]) == ExitCode.USAGE


def test_session_folders_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from oomscope.store.session import Session

    session = Session.create(tmp_path, name="train", command=["python", "train.py"], cwd=tmp_path)
    folder = session.new_attempt().path / "snapshots"
    folder.mkdir(exist_ok=True)
    made(folder, "r00001-step000002-oom.pickle", training())
    (found,) = json.loads(run(capsys, "inspect", str(session.path), "--json"))["snapshots"]
    assert (found["rank"], found["step"]) == (1, 2)


@pytest.mark.parametrize(
    "options",
    [["--max-memory", "much"], ["--at", "soon"], ["--by", "colour"], ["--top", "0"], ["--max-seconds", "0"]],
)
def test_wrong_options(options: list[str], tmp_path: Path) -> None:
    assert main(["inspect", made(tmp_path, "a.pickle", training()), *options]) == ExitCode.USAGE


def test_limits_reach_the_loader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {**training(), "padding": [f"{n:040d}" for n in range(200_000)]}
    path = made(tmp_path, "a.pickle", raw)
    assert main(["inspect", path, "--max-memory", "10MiB"]) == ExitCode.INPUT
    assert "more memory than the limit" in capsys.readouterr().err


def test_reading_snapshots_needs_neither_torch_nor_a_screen(tmp_path: Path) -> None:
    path = made(tmp_path, "a.pickle", training())
    code = (
        "import sys; from oomscope.cli.main import main; assert main(['inspect', sys.argv[1]]) == 0; "
        "assert not {'torch', 'textual', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_memory_viz_export_is_read_by_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, "a.pickle", training()["segments"])
    target = tmp_path / "b.pickle"
    run(capsys, "export", path, "--to", "memory-viz", "-o", str(target))
    code = (
        "import pickle, sys; from torch.cuda import _memory_viz as v; d = pickle.load(open(sys.argv[1], 'rb')); "
        "print(v.segsum(d)); print(v.trace(d))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "total_reserved" in done.stdout


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in BROWSERS if (found := shutil.which(name))), None)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the page in")
def test_page_opens_in_a_browser_without_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, "a.pickle", training(steps=5, leak=True))
    page = tmp_path / "a.html"
    run(capsys, "export", path, "--to", "html", "-o", str(page))
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert 'data-ready="yes"' in done.stdout
    assert "MiB live" in done.stdout
    assert "optimizer state" in done.stdout
