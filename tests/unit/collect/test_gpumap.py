"""Which GPU belongs to which rank."""

from __future__ import annotations

import os

import pytest

from oomscope.collect import gpumap
from oomscope.collect.base import Device
from oomscope.collect.gpumap import RankProcess, assign, cuda_visible

A, B = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000"
M0, M1 = "MIG-0001", "MIG-0002"
DEVICES = [
    Device(A, 0, "H100", "0", 80),
    Device(M0, 0, "H100 MIG", "0", 10, parent_uuid=A, instance=7),
    Device(M1, 0, "H100 MIG", "0", 10, parent_uuid=A, instance=8),
    Device(B, 1, "H100", "1", 80),
]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [A, B]),
        ("1,0", [B, A]),
        ("", []),
        ("0,-1,1", [A]),
        ("0,0", []),
        ("GPU-bbbb", [B]),
        ("GPU-", []),
        ("1, 0", [B, A]),
        ("MIG-0002,MIG-0001", [M1]),
        (f"MIG-{A}/8/0", [M1]),
        ("7", []),
        ("nonsense,0", []),
    ],
)
def test_visible_as_the_cuda_runtime_reads_it(value, expected):
    assert cuda_visible(value, DEVICES) == expected


def rows(*pairs):
    return [{"pid": pid, "used_bytes": used, "type": "compute"} for pid, used in pairs]


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    monkeypatch.setattr(gpumap, "in_initial_pid_namespace", lambda: True)


PLAIN = [Device(A, 0, "H100", "0", 80), Device(B, 1, "H100", "1", 80)]


def test_the_agent_knows_better_than_nvml():
    result = assign([RankProcess(5, 0, 0, agent_uuid=B)], PLAIN, {A: rows((5, 10)), B: rows((5, 20))})
    assert result.by_pid[5] == gpumap.Assignment(B, 20, "agent")


def test_the_process_list_and_a_second_context():
    result = assign([RankProcess(5, 3, 1)], PLAIN, {A: rows((5, 400 << 20)), B: rows((5, 9 << 30))})
    assert result.by_pid[5].uuid == B
    assert result.by_pid[5].how == "nvml"
    assert any("set_device" in note and "GPU 0" in note for note in result.notes)


def test_the_environment_is_a_guess():
    result = assign([RankProcess(5, 1, 1, {"CUDA_VISIBLE_DEVICES": "1,0"})], PLAIN, {})
    assert result.by_pid[5] == gpumap.Assignment(A, None, "environment (guess)")


def test_one_visible_gpu_is_the_one_whatever_the_local_rank():
    assert assign([RankProcess(5, 1, 1, {"CUDA_VISIBLE_DEVICES": "1"})], PLAIN, {}).by_pid[5].uuid == B


def test_a_container_accepts_the_only_process_of_a_gpu(monkeypatch):
    monkeypatch.setattr(gpumap, "in_initial_pid_namespace", lambda: False)
    result = assign([RankProcess(5, 0, 0)], PLAIN, {A: rows((2**22 - 5, 7 << 30))})
    assert result.by_pid[5] == gpumap.Assignment(A, 7 << 30, "only process there")
    assert result.notes == []


def test_a_container_names_host_pids(monkeypatch):
    monkeypatch.setattr(gpumap, "in_initial_pid_namespace", lambda: False)
    result = assign([RankProcess(5, 0, 0)], PLAIN, {A: rows((2**22 - 5, 1), (2**22 - 6, 1))})
    assert any("--pid=host" in note for note in result.notes)


def test_foreign_and_vanished_processes():
    me = os.getpid()
    result = assign([RankProcess(5, 0, 0)], PLAIN, {A: rows((5, 1), (me, 3 << 30), (2**22 - 5, 1 << 30))})
    assert any(f"pid {me}" in note and "3.0 GiB" in note for note in result.notes)
    assert any("does not exist any more" in note for note in result.notes)


def test_all_ranks_on_one_gpu():
    ranks = [RankProcess(10 + i, i, i) for i in range(3)]
    result = assign(ranks, PLAIN, {A: rows((10, 1), (11, 1), (12, 1))})
    assert any("3 ranks (0, 1, 2) use GPU 0" in note for note in result.notes)


def test_mixed_models_make_the_guess_worse():
    devices = [Device(A, 0, "H100", "0", 80), Device(B, 1, "T4", "1", 16)]
    notes = assign([RankProcess(5, 0, 0)], devices, {}).notes
    assert any("PCI_BUS_ID" in note for note in notes)
    assert assign([RankProcess(5, 0, 0, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})], devices, {}).notes == []
