import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.errors import InputError, UsageError
from oomscope.launch.command import (
    build_command,
    is_one_script,
    is_torchrun,
    job_python,
    split_options,
    torchrun_option,
    torchrun_script,
)

PYTHON = "/opt/python"
TORCHRUN = (PYTHON, "-m", "torch.distributed.run")


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def test_a_script_alone_is_plain_python():
    launch = build_command(["train.py", "--lr", "1e-3", "--help"], PYTHON)
    assert launch.kind == "python"
    assert launch.command == (PYTHON, "train.py", "--lr", "1e-3", "--help")
    assert launch.script is not None
    assert launch.script.name == "train.py"


@pytest.mark.parametrize(
    "options",
    [
        ["--nproc-per-node", "2"],
        ["--nproc_per_node=2"],
        ["--nproc_per_node", "2", "--standalone"],
        ["--nnodes=1:4", "--rdzv-backend", "c10d", "--rdzv_endpoint=host:29400", "--max-restarts", "3"],
        ["-r", "3", "-t", "0:1"],
        ["-r3", "--nproc-per-node=2"],
        ["--nproc", "2"],
        ["--rdzv-conf", "timeout=900,is_host=0"],
    ],
)
def test_torchrun_options_go_through_untouched(options):
    launch = build_command([*options, "train.py", "--nproc-per-node", "9"], PYTHON)
    assert launch.kind == "torchrun"
    assert launch.command == (*TORCHRUN, *options, "train.py", "--nproc-per-node", "9")


def test_every_torchrun_option_of_the_installed_torch_is_known():
    torch_run = pytest.importorskip("torch.distributed.run")
    for action in torch_run.get_args_parser()._actions:
        for option in action.option_strings:
            if option in ("-h", "--help"):
                continue
            words = [option] if action.nargs == 0 else [option, "1"]
            assert split_options([*words, "train.py"]) == (words, ["train.py"]), option


def test_a_module_is_plain_python_unless_torchrun_is_asked_for():
    assert build_command(["-m", "pkg.train", "-x"], PYTHON).command == (PYTHON, "-m", "pkg.train", "-x")
    launch = build_command(["--nproc-per-node", "2", "-m", "pkg.train"], PYTHON)
    assert launch.command == (*TORCHRUN, "--nproc-per-node", "2", "-m", "pkg.train")


def test_anything_after_two_dashes_runs_verbatim():
    command = (sys.executable, "-c", "pass", "--nproc-per-node", "2")
    launch = build_command(["--", *command], PYTHON)
    assert launch.kind == "verbatim"
    assert launch.command == command


def test_a_known_program_needs_no_dashes():
    launch = build_command(["python3", "train.py"], PYTHON)
    assert launch.kind == "verbatim"
    assert str(launch.script) == "train.py"


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UsageError, match="--nproc-pre-node") as caught:
        build_command(["--nproc-pre-node", "2", "train.py"], PYTHON)
    assert "--nproc-per-node" in caught.value.hint


@pytest.mark.parametrize("args", [[], ["--nproc-per-node", "2"], ["--"]])
def test_no_script_is_said(args):
    with pytest.raises(UsageError):
        build_command(args, PYTHON)


def test_an_option_without_its_value_is_said():
    with pytest.raises(UsageError, match="needs a value"):
        build_command(["--nproc-per-node"], PYTHON)


def test_a_missing_script_names_a_neighbour():
    with pytest.raises(InputError, match=r"trian\.py") as caught:
        build_command(["trian.py"], PYTHON)
    assert "train.py" in caught.value.hint


def test_a_folder_is_no_script(tmp_path):
    (tmp_path / "pkg").mkdir()
    with pytest.raises(InputError, match="folder"):
        build_command(["pkg"], PYTHON)


