"""The trust gate: settings inferred, wrong settings noticed, and what a divergence means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomscope.core.allocator.infer import divisions_of, guesses
from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.model_config import UNLIMITED
from oomscope.core.allocator.synth import SyntheticProcess
from oomscope.core.allocator.synth_workloads import graph_pool, random_stream, training
from oomscope.core.allocator.verify import verify, version_of
from oomscope.units import GIB, MIB

from .helpers import history_of, loaded

SETTINGS = ("allocator_settings",)


def noise(conf: str = "", *, seed: int = 4, tiebreak: str = "address", **options: Any) -> SyntheticProcess:
    config = replace(AllocatorConfig.parse(conf), tiebreak=tiebreak)
    options.setdefault("total_bytes", 4 * GIB)
    process = SyntheticProcess(config, **options)
    random_stream(process, seed, requests=1200)
    return process


@pytest.mark.parametrize(
    ("conf", "names"),
    [
        ("", ()),
        ("expandable_segments:True", ("expandable_segments",)),
        ("max_split_size_mb:64", ("max_split_size",)),
        ("roundup_power2_divisions:8", ("roundup_power2_divisions",)),
        ("roundup_power2_divisions:[16:4,>:8]", ("roundup_power2_divisions",)),
        ("large_segment_size_mb:40", ("large_segment_size",)),
        ("expandable_segments:True,large_segment_size_mb:12", ("expandable_segments", "large_segment_size")),
        (
            "expandable_segments:True,roundup_power2_divisions:4",
            ("expandable_segments", "roundup_power2_divisions"),
        ),
        ("max_split_size_mb:64,roundup_power2_divisions:4", ("max_split_size",)),
    ],
)
def test_settings_are_inferred_when_the_file_has_none(conf: str, names: tuple[str, ...]) -> None:
    process = noise(conf, capacity=1200 * MIB)
    snapshot = loaded(process, drop=SETTINGS)
    result = verify(snapshot, snapshot.devices[0])
    assert result.exact, result.replay
    assert result.replay is not None
    for name in names:
        if name != "roundup_power2_divisions":  # intervals without a request stay open
            assert getattr(result.config, name) == getattr(process.config, name), name
        assert name in result.inferred
    assert any("records no settings" in note for note in result.notes)


def test_an_unusual_limit_is_inferred_up_to_the_sizes_that_tell() -> None:
    process = noise("max_split_size_mb:57", capacity=1200 * MIB)
    snapshot = loaded(process, drop=SETTINGS)
    result = verify(snapshot, snapshot.devices[0])
    assert result.exact
    assert abs(result.config.max_split_size - 57 * MIB) <= 2 * MIB


def test_garbage_collection_is_inferred_too() -> None:
    process = noise(
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5",
        capacity=1000 * MIB,
        total_bytes=1200 * MIB,
    )
    assert any(
        row.action == "segment_free" and row.context and row.context[0]["name"] == "noise"  # type: ignore[index]
        for row in process.device.rows
    )
    snapshot = loaded(process, drop=SETTINGS)
    result = verify(snapshot, snapshot.devices[0])
    assert result.exact
    assert result.config.garbage_collection_threshold > 0


@pytest.mark.parametrize("tiebreak", ["segment", "block"])
def test_the_order_of_ties_is_found(tiebreak: str) -> None:
    process = noise(tiebreak=tiebreak, addresses="down")
    snapshot = loaded(process)
    result = verify(snapshot, snapshot.devices[0])
    assert result.exact
    assert result.config.tiebreak == tiebreak
    assert result.inferred == ("tiebreak",)
    wrong = verify(snapshot, snapshot.devices[0], config=AllocatorConfig())
    assert not wrong.exact
    assert wrong.replay is not None
    assert wrong.replay.matched < len(wrong.history) // 2


def test_an_order_that_decided_nothing_is_not_claimed() -> None:
    process = SyntheticProcess(replace(AllocatorConfig(), tiebreak="segment"))
    training(process)
    snapshot = loaded(process)
    result = verify(snapshot, snapshot.devices[0])
    assert result.exact
    assert result.inferred == ()


@pytest.mark.parametrize(
    ("conf", "claimed"),
    [
        ("max_split_size_mb:64", {"max_split_size": -1}),
        ("", {"max_split_size": 64 * MIB}),
        ("", {"roundup_power2_divisions": {str(1 << i): 4 for i in range(16)}}),
        ("roundup_power2_divisions:4", {"roundup_power2_divisions": {}}),
        ("expandable_segments:True", {"expandable_segments": False}),
    ],
)
def test_wrong_settings_are_noticed(conf: str, claimed: dict[str, object]) -> None:
    def edit(raw: Any) -> None:
        raw["allocator_settings"].update(claimed, PYTORCH_CUDA_ALLOC_CONF="")

    snapshot = loaded(noise(conf), edit=edit)
    recorded = AllocatorConfig.from_settings(snapshot.settings)
    assert not verify(snapshot, snapshot.devices[0], config=recorded).exact
    result = verify(snapshot, snapshot.devices[0])
    assert result.exact
    assert set(claimed) <= set(result.inferred)
    assert any("not those in effect" in note for note in result.notes)


def test_right_settings_infer_nothing() -> None:
    snapshot = loaded(noise("max_split_size_mb:64"))
    result = verify(snapshot, snapshot.devices[0])
    assert result.exact
    assert (result.inferred, result.notes, result.meaning) == ((), [], None)


def test_private_pools_before_2_7_are_not_expandable() -> None:
    config = AllocatorConfig(expandable_segments=True, private_pools_expandable=False)
    process = SyntheticProcess(config, torch_version=(2, 6), total_bytes=4 * GIB)
    graph_pool(process)
    snapshot = loaded(process)
    result = verify(snapshot, snapshot.devices[0])
    assert result.exact, result.replay
    assert result.inferred == ()


def test_a_device_without_history() -> None:
    process = SyntheticProcess("expandable_segments:True", devices=2, max_entries=1)
    training(process, layers=2, steps=1)
    snapshot = loaded(process, drop=SETTINGS)
    first, second = (verify(snapshot, each) for each in snapshot.devices)
    assert first.exact is None
    assert first.config.expandable_segments
    assert second.exact is None
    entry = second.to_json()
    assert (entry["events"], entry["exact"], entry["first_divergence"]) == (0, None, None)


def edited(change: Any, **options: Any) -> Any:
    process = SyntheticProcess(**options)
    training(process, layers=6, steps=3)
    snapshot = loaded(process, edit=lambda raw: change(raw, raw["device_traces"][0]))
    return verify(snapshot, snapshot.devices[0])


def _only(*gone: str) -> Any:
    def change(raw: Any, rows: list[Any]) -> None:
        raw["device_traces"][0] = [row for row in rows if row["action"] not in gone]

    return change


def _odd_addresses(raw: Any, rows: list[Any]) -> None:
    for row in rows:
        row["addr"] += 3
    for segment in raw["segments"]:
        segment["address"] += 3
        for block in segment["blocks"]:
            block["address"] += 3


def _swap_sizes(raw: Any, rows: list[Any]) -> None:
    for row in rows:
        if row["action"] in ("alloc", "free_requested", "free_completed") and row["size"] == 24 * MIB:
            row["size"] -= 9 * MIB


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_only("alloc"), "contradict each other"),
        (_only("free_requested", "free_completed"), "contradict each other"),
        (_odd_addresses, None),
        (_swap_sizes, "other settings than recorded"),
        (lambda raw, rows: rows.__delitem__(slice(100, 140)), "contradict each other"),
        (lambda raw, rows: rows[5].update(addr=1 << 60), "contradict each other"),
    ],
)
def test_what_a_divergence_means(change: Any, words: str | None) -> None:
    result = edited(change)
    if words is None:  # a shift of everything by three bytes is consistent in itself
        assert result.exact
        return
    assert result.exact is False
    assert words in result.meaning
    entry = result.to_json()["first_divergence"]
    assert entry["meaning"] == result.meaning
    assert entry["recorded"]
    assert entry["predicted"]


def test_segments_that_appear_from_nowhere() -> None:
    def change(raw: Any, rows: list[Any]) -> None:
        raw["segments"] = []
        kept = [row for row in rows if row["action"] == "alloc"][:40]
        raw["device_traces"][0] = [
            dict(row, action=action)
            for row in kept
            for action in ("alloc", "free_requested", "free_completed")
        ]

    result = edited(change)
    assert result.exact is False
    assert "segment rows are missing" in result.meaning


def test_made_up_addresses() -> None:
    def change(raw: Any, rows: list[Any]) -> None:
        raw["segments"] = []
        raw["device_traces"][0] = [
            {"action": action, "addr": 4097 + 13 * number, "size": 100, "stream": 0}
            for number in range(20)
            for action in ("alloc", "free_requested", "free_completed")
        ]

    assert "no allocator gives" in edited(change).meaning


def test_histories_without_some_kinds_of_rows() -> None:
    def no_frees(raw: Any, rows: list[Any]) -> None:
        raw["segments"] = []
        raw["device_traces"][0] = [
            {"action": "alloc", "addr": 0x7F0000000000 + 512 * number, "size": 512, "stream": 0}
            for number in range(1200)
        ]

    assert "contradict each other" in edited(no_frees).meaning

    def no_allocs(raw: Any, rows: list[Any]) -> None:
        raw["segments"] = [each for each in raw["segments"] if len(each["blocks"]) == 1][:1]
        first = raw["segments"][0]["address"]
        raw["device_traces"][0] = [
            {
                "action": "segment_free",
                "addr": first + (1 << 30) * number,
                "size": 2 * MIB,
                "stream": number % 2,
            }
            for number in range(1, 20)
        ]

    result = edited(no_allocs)
    assert result.exact is False
    assert "allocations are missing" in result.meaning


def test_an_open_question_may_be_the_reason() -> None:
    process = noise("max_split_size_mb:20", max_entries=300, seed=25)
    snapshot = loaded(process)
    device = snapshot.devices[0]
    result = verify(snapshot, device, config=replace(process.config, roundup_power2_divisions=(16,) * 16))
    assert result.exact is False
    if result.replay is not None and result.replay.ambiguities:
        assert result.to_json()["ambiguities"][0]["count"] > 0


def test_versions() -> None:
    snapshot = loaded(noise())
    for text, expected in (
        ("2.6", (2, 6)),
        ("2.10.1", (2, 10)),
        (None, None),
        ("nightly", None),
        ("2.x", None),
    ):
        snapshot.torch_version = text
        assert version_of(snapshot) == expected


def test_guesses_do_not_repeat_the_recorded_limit() -> None:
    config = AllocatorConfig.parse("max_split_size_mb:128")
    found = list(guesses(config, history_of(noise())))
    assert any(each.max_split_size == UNLIMITED for each in found)
    assert all(each != config for each in found)


def test_divisions_without_evidence_are_off() -> None:
    process = SyntheticProcess("roundup_power2_divisions:8")
    process.device.malloc(512)
    process.device.malloc(512)
    process.device.malloc(512)
    assert divisions_of(history_of(process), AllocatorConfig())[0] == (0,) * 16
