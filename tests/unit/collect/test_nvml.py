"""The NVIDIA collector against the fake library, and against the pure one where no compiler is needed."""

from __future__ import annotations

import pytest

from oomscope.collect import nvml
from oomscope.collect.base import ALL_TIERS, Collector, Tier

FAST = frozenset({Tier.FAST})
GIB = 1 << 30


def start(clock=None):
    collector = nvml.NvmlCollector(clock) if clock else nvml.NvmlCollector()
    availability = collector.probe()
    assert availability.ok, availability
    return collector


def gpus(collector, tiers=ALL_TIERS):
    return [record for record in collector.sample(tiers) if record["k"] == "gpu"]


def test_it_is_a_collector():
    assert isinstance(nvml.NvmlCollector(), Collector)


def test_memory_separates_what_the_driver_holds_back(machine):
    fake = machine(1)
    fake[0].used = 70 * GIB
    row = gpus(start())[0]
    assert row["used_bytes"] == 70 * GIB
    assert row["driver_reserved_bytes"] == 551 << 20
    assert row["used_bytes"] + row["free_bytes"] + row["driver_reserved_bytes"] == row["total_bytes"]


def test_eight_gpus_with_all_tiers(machine):
    machine(scenario="8xh100", pids={f"rank{i}": 1000 + i for i in range(8)})
    rows = gpus(start())
    assert [row["gpu"] for row in rows] == list(range(8))
    assert [row["processes"][0]["pid"] for row in rows] == [1000 + i for i in range(8)]
    assert rows[5]["throttle"] == ["sw_power_cap"]
    assert rows[0]["throttle"] == []
    assert rows[3]["temperature_c"] == 63
    assert rows[3]["power_limit_mw"] == 700_000
    assert rows[3]["sm_clock_mhz"] == 1755
    assert rows[0]["ecc_uncorrected"] == 0
    assert "nvlink_tx_kib" in rows[0]
    assert sum("pcie_tx_kib_s" in row for row in rows) == 1, "PCIe blocks 20 ms a call: one GPU per slow tick"


def test_the_fast_tier_asks_three_calls_per_gpu(machine):
    fake = machine(8)
    collector = start()
    collector.sample(ALL_TIERS)
    before = sum(fake.calls().values())
    collector.sample(FAST)
    assert sum(fake.calls().values()) - before == 8 * 3


def test_old_driver(machine):
    machine(scenario="driver470", pids={"rank0": 77})
    row = gpus(start())[0]
    assert "driver_reserved_bytes" not in row
    assert row["used_bytes"] == (5000 + 300) << 20, (
        "the first version of the call counts what the driver holds back"
    )
    assert row["processes"] == [{"pid": 77, "used_bytes": 4800 << 20, "type": "compute"}]
    assert row["temperature_c"] == 34
    assert row["throttle"] == []


def test_long_process_records_of_driver_535(machine):
    machine(scenario="driver535")
    rows = gpus(start())[0]["processes"]
    assert [(row["pid"], row["used_bytes"]) for row in rows] == [(5080, 5120 << 20), (5081, 6144 << 20)]


def test_a_lost_gpu_leaves_the_others_alone(machine):
    fake = machine(3)
    collector = start()
    fake[1].lost = 1
    rows = gpus(collector)
    assert [row["state"] for row in rows] == ["ok", "lost", "ok"]
    assert "used_bytes" not in rows[1]
    before = fake.calls()["DeviceGetUtilizationRates"]
    gpus(collector)
    assert fake.calls()["DeviceGetUtilizationRates"] == before + 2, "a lost GPU is not asked again"


def test_a_gpu_that_is_lost_at_the_start_is_listed(machine):
    machine(scenario="lost")
    collector = start()
    assert [device.state for device in collector.devices()] == ["ok", "lost", "ok"]
    assert [row["state"] for row in gpus(collector)] == ["ok", "lost", "ok"]


@pytest.mark.parametrize(
    ("scenario", "code", "word"),
    [
        ("no_permission", "permission", "device files"),
        ("upgraded", "mismatch", "reboot"),
        ("container", "unknown", "daemon-reload"),
    ],
)
def test_init_errors_say_what_to_do(machine, scenario, code, word):
    machine(scenario=scenario)
    availability = nvml.NvmlCollector().probe()
    assert (availability.ok, availability.code) == (False, code)
    assert word in availability.help


