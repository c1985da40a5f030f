# ruff: noqa: E501  # texts and tables
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from oomscope.cli.main import main
from oomscope.core.allocator.synth import SyntheticProcess, to_bytes
from oomscope.core.allocator.synth_workloads import fragmented_oom
from oomscope.units import MIB

TEXT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 47.40 GiB of which 16.00 MiB "
    "is free. Process 77 has 44.55 GiB memory in use. Including non-PyTorch memory, this process has 2.82 GiB memory in use. Of the "
    "allocated memory 2.57 GiB is allocated by PyTorch, and 1.25 MiB is reserved by PyTorch but unallocated."
)
SCHEMA = json.loads(resources.files("oomscope.schemas").joinpath("diagnosis.1.json").read_text())


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = main(["explain", *args])
    out, err = capsys.readouterr()
    return code, out, err


def piped(data: bytes, *args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "oomscope", "explain", *args], input=data, capture_output=True, check=False
    )


def test_a_pasted_text(capsys):
    code, out, _ = run(capsys, "--text", TEXT)
    assert code == 0
    assert "oom.other_process" in out
    assert "process 77 holds 44.55 GiB" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_one_valid_object(capsys):
    code, out, err = run(capsys, "--text", TEXT, "--json")
    found = json.loads(out)
    jsonschema.validate(found, SCHEMA)
    assert (code, err) == (0, "")
    assert found["messages"][0]["other_processes"] == [{"pid": 77, "bytes": 47835198259}]
    assert found["messages"][0]["cpu_bytes"] is None
    assert found["verdicts"][0]["cause"] == "other_process"


def test_markdown(capsys):
    _, out, _ = run(capsys, "--text", TEXT, "--markdown")
    assert out.startswith("### Out of memory")
    assert "**`oom.other_process`" in out
    assert "| evidence | source |" in out


def test_standard_input():
    done = piped(TEXT.encode())
    assert done.returncode == 0
    assert b"oom.other_process" in done.stdout
    assert piped(TEXT.encode(), "-").stdout == done.stdout


def test_a_log_file(capsys, tmp_path):
    path = tmp_path / "train.log"
    path.write_text("step 1\n" * 50 + f"[rank3]: {TEXT}\n[rank0]: {TEXT.replace('20.00', '22.00')}\n")
    _, out, _ = run(capsys, str(path))
    assert "rank 3 failed first" in out
    assert "at line 51" in out


def test_a_snapshot(capsys, tmp_path):
    process = SyntheticProcess(capacity=12 * 42 * MIB)
    fragmented_oom(process)
    path = tmp_path / "s.pickle"
    path.write_bytes(to_bytes(process.snapshot()))
    _, out, _ = run(capsys, str(path))
    assert "oom.fragmentation" in out
    assert "expandable_segments:True" in out


def test_exit_code_says_whether_a_cause_was_found(capsys):
    assert run(capsys, "--text", TEXT, "--exit-code")[0] == 1
    assert run(capsys, "--text", "RuntimeError: CUDA error: out of memory", "--exit-code")[0] == 0
    assert run(capsys, "--text", "all is well", "--exit-code")[0] == 0


def test_a_log_without_any_such_event(capsys, tmp_path):
    path = tmp_path / "train.log"
    other = 'Traceback (most recent call last):\n  File "t.py", line 3, in f\n    g()\nValueError: no\n'
    path.write_text(other * 2)
    code, out, _ = run(capsys, str(path))
    assert (code, out) == (0, "no out-of-memory event found; 2 tracebacks of other kinds in 8 lines\n")


def test_empty_input(capsys):
    assert run(capsys, "--text", "")[0] == 2  # as for every command: a shell's variable is not set
    assert run(capsys, "--text", " ")[1] == "no out-of-memory event found; no traceback in 1 line\n"
    done = piped(b"")
    assert (done.returncode, done.stdout) == (0, b"no out-of-memory event found; no traceback in 0 lines\n")


def test_a_binary_file(capsys, tmp_path):
    path = tmp_path / "core"
    path.write_bytes(b"\x7fELF\x00\x00\x00" * 100)
    code, _, err = run(capsys, str(path))
    assert code == 3
    assert "binary file" in err
    assert piped(b"\x00\x01\x02" * 100).returncode == 3


def test_two_runs_in_one_log(capsys, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(
        f"{TEXT}\n{TEXT.replace('47.40', '80.00').replace('44.55', '3.00').replace('2.57', '76.50').replace('2.82', '76.9')}\n"
    )
    _, out, _ = run(capsys, str(path))
    assert "the log holds 2 runs" in out
    assert "oom.capacity_activations" in out
    assert "oom.other_process" in run(capsys, str(path), "--job", "1")[1]
    code, _, err = run(capsys, str(path), "--job", "3")
    assert code == 2
    assert "there is no run 3" in err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--text", "x", "train.log"), 2, "either a source or --text"),
        (("--json", "--markdown", "--text", "x"), 2, "either --json or --markdown"),
        (("no/such/file.log",), 3, "no file or session"),
        (("nosuchsession",), 3, "no session"),
        (("--rnak", "1"), 2, "No such option"),
    ],
)
def test_bad_input(capsys, tmp_path, monkeypatch, args, code, words):
    monkeypatch.setenv("OOMSCOPE_HOME", str(tmp_path))
    got, _, err = run(capsys, *args)
    assert got == code
    assert words in err


