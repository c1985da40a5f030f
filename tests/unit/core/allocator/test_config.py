"""Settings: the text people write, what snapshots record, and how sizes are rounded."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.model_config import UNLIMITED
from oomscope.units import GIB, KIB, MIB

GOOD = [
    "",
    "expandable_segments:True",
    "expandable_segments:False",
    " expandable_segments : True , max_split_size_mb : 64",
    "max_split_size_mb:20",
    "max_split_size_mb:21,",
    "max_non_split_rounding_mb:20",
    "garbage_collection_threshold:0.5",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:[256:1,512:2,>:8]",
    "roundup_power2_divisions:[>:8]",
    "roundup_power2_divisions:[256:1,]",
    "large_segment_size_mb:40",
    "large_segment_size_mb:40,max_split_size_mb:40",
    "backend:native",
    "per_process_memory_fraction:0.5",
    "pinned_use_background_threads:True",
]
BAD = [
    ("expandable_segments:true", "expandable_segments: expected True or False"),
    ("max_split_size_mb:19", "max_split_size_mb: must be at least 20"),
    ("max_split_size_mb:30,large_segment_size_mb:40", "max_split_size_mb: must be at least 40"),
    ("max_non_split_rounding_mb:19", "max_non_split_rounding_mb: must be at least 20"),
    ("garbage_collection_threshold:1.0", "garbage_collection_threshold: must lie between"),
    ("garbage_collection_threshold:0", "garbage_collection_threshold: must lie between"),
    ("garbage_collection_threshold:abc", "garbage_collection_threshold: expected a number"),
    ("roundup_power2_divisions:3", "roundup_power2_divisions: divisions must be a power of two"),
    ("roundup_power2_divisions:0", "roundup_power2_divisions: a single number"),
    ("roundup_power2_divisions:[250:8]", "roundup_power2_divisions: sizes must be powers of two"),
    ("roundup_power2_divisions:[256:1", "roundup_power2_divisions: missing ']'"),
    ("large_segment_size_mb:10", "large_segment_size_mb: must be more than 10"),
    ("max_split_size_mb", "max_split_size_mb: expected ':' and a value"),
    ("max_split_size_mb:", "max_split_size_mb: expected ':' and a value"),
    (":", "expected a key"),
    ("expandable_segments:True max_split_size_mb:64", "expandable_segments: expected ','"),
]
STRICTER = [  # torch ignores an unknown key where no CUDA is, and reads numbers as far as they go
    ("per_process_memory_fraction:2", "per_process_memory_fraction: must lie between"),
    ("max_splitsize_mb:64", "max_splitsize_mb: unknown allocator option"),
    ("max_split_size_mb:64x", "max_split_size_mb: expected a whole number"),
    ("max_split_size_mb:[64]", "max_split_size_mb: expected one value, found a list"),
    ("max_split_size_mb:,", "max_split_size_mb: expected a value"),
    ("roundup_power2_divisions:[256]", "roundup_power2_divisions: expected [size:divisions,...]"),
]


@pytest.mark.parametrize("text", GOOD)
def test_accepts_what_torch_accepts(text: str) -> None:
    AllocatorConfig.parse(text)


@pytest.mark.parametrize(("text", "message"), BAD + STRICTER)
def test_a_refusal_names_the_key(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        AllocatorConfig.parse(text)


@pytest.mark.slow
def test_torch_itself_agrees() -> None:
    """torch's own parser, in a child process because it keeps what it accepts."""
    pytest.importorskip("torch")
    code = (
        "import json, sys, torch\n"
        "verdicts = []\n"
        "for text in json.loads(sys.argv[1]):\n"
        "    torch._C._accelerator_setAllocatorSettings('large_segment_size_mb:20')\n"
        "    try:\n"
        "        torch._C._accelerator_setAllocatorSettings(text); verdicts.append(True)\n"
        "    except Exception:\n"
        "        verdicts.append(False)\n"
        "print(json.dumps(verdicts))\n"
    )
    texts = [*GOOD, *(text for text, _ in BAD)]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(texts)], capture_output=True, text=True, timeout=120
    )
    if "has no attribute" in done.stderr:
        pytest.skip("this torch has no settings call")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True] * len(GOOD) + [False] * len(BAD)