def test_no_driver(monkeypatch):
    import pynvml

    def missing(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    availability = nvml.NvmlCollector().probe()
    assert availability.code == "no_library"
    assert "--gpus all" in availability.help


def test_an_overwritten_binding_is_named(monkeypatch):
    import pynvml

    monkeypatch.delattr(pynvml, "nvmlInitWithFlags")
    assert nvml.NvmlCollector().probe().code == "shadowed"


def test_a_refused_call_is_asked_once_a_minute(machine):
    fake = machine(1)
    now = [0.0]
    collector = start(lambda: now[0])
    fake.error("DeviceGetPowerUsage", 3, gpu=0)
    for _ in range(20):
        row = gpus(collector)[0]
    assert fake.calls()["DeviceGetPowerUsage"] == 1
    assert "power_mw" not in row
    assert row["unsupported"] == {"power": "Not Supported"}
    fake.error("DeviceGetPowerUsage", 0, gpu=0)
    now[0] = nvml.REPROBE_S + 1
    assert gpus(collector)[0]["power_mw"] == 71_000


def test_a_passing_error_is_forgiven_until_the_fifth(machine):
    fake = machine(1)
    collector = start(lambda: 0.0)
    fake.error("DeviceGetClockInfo", 999, gpu=0)
    for _ in range(20):
        gpus(collector)
    assert fake.calls()["DeviceGetClockInfo"] == nvml.MAX_FAILURES


def test_the_consumer_card_without_ecc(machine):
    machine(scenario="refusals")
    row = gpus(start())[0]
    assert set(row["unsupported"]) >= {"power", "temperature", "ecc"}
    assert row["utilization_pct"] == 0


def test_mig_instances_have_their_own_memory_and_processes(machine):
    machine(scenario="mig", pids={"rank0": 55})
    collector = start()
    devices = collector.devices()
    assert [device.parent_uuid is not None for device in devices] == [False, True, True, True, False]
    rows = {row["uuid"]: row for row in gpus(collector)}
    second = rows[devices[2].uuid]
    assert second["total_bytes"] == 20 * GIB
    assert second["gpu_instance"] == 8
    assert [row["pid"] for row in second["processes"]] == [55]
    assert "utilization_pct" not in second
    third = rows[devices[3].uuid]["processes"]
    assert third[0]["used_bytes"] is None, "hidden memory is unknown, not 16 EiB"


def test_a_process_with_both_contexts_is_one_row(machine):
    fake = machine(1)
    fake.processes(
        0, [{"pid": 5, "used_mib": 100, "kind": "both"}, {"pid": 6, "used_mib": 10, "kind": "graphics"}]
    )
    rows = gpus(start())[0]["processes"]
    assert [(row["pid"], row["type"]) for row in rows] == [(5, "compute"), (6, "graphics")]


def test_xid_events(machine):
    fake = machine(2)
    collector = start()
    assert collector.events(0.01) == []
    fake.xid(1, 79)
    assert collector.events(0.05) == [
        {"k": "xid", "code": 79, "source": "nvml", "uuid": collector.devices()[1].uuid, "gpu": 1}
    ]


def test_visible_devices_in_cuda_order(machine):
    machine(4)
    collector = start()
    uuids = [device.uuid for device in collector.devices()]
    assert collector.visible({"CUDA_VISIBLE_DEVICES": "2,0"}) == [uuids[2], uuids[0]]
    assert collector.visible({}) == uuids


def test_without_a_compiler(pure):
    lib = pure(
        [
            {"uuid": "GPU-aa", "total": 80 * GIB, "used": 3 * GIB, "procs": [(9, GIB)]},
            {"uuid": "GPU-bb", "total": GIB, "used": 0},
        ]
    )
    collector = start()
    rows = gpus(collector)
    assert rows[0]["processes"] == [{"pid": 9, "used_bytes": GIB, "type": "compute"}]
    assert "ecc" in rows[0]["unsupported"], "a function that the library lacks is one that is not supported"
    lib.gpus[0]["used"] = 5 * GIB
    assert gpus(collector, FAST)[0]["used_bytes"] == 5 * GIB
