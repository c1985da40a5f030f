"""Torch's allocation history: ours only where nobody else's is on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oomscope.agent.history import MAX_ENTRIES, start_history, stop_history


class Memory:
    """torch.cuda.memory with a history that remembers how it was switched."""

    def __init__(self, *, recording: bool = False) -> None:
        self.recording = recording
        self.calls: list[dict[str, Any]] = []

    def _record_memory_history(self, **settings: Any) -> None:
        self.calls.append(settings)
        self.recording = settings["enabled"] is not None

    def _snapshot(self) -> dict[str, Any]:
        return {"device_traces": [[{"action": "alloc"}] if self.recording else []]}


def torch_with(memory: Any, *, tells: bool = True) -> Any:
    backend = SimpleNamespace(_cuda_isHistoryEnabled=lambda: memory.recording) if tells else SimpleNamespace()
    return SimpleNamespace(_C=backend, cuda=SimpleNamespace(memory=memory))


def test_it_is_a_bounded_ring_with_python_stacks_of_allocations() -> None:
    memory = Memory()
    assert start_history(torch_with(memory), {"max_entries": 500})
    assert memory.calls == [{"enabled": "all", "context": "alloc", "stacks": "python", "max_entries": 500}]
    assert start_history(torch_with(Memory()), {})
    assert MAX_ENTRIES >= 10_000
    stop_history(torch_with(memory))
    assert not memory.recording


@pytest.mark.parametrize("tells", [True, False], ids=["asked", "by snapshot"])
def test_the_history_of_the_job_itself_stays_as_the_job_set_it(tells: bool) -> None:
    memory = Memory(recording=True)
    assert not start_history(torch_with(memory, tells=tells), {})
    assert memory.calls == []


def test_it_can_be_switched_off_and_may_not_exist() -> None:
    memory = Memory()
    assert not start_history(torch_with(memory), {"enabled": False})
    assert memory.calls == []
    assert not start_history(torch_with(SimpleNamespace()), {})
