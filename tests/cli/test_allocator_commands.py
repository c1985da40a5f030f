"""`oomscope replay` and `oomscope whatif`, from file to answer and exit code."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from oomscope.cli.main import main
from oomscope.core.allocator.synth import SyntheticProcess, to_bytes
from oomscope.core.allocator.synth_workloads import fragmented_oom, random_stream, shortage_oom, training
from oomscope.errors import ExitCode
from oomscope.units import GIB, MIB


def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files("oomscope").joinpath(f"schemas/{name}.1.json").read_text())
    return loaded


def written(path: Path, process: SyntheticProcess, **changes: Any) -> str:
    path.write_bytes(to_bytes({**process.snapshot(), **changes}))
    return str(path)


@pytest.fixture
def good(tmp_path: Path) -> str:
    process = SyntheticProcess("expandable_segments:True", devices=2)
    training(process)
    return written(tmp_path / "good.pickle", process)


@pytest.fixture
def fragmented(tmp_path: Path) -> str:
    process = SyntheticProcess(capacity=500 * MIB)
    fragmented_oom(process)
    return written(tmp_path / "fragmented.pickle", process)


@pytest.fixture
def cut(tmp_path: Path) -> str:
    process = SyntheticProcess()
    training(process)
    rows = process.snapshot()["device_traces"][0]
    return written(tmp_path / "cut.pickle", process, device_traces=[rows[:100] + rows[140:]])


def answer(capsys: pytest.CaptureFixture[str], arguments: list[str], name: str) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, schema(name))
    return code, found


def test_an_exact_replay(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", good]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "the model reproduces all 514 events exactly" in text
    assert "expandable_segments:True" in text
    code, found = answer(capsys, ["replay", good], "replay")
    assert code == ExitCode.DONE
    assert [each["exact"] for each in found["devices"]] == [True, None]
    assert found["devices"][0]["events"] == 514
    assert found["devices"][0]["settings"]["expandable_segments"] is True


def test_a_history_with_rows_cut_out(cut: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", cut]) == ExitCode.ANSWER_IS_NO
    text = capsys.readouterr().out
    assert "differs" in text
    assert "was cut, edited or made up" in text
    code, found = answer(capsys, ["replay", cut], "replay")
    assert code == ExitCode.ANSWER_IS_NO
    assert found["devices"][0]["first_divergence"]["event_index"] > 0


def test_a_file_without_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = SyntheticProcess(max_entries=1)
    training(process, layers=2, steps=1)
    path = written(tmp_path / "state.pickle", process)
    assert main(["replay", path]) == ExitCode.ANSWER_IS_NO
    assert "no history to replay" in capsys.readouterr().out
    assert main(["whatif", path]) == ExitCode.ANSWER_IS_NO
    assert "No prediction: the device has no history" in capsys.readouterr().out


def test_other_settings_can_be_checked(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", good, "--conf", "max_split_size_mb:64"]) == ExitCode.ANSWER_IS_NO
    assert "the model" in capsys.readouterr().out
    assert main(["replay", good, "--conf", "max_split:64"]) == ExitCode.USAGE
    assert "unknown allocator option" in capsys.readouterr().err


def test_inferred_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = SyntheticProcess("max_split_size_mb:64", capacity=GIB)
    random_stream(process, 4, requests=900)
    raw = process.snapshot(settings=False)
    path = tmp_path / "old.pickle"
    path.write_bytes(to_bytes(raw))
    assert main(["replay", str(path)]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "inferred" in text
    assert "the file records no settings; the rows show max_split_size_mb:64" in text


def test_the_order_of_ties_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    from oomscope.core.allocator.model import AllocatorConfig

    process = SyntheticProcess(replace(AllocatorConfig(), tiebreak="segment"), addresses="down")
    random_stream(process, 4, requests=900)
    assert main(["replay", written(tmp_path / "new.pickle", process)]) == ExitCode.DONE
    assert "the oldest segment first" in capsys.readouterr().out


def test_part_of_a_history(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", good, "--last", "200", "--device", "0"]) == ExitCode.DONE
    assert "200 events" in capsys.readouterr().out
    assert main(["replay", good, "--device", "9"]) == ExitCode.USAGE
    assert main(["whatif", good, "--device", "9"]) == ExitCode.USAGE


def test_what_decides_a_case_of_fragmentation(fragmented: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", fragmented]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "Recommended: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
    assert "Capacity: 500.00 MiB (shown by the out-of-memory row)" in text
    assert "smallest device" in text
    assert "22.00 MiB  keep_result, model.py:77, 34 events old" in text
    code, found = answer(capsys, ["whatif", fragmented], "whatif")
    assert code == ExitCode.DONE
    assert found["trusted"] is True
    (device,) = found["devices"]
    assert device["recommended"] == "expandable_segments:True"
    assert device["live_peak_bytes"] == 480 * MIB
    assert device["offline_bytes"] == 504 * MIB
    failure = device["failure"]
    assert failure["request_bytes"] == 60 * MIB
    assert failure["shortfall_bytes"] < 0
    (block,) = failure["in_the_way"]
    assert block["where"] == "keep_result, model.py:77"
    fits = {each["conf"]: each["fits"] for each in device["configs"]}
    assert fits[""] is False
    assert fits["expandable_segments:True"] is True


def test_settings_and_capacity_of_ones_own(fragmented: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answer(
        capsys,
        ["whatif", fragmented, "--conf", "roundup_power2_divisions:4", "--capacity", "24GiB"],
        "whatif",
    )
    assert code == ExitCode.DONE
    device = found["devices"][0]
    assert [each["conf"] for each in device["configs"]] == ["", "roundup_power2_divisions:4"]
    assert device["capacity_bytes"] == 24 * GIB
    assert device["recommended"] is None
    assert main(["whatif", fragmented, "--capacity", "a100-40g"]) == ExitCode.DONE
    assert "the recorded setting fits" in capsys.readouterr().out
    assert main(["whatif", fragmented, "--capacity", "a lot"]) == ExitCode.USAGE


def test_a_shortage_gets_no_recommendation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = SyntheticProcess(capacity=500 * MIB)
    shortage_oom(process)
    assert main(["whatif", written(tmp_path / "short.pickle", process)]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "this is no matter of settings" in text
    assert "no setting makes it fit" in text
    assert "It lacked 44.00 MiB even with perfect packing" in text


def test_without_a_capacity(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", good]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "give one with --capacity" in text
    assert "without a capacity no setting decides anything" in text


def test_no_trust_no_answer(cut: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", cut]) == ExitCode.ANSWER_IS_NO
    assert "No prediction: the model does not reproduce the history" in capsys.readouterr().out
    code, found = answer(capsys, ["whatif", cut], "whatif")
    assert code == ExitCode.ANSWER_IS_NO
    assert found["trusted"] is False
    assert found["devices"][0]["configs"] == []


def test_a_short_budget_is_admitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = SyntheticProcess(capacity=3 * GIB)
    training(process, layers=40, steps=8, activation_bytes=20 * MIB)
    shortage_oom(process)
    path = written(tmp_path / "long.pickle", process)
    assert main(["whatif", path, "--budget", "0.01"]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "Note: only rows" in text
    assert "not searched" in text


def test_not_a_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    for command in ("replay", "whatif"):
        assert main([command, str(path)]) == ExitCode.INPUT
        assert "oomscope:" in capsys.readouterr().err
