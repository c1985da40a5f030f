"""What the documentation shows is what the program prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomscope.cli.whatif import answer, whatif_text
from oomscope.core.allocator.synth import SyntheticProcess
from oomscope.core.allocator.synth_workloads import fragmented_oom
from oomscope.units import MIB

from .helpers import loaded

DOCS = Path(__file__).resolve().parents[4] / "docs"


def test_the_example_of_fragmentation() -> None:
    if not DOCS.is_dir():
        pytest.skip("documentation is not part of this installation")
    process = SyntheticProcess(capacity=500 * MIB)
    fragmented_oom(process)
    snapshot = loaded(process)
    text = whatif_text("fragmented.pickle", [answer(snapshot, snapshot.devices[0])], snapshot.stacks)
    assert text in (DOCS / "whatif.md").read_text()


def test_the_example_of_the_model() -> None:
    from oomscope.core.allocator.model import AllocatorConfig, CachingAllocator, VirtualDriver

    allocator = CachingAllocator(AllocatorConfig.parse("expandable_segments:True"), VirtualDriver(24 << 30))
    allocator.free(allocator.malloc(300 << 20, stream=0))
    peak = allocator.memory_stats()["reserved_bytes"]["all"]["peak"]
    if DOCS.is_dir():
        assert f"# {peak}" in (DOCS / "allocator.md").read_text()