def test_a_missing_program_is_said():
    with pytest.raises(InputError, match="no program"):
        build_command(["--", "no-such-program-here"], PYTHON)


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (["--nproc_per_node=8"], "--nproc-per-node", "8"),
        (["--nproc-per-node", "8", "--nnodes", "2"], "--nnodes", "2"),
        (["--nnodes", "2", "--nnodes=4"], "--nnodes", "4"),
        (["--standalone"], "--nnodes", None),
    ],
)
def test_options_can_be_read_back(options, name, value):
    launch = build_command([*options, "train.py", "--nnodes", "9"], PYTHON)
    assert torchrun_option(launch.command, name) == value
    assert torchrun_script(launch.command) == ["train.py", "--nnodes", "9"]


@given(st.lists(st.text(min_size=1, max_size=12), max_size=8))
def test_nothing_of_the_script_is_ever_looked_at(args):
    assert split_options(["--nnodes", "1", "train.py", *args]) == (["--nnodes", "1"], ["train.py", *args])


def test_the_interpreter_of_the_active_environment_is_used(tmp_path):
    binary = tmp_path / "bin" / "python"
    binary.parent.mkdir()
    binary.write_text("")
    binary.chmod(0o700)
    assert job_python({"VIRTUAL_ENV": str(tmp_path)}) == str(binary)
    assert job_python({"PATH": ""}) == sys.executable
    with pytest.raises(UsageError, match="no such executable"):
        job_python({"PATH": ""}, asked="python9")


@pytest.mark.parametrize(
    ("command", "torchrun", "one"),
    [
        (["/v/bin/python", "train.py"], False, True),
        (["/v/bin/python3.11", "-m", "pkg.train"], False, True),
        (["/v/bin/python", "-m", "torch.distributed.run", "train.py"], True, False),
        (["torchrun", "train.py"], True, False),
        (["/v/bin/python", "/v/bin/torchrun", "train.py"], True, False),
        (["/v/bin/python", "-m", "accelerate.commands.launch", "train.py"], False, False),
        (["accelerate", "launch", "train.py"], False, False),
        (["bash", "run.sh"], False, False),
    ],
)
def test_what_a_command_starts(command, torchrun, one):
    assert is_torchrun(command) == torchrun
    assert is_one_script(command) == one


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["train.py"], "train"),
        (["-m", "package.train", "--lr", "1"], "package-train"),
        (["--nproc-per-node=2", "-m", "package.train"], "package-train"),
        (["--", "bash", "-c", "true"], "bash"),
        (["--", "bash", "-c", "cd sub && python -u train.py --lr 1"], "train"),
        (["--", "bash", "-c", "echo 'open"], "bash"),
        (["bash", "-c", "for i in 1 2; do python runs/fit.py $i; done"], "fit"),
    ],
)
def test_what_a_session_is_called(args, name):
    assert build_command(args, "python3").name == name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc_per_node=abc"], "--nproc-per-node abc: not a number of ranks"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0: not a number of ranks"),
        (["--nproc-per-node", "-1"], "--nproc-per-node -1"),
        (["--nnodes", "1:"], "--nnodes 1:: not a number of nodes, or MIN:MAX"),
        (["--nnodes=two", "--nproc-per-node=2"], "--nnodes two"),
        (["--node_rank", "x"], "--node-rank x: not a number"),
        (["--master-port", "http"], "not a port number"),
        (["--max-restarts", "1.5"], "--max-restarts 1.5"),
        (["--monitor-interval", "soon"], "a number of seconds"),
    ],
)
def test_a_value_that_torchrun_would_answer_with_a_traceback(options, words):
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        build_command([*options, "train.py"], "python3")
    assert caught.value.hint.startswith("for example --")


@pytest.mark.parametrize(
    "options",
    [["--nproc-per-node", each] for each in ("8", "auto", "gpu", "cpu", "xpu", "npu", "hpu", "musa")]
    + [["--nnodes", "1:4"], ["--nnodes", "2"], ["--monitor-interval", "0.5"], ["--monitor-interval", ".5"]],
)
def test_values_that_torchrun_takes(options):
    command = build_command([*options, "train.py"], "python3").command
    assert list(options) == list(command[3:5])