def test_parsed_values() -> None:
    config = AllocatorConfig.parse(
        "max_split_size_mb:64,max_non_split_rounding_mb:30,garbage_collection_threshold:0.8,"
        "expandable_segments:True,large_segment_size_mb:40,graph_capture_record_stream_reuse:True,"
        "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.25"
    )
    assert config == AllocatorConfig(
        expandable_segments=True,
        max_split_size=64 * MIB,
        max_non_split_rounding=30 * MIB,
        garbage_collection_threshold=0.8,
        large_segment_size=40 * MIB,
        graph_capture_record_stream_reuse=True,
        throw_on_cudamalloc_oom=True,
        per_process_memory_fraction=0.25,
    )


def test_roundup_list_fills_below_the_first_and_above_the_last() -> None:
    config = AllocatorConfig.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert config.roundup_power2_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert AllocatorConfig.parse("roundup_power2_divisions:[>:8]").roundup_power2_divisions == (8,) * 16


@pytest.mark.parametrize(
    ("requested", "rounded"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (5 * MIB - 1, 5 * MIB)],
)
def test_rounds_to_512_bytes(requested: int, rounded: int) -> None:
    assert AllocatorConfig().round_size(requested) == rounded


@pytest.mark.parametrize(
    ("divisions", "requested", "rounded"),
    [
        (4, 1200, 1536),  # too small for the divisions: to 512 bytes
        (4, 5 * MIB, 5 * MIB),
        (4, 5 * MIB + 1, 6 * MIB),
        (4, 7 * MIB + 1, 8 * MIB),
        (8, 4 * MIB + 1, 4 * MIB + 512 * KIB),
        (8, 64 * MIB, 64 * MIB),
        (2, 100 * GIB, 128 * GIB),  # beyond the last interval its divisions count
    ],
)
def test_rounds_to_divisions_of_powers_of_two(divisions: int, requested: int, rounded: int) -> None:
    config = AllocatorConfig.parse(f"roundup_power2_divisions:{divisions}")
    assert config.round_size(requested) == rounded


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (91 * MIB, 92 * MIB),
    ],
)
def test_segment_sizes(size: int, segment: int) -> None:
    assert AllocatorConfig().segment_size(size) == segment


@given(st.integers(1, 1 << 40), st.sampled_from([0, 1, 2, 4, 16, 256, 1 << 20]))
def test_rounding_never_loses_bytes_and_is_stable(requested: int, divisions: int) -> None:
    config = replace(AllocatorConfig(), roundup_power2_divisions=(divisions,) * 16)
    rounded = config.round_size(requested)
    assert rounded >= requested
    assert rounded % 512 == 0
    assert config.round_size(rounded) == rounded
    assert config.segment_size(rounded) >= rounded


@given(st.text(alphabet="abc_:,[]>0123456789.TrueFals ", max_size=40))
def test_any_text_parses_or_is_refused_with_a_reason(text: str) -> None:
    with contextlib.suppress(ValueError):
        AllocatorConfig.parse(text)


@given(
    st.builds(
        AllocatorConfig,
        expandable_segments=st.booleans(),
        max_split_size=st.sampled_from([UNLIMITED, 20 * MIB, 128 * MIB]),
        max_non_split_rounding=st.sampled_from([20 * MIB, 33 * MIB]),
        garbage_collection_threshold=st.sampled_from([0.0, 0.5]),
        roundup_power2_divisions=st.sampled_from([(0,) * 16, (4,) * 16, (0,) * 15 + (8,)]),
        large_segment_size=st.sampled_from([20 * MIB, 12 * MIB]),
        per_process_memory_fraction=st.sampled_from([1.0, 0.5]),
    )
)
def test_text_and_settings_give_the_configuration_back(config: AllocatorConfig) -> None:
    assert AllocatorConfig.parse(config.to_text()) == config
    assert AllocatorConfig.from_settings(config.to_settings()) == config


def test_recorded_values_win_over_the_text() -> None:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "expandable_segments": False}
    assert not AllocatorConfig.from_settings(settings).expandable_segments


@pytest.mark.parametrize(
    "settings",
    [
        None,
        {},
        {"PYTORCH_CUDA_ALLOC_CONF": "nonsense"},
        {"max_split_size": "big", "roundup_power2_divisions": [1], "garbage_collection_threshold": None},
        {"max_split_size": -1, "roundup_power2_divisions": {"x": 1, "0": 2, "4": -1}},
    ],
)
def test_damaged_settings_count_as_defaults(settings: dict[str, object] | None) -> None:
    assert AllocatorConfig.from_settings(settings) == AllocatorConfig()


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="tiebreak 'random'"):
        AllocatorConfig(tiebreak="random")
    with pytest.raises(ValueError, match="16 entries"):
        AllocatorConfig(roundup_power2_divisions=(1,))
