"""The watch for what holds what grows."""

from __future__ import annotations

import collections
import gc
import sys
import time
import weakref
from typing import Any

import pytest
import torch

from oomscope.agent import guard
from oomscope.agent import holders as holders_module
from oomscope.agent.holders import HolderProbe
from oomscope.agent.reach import Walk, locals_of, user_frames

KEPT: list[Any] = []
STEPS = 16


def watch(**options: Any) -> tuple[HolderProbe, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    probe = HolderProbe(
        torch, records.append, own_folder="/nowhere", **{"always": True, "host_counts": True, **options}
    )
    return probe, records


def holders(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {record["path"]: record for record in records}


def test_a_list_of_results_is_named_with_its_function() -> None:
    probe, records = watch()
    history = []
    for step in range(STEPS):
        history.append(torch.zeros(256, 4))
        probe.after_step(step, None, 0)
    found = holders(records)["history"]
    assert found["scope"] == "local of test_a_list_of_results_is_named_with_its_function"
    assert found["file"] == __file__
    assert (found["owner"], found["item"]) == ("list", "256x4 float32 tensor on cpu")
    assert found["count_per_step"] == 1
    assert found["bytes_per_step"] == 4096
    assert not found["has_graph"]


def test_losses_with_their_graph() -> None:
    probe, records = watch()
    weight = torch.ones(8, requires_grad=True)
    losses = []
    for step in range(STEPS):
        losses.append((weight * step).sum())
        probe.after_step(step, None, 0)
    assert holders(records)["losses"]["has_graph"]


def test_a_sum_whose_graph_gets_longer() -> None:
    probe, records = watch()
    weight = torch.ones(8, requires_grad=True)
    total = torch.zeros(())
    for step in range(STEPS):
        total = total + (weight * step).sum()
        probe.after_step(step, None, 0)
    found = holders(records)["total"]
    assert (found["owner"], found["item"], found["has_graph"]) == ("Tensor", "autograd graph", True)
    assert found["count_per_step"] >= 1


class Trainer:
    def __init__(self, probe: HolderProbe) -> None:
        self.probe = probe
        self.cache: dict[Any, Any] = {}

    def run(self) -> None:
        for step in range(STEPS):
            self.cache[step] = {"x": torch.zeros(10)}
            self.probe.after_step(step, None, 0)


def test_an_attribute_of_an_object() -> None:
    probe, records = watch()
    Trainer(probe).run()
    found = holders(records)["self.cache"]
    assert (found["owner"], found["bytes_per_step"]) == ("dict", 40)


def test_a_global_and_what_a_hook_closes_over() -> None:
    probe, records = watch()
    seen = collections.deque()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        for step in range(STEPS):
            KEPT.append(model(torch.zeros(4, 2)).detach())
            probe.after_step(step, None, 0)
    finally:
        KEPT.clear()
    found = holders(records)
    assert found["KEPT"]["scope"] == "global of test_holders.py"
    assert found["seen"]["has_graph"]


def test_a_window_and_a_list_that_is_emptied_are_no_holders() -> None:
    probe, records = watch()
    window = collections.deque(maxlen=4)
    batch: list[Any] = []
    for step in range(40):
        window.append(torch.zeros(4))
        batch.append(torch.zeros(4))
        if step % 5 == 0:
            batch.clear()
        probe.after_step(step, None, 0)
    assert not {"window", "batch"} & set(holders(records))


def test_it_looks_only_when_something_grows() -> None:
    probe, records = watch(always=False)
    history = []
    for step in range(30):
        history.append(torch.zeros(4))
        probe.after_step(step, 1 << 30, 1 << 30)
    assert records == []
    for step in range(30, 60):
        history.append(torch.zeros(4))
        probe.after_step(step, (1 << 30) + (step << 20), 1 << 30)
    assert "history" in holders(records)


def test_a_simulated_devices_books_do_not_arm_it() -> None:
    probe, records = watch(always=False, host_counts=False)
    history = []
    for step in range(40):
        history.append(0)
        probe.after_step(step, 1 << 30, step << 24)
    assert records == []


def test_nothing_of_the_script_runs_and_nothing_is_kept_alive() -> None:
    class Touchy:
        """Any look at it from outside is an error."""

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        def __len__(self) -> int:
            raise AssertionError

        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            raise AssertionError

    probe, _ = watch()
    touchy = Touchy()
    table = {touchy: touchy}
    big = torch.zeros(100)
    gone = weakref.ref(big)
    for step in range(10):
        probe.after_step(step, None, 0)
    assert "holders" not in guard.OFF
    del big
    assert gone() is None
    assert len(table) == 1


def test_a_look_does_not_prolong_the_life_of_a_local() -> None:
    def body() -> weakref.ref[Any]:
        tensor = torch.zeros(3)
        alive = weakref.ref(tensor)
        names = locals_of(sys._getframe())
        assert names["tensor"] is tensor
        del names, tensor
        return alive

    assert body()() is None


def test_a_fault_switches_it_off_and_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, records = watch()
    monkeypatch.setattr(probe, "look", lambda *args: 1 / 0)
    try:
        for step in range(10):
            probe.after_step(step, None, 0)
        assert "holders" in guard.OFF
    finally:
        guard.OFF.discard("holders")
    assert records == []


def test_looks_stay_within_their_share_of_the_time() -> None:
    probe, _ = watch()
    looks = []
    probe.look = lambda step, frame: (looks.append(step), time.sleep(0.03))  # type: ignore[method-assign,assignment]
    for step in range(300):
        probe.after_step(step, None, 0)
    assert 2 <= len(looks) <= 3  # what may be spent ahead; a per cent of so short a time allows no more
    assert gc.isenabled()


def test_installed_code_is_not_looked_into() -> None:
    frames = list(user_frames(sys._getframe(), lambda file: "site-packages" in file or "lib/python" in file))
    assert all("site-packages" not in frame.f_code.co_filename for frame in frames)
    inside = [1, 2]
    paths = {item.place.path for item in Walk(torch, frames, lambda file: False) if item.value is inside}
    assert paths == {"inside"}


def test_one_look_counts_a_bounded_number_of_nodes_over_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders_module, "_MAX_NODES", 40)
    probe, _ = watch()
    weight = torch.ones(1, requires_grad=True)
    graphs = [weight * 1 for _ in range(50)]
    first, second = sum(graphs[:15], weight), sum(graphs[15:], weight)
    probe.look(0, sys._getframe())
    assert probe._nodes_left <= 0
    assert probe._graph_size(second) is None
    probe._nodes_left = 1000
    size = probe._graph_size(first)
    assert size is not None
    assert size >= 30
