"""`oomscope fit`: finding the option, finding the border, the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oomscope
from oomscope.errors import UsageError
from oomscope.launch.fit import Point, find_option, largest

SCHEMA = Path(oomscope.__file__).parent / "schemas" / "fit.1.json"


def linear(base: int, slope: int, limit: int, tried: list[int] | None = None) -> Callable[[int], Point]:
    def probe(value: int) -> Point:
        if tried is not None:
            tried.append(value)
        peak = base + slope * value
        return Point(value, peak, peak, peak <= limit)

    return probe


@given(
    base=st.integers(0, 1000),
    slope=st.integers(1, 500),
    limit=st.integers(1, 100_000),
    start=st.integers(1, 300),
    multiple=st.integers(1, 16),
)
def test_the_border_is_found(base: int, slope: int, limit: int, start: int, multiple: int) -> None:
    best, curve = largest(linear(base, slope, limit), start, limit=limit, multiple=multiple)
    expected = (limit - base) // slope // multiple * multiple
    assert best == (expected if expected >= multiple else None)
    assert [point.value for point in curve] == sorted({point.value for point in curve})


@given(st.lists(st.integers(1, 50), min_size=2, max_size=200), st.integers(1, 3000), st.integers(1, 200))
def test_crooked_curves_end_at_a_border(steps: list[int], limit: int, start: int) -> None:
    peaks = [sum(steps[: index + 1]) for index in range(len(steps))]

    def probe(value: int) -> Point:
        peak = peaks[min(value, len(peaks)) - 1] + max(0, value - len(peaks)) * 50
        return Point(value, peak, peak, peak <= limit)

    best, _ = largest(probe, start, limit=limit)
    assert best is None or (probe(best).fits and not probe(best + 1).fits)
    assert best is not None or not probe(1).fits


def test_few_probes_for_a_straight_line() -> None:
    tried: list[int] = []
    assert largest(linear(500, 7, 100_000, tried), 8, limit=100_000)[0] == 14214
    assert len(tried) <= 9, tried


def test_bounds() -> None:
    probe = linear(0, 10, 1000)
    assert largest(probe, 8, limit=1000, highest=20)[0] == 20
    assert largest(probe, 8, limit=1000, lowest=50)[0] == 100
    assert largest(probe, 8, limit=1000, lowest=150)[0] is None


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("given_words", "value", "expected"),
    [
        (["--batch-size", "4", "--lr", "1"], 9, ["--lr", "1", "--batch-size", "9"]),
        (["--batch_size=4", "--lr", "1"], 9, ["--lr", "1", "--batch_size=9"]),
        (["--lr", "1"], 9, ["--lr", "1", "--batch-size", "9"]),
    ],
)
def test_the_option_is_replaced(
    tmp_path: Path, given_words: list[str], value: int, expected: list[str]
) -> None:
    path = script(tmp_path, 'parser.add_argument("--batch-size", type=int, default=12)\n')
    option = find_option("batch_size", ["python", "train.py", *given_words], path)
    assert list(option.with_value(value)) == ["python", "train.py", *expected]


def test_the_default_is_where_the_search_starts(tmp_path: Path) -> None:
    path = script(tmp_path, "import args_of\n")
    (tmp_path / "args_of.py").write_text('parser.add_argument("-b", "--batch_size", type=int, default=12)\n')
    assert find_option("batch-size", ["python", "train.py"], path).current == 12


def test_scripts_configured_by_globals(tmp_path: Path) -> None:
    option = find_option("block_size", ["python", "train.py"], script(tmp_path, "block_size = 1024\n"))
    assert option.with_value(7)[-1] == "--block_size=7"
    assert option.current == 1024


@pytest.mark.parametrize(
    ("asked", "given_words", "expected"),
    [
        ("batch_size", ["lr=1", "train.batch_size=4"], ["lr=1", "train.batch_size=9"]),
        ("batch_size", ["+batch_size=4"], ["+batch_size=9"]),
        ("batch-size", ["--training.batch_size", "4", "--x"], ["--x", "--training.batch_size", "9"]),
        ("training.batch_size", ["--training.batch_size=4"], ["--training.batch_size=9"]),
        ("--model.batch", [], ["--model.batch", "9"]),
        ("data.batch=", ["lr=1"], ["lr=1", "data.batch=9"]),
    ],
)
def test_settings_in_groups(tmp_path: Path, asked: str, given_words: list[str], expected: list[str]) -> None:
    option = find_option(asked, ["python", "train.py", *given_words], script(tmp_path, "main()\n"))
    assert list(option.with_value(9)) == ["python", "train.py", *expected]


def test_options_that_are_fields_of_training_arguments(tmp_path: Path) -> None:
    path = script(tmp_path, "parser = HfArgumentParser(TrainingArguments)\n")
    option = find_option("per_device_train_batch_size", ["python", "train.py"], path)
    assert option.with_value(3)[-2:] == ("--per_device_train_batch_size", "3")


def test_an_option_that_changes_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="the peak is the same with 4 and with 64"):
        largest(linear(100, 0, 1000), 4, limit=1000)
    assert largest(linear(100, 0, 1000), 4, limit=1000, highest=8)[0] == 8


def test_unknown_option_names_the_nearest(tmp_path: Path) -> None:
    path = script(tmp_path, 'parser.add_argument("--batch-size")\n')
    with pytest.raises(UsageError) as caught:
        find_option("batchsize", ["python", "train.py"], path)
    assert "--batch-size" in str(caught.value.hint)


def test_a_value_that_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a whole number"):
        find_option("size", ["python", "train.py", "--size", "big"], script(tmp_path, ""))


TRAIN = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=1)
rows = parser.parse_args().rows
weight = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(weight.parameters(), 0.1)
for _ in range(2):
    weight(torch.ones(rows << 10, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.integration
def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [
        sys.executable,
        "-m",
        "oomscope",
        "fit",
        "--device",
        "sim:1GiB,context=0",
        "--max",
        "rows",
        "--json",
    ]
    command += ["--from", "40", str(script(tmp_path, TRAIN))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=_environment(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert found["option"] == "--rows"
    values = {row["value"]: row["fits"] for row in found["curve"]}
    assert values[found["largest"]]
    assert not values[found["largest"] + 1]


@pytest.mark.integration
def test_a_script_that_fails(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = script(tmp_path, TRAIN.replace("for _ in", 'raise ValueError("no data")\nfor _ in'))
    command = [sys.executable, "-m", "oomscope", "fit", "--device", "sim:1GiB", "--max", "rows", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=_environment(tmp_path))
    assert done.returncode == 5
    assert "the script fails with --rows 1" in done.stderr
    assert "no data" in done.stderr


def _environment(folder: Path) -> dict[str, str]:
    import os

    return {**os.environ, "OOMSCOPE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
