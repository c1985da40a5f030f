import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.protocol import layout, records
from oomscope.protocol.env import stored_environment

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=6))
def test_a_record_is_one_line_of_strict_json(record):
    line = records.encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(line, parse_constant=refuse)


def test_nan_and_infinity_become_words():
    line = records.encode({"k": "step", "loss": float("nan"), "more": [float("inf"), {"x": float("-inf")}]})
    assert json.loads(line) == {"k": "step", "loss": "nan", "more": ["inf", {"x": "-inf"}]}


def test_lone_surrogates_do_not_break_a_line():
    assert records.encode({"k": "exception", "message": "\udcff"})


@pytest.mark.parametrize(
    ("rank", "host", "pid", "name"),
    [
        (3, "nodeA", 14432, "r00003-nodeA-14432.jsonl"),
        (None, "nodeA", 7, "x0000-nodeA-7.jsonl"),
        (123456, "a/b c", 1, "r123456-a-b-c-1.jsonl"),
    ],
)
def test_names_of_record_files(rank, host, pid, name):
    assert layout.proc_file(rank, host, pid) == name
    parsed = layout.parse_proc_file(name)
    assert parsed is not None
    assert (parsed.rank, parsed.pid) == (rank, pid)


@pytest.mark.parametrize(
    "name", ["", "r1-host-2.jsonl", "r00001-host-2.json", "../r00001-h-2.jsonl", "notes.txt"]
)
def test_other_files_are_no_record_files(name):
    assert layout.parse_proc_file(name) is None


@given(st.text(), st.integers(1, 60))
def test_a_safe_name_is_one_visible_component(text, limit):
    name = layout.safe_name(text, limit)
    assert name
    assert "/" not in name
    assert not name.startswith(".")
    assert len(name) <= max(limit, 1)


def test_a_socket_fits_into_the_folder_for_sockets(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp/" + "long" * 40)
    folder = layout.rundir("20261129-143301-" + "train" * 10 + "-3f9c", "001-expandable-1f2e")
    assert len(f"{folder}/a4194304.sock") < 104


def test_only_harmless_variables_are_stored():
    environ = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "RANK": "0",
        "HOME": "/home/me",
        "WANDB_API_KEY": "secret",
        "TORCH_HUB_TOKEN": "secret",
        "SLURM_JOB_ID": "7",
    }
    assert stored_environment(environ) == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "RANK": "0",
        "SLURM_JOB_ID": "7",
    }