def test_a_folder_that_is_no_session(capsys, tmp_path):
    code, _, err = run(capsys, str(tmp_path))
    assert code == 3
    assert "session" in err


def test_the_guide_is_shown_on_request(capsys):
    assert "The guide:" not in run(capsys, "--text", TEXT)[1]
    assert "The guide:" in run(capsys, "--text", TEXT, "--guide")[1]


def test_words_help_a_little(capsys):
    _, out, _ = run(capsys, "--text", "OOM while saving a checkpoint with FSDP on 4 GPUs")
    assert "oom.ckpt_full_gather" in out
    _, out, _ = run(
        capsys, "--text", "RuntimeError: CUDA error: out of memory", "--about", "it happens when resuming"
    )
    assert "oom.load_duplicate" in out


def test_without_torch_numpy_or_a_terminal_library(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(TEXT)
    code = (
        "import sys; from oomscope.cli.main import main; main(['explain', sys.argv[1]]); "
        "print([m for m in ('torch', 'numpy', 'textual', 'rich', 'msgspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_rules(capsys):
    assert main(["rules"]) == 0
    out = capsys.readouterr().out
    assert "oom.fragmentation" in out
    assert main(["rules", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rules"]
    assert len(rows) == 43
    assert main(["rules", "--json"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("name", ["oom.fragmentation", "fragmentation"])
def test_the_page_of_a_rule(capsys, name):
    assert main(["rules", "show", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# oom.fragmentation")
    assert "## Sources" in out


def test_an_unknown_rule_names_the_nearest(capsys):
    assert main(["rules", "show", "oom.fragmentatoin"]) == 2
    assert "did you mean oom.fragmentation" in capsys.readouterr().err
    assert main(["rules", "show", "zzz"]) == 2


def test_a_session(capsys, tmp_path):
    procs = tmp_path / "attempts" / "001" / "procs"
    procs.mkdir(parents=True)
    (tmp_path / "session.json").write_text(json.dumps({"format": "oomscope-session", "version": 1}))
    records = [
        {"t": 1, "n": 0, "k": "hello", "version": 1, "identity": {"rank": 0}},
        {"t": 2, "n": 1, "k": "oom", "step": 0, "phase": "optimizer", "requested_bytes": 1 << 30, "device_free_bytes": 0,
         "allocated_bytes": 20 << 30, "reserved_bytes": 20 << 30, "capacity_bytes": 24 << 30},
    ]  # fmt: skip
    (procs / "r00000-host-1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for target in (tmp_path, Path(tmp_path / "attempts" / "001")):
        code, out, _ = run(capsys, str(target))
        assert code == 0
        assert "oom.optimizer_state_lazy" in out
        assert "rank 0 · step 0 · optimizer" in out


def test_answers_of_the_user_walk_the_flowchart_again(capsys):
    text = (
        TEXT.replace("44.55 GiB", "0.50 GiB")
        .replace("16.00 MiB", "44.00 MiB")
        .replace("2.57 GiB is", "45.60 GiB is")
        .replace("this process has 2.82", "this process has 46.80")
    )
    _, before, _ = run(capsys, "--text", text, "--json")
    _, after, _ = run(capsys, "--text", text, "--json", "--answer", "Q3.1b=yes")
    found = json.loads(after)
    jsonschema.validate(found, SCHEMA)
    assert json.loads(before)["answers"] == {}
    assert found["answers"] == {"Q3.1b": "yes"}
    assert found["verdicts"][0]["cause"] == "ckpt_full_gather"
    _, shown, _ = run(capsys, "--text", text, "--answer", "Q3.1b=yes")
    assert "With your answers: Is it saving a checkpoint? yes" in shown
    assert "yes (you)" in shown
    assert max(map(len, shown.splitlines())) <= 80
    _, shown, _ = run(capsys, "--text", text, "--answer", "Q3.1b=yes", "--markdown")
    assert "| yes (you) |" in shown


@pytest.mark.parametrize("answer", ["Q1", "Q77=yes", "Q1=perhaps"])
def test_an_answer_that_makes_no_sense_is_refused(capsys, answer):
    code, _, err = run(capsys, "--text", TEXT, "--answer", answer)
    assert code == 2
    assert answer.partition("=")[0] in err


def test_a_cut_message_asks_for_its_rest_first(capsys):
    _, out, _ = run(
        capsys,
        "--text",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capa",
        "--json",
    )
    assert json.loads(out)["verdicts"][0]["missing"][0]["capture"] == "the complete line of the error"


def test_json_of_a_log_without_such_an_event_says_so(capsys, tmp_path):
    path = tmp_path / "train.log"
    path.write_text("Traceback (most recent call last):\nKeyError: 1\n")
    code, out, _ = run(capsys, str(path), "--json", "--exit-code")
    found = json.loads(out)
    assert code == 0
    assert found["verdicts"] == []
    assert found["notes"] == ["no out-of-memory event found; 1 traceback of other kinds in 2 lines"]


def test_of_two_jobs_the_line_is_that_of_the_judged_one(capsys, tmp_path):
    start = "*****************************************\nSetting OMP_NUM_THREADS environment variable\n"
    killed = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n"
    path = tmp_path / "two.log"
    path.write_text(f"{start}step 1\n{TEXT}\n{start}step 1\n{killed}")
    _, out, _ = run(capsys, str(path))
    assert "at line 8" in out
    assert "Host memory ran out" in out
    assert "would help: memory of the machine" in out
    _, out, _ = run(capsys, str(path), "--job", "1")
    assert "at line 4" in out
