"""The AMD collector against a stand-in for the module amdsmi."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from oomscope_rocm import RocmCollector

from oomscope.collect.base import ALL_TIERS, Collector, Tier


class FakeError(Exception):
    """Stands for AmdSmiException."""


class FakeSmi:
    """Two MI300X; methods as in amdsmi 6.4."""

    AmdSmiException = FakeError
    AmdSmiTemperatureType = SimpleNamespace(JUNCTION=1)
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)
    AmdSmiClkType = SimpleNamespace(GFX=0)

    def __init__(self):
        self.cards = ["a", "b"]
        self.power = {"current_socket_power": 640, "average_socket_power": "N/A", "power_limit": 750}
        self.fails = set()
        self.calls = []

    def _call(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise FakeError("AMDSMI_STATUS_NOT_SUPPORTED")

    def amdsmi_init(self):
        self._call("init")

    def amdsmi_shut_down(self):
        self._call("shut_down")

    def amdsmi_get_processor_handles(self):
        return self.cards

    def amdsmi_get_gpu_vram_usage(self, handle):
        self._call("vram")
        return {"vram_total": 196592, "vram_used": 1000}

    def amdsmi_get_gpu_asic_info(self, handle):
        return {"market_name": "AMD Instinct MI300X"}

    def amdsmi_get_gpu_device_uuid(self, handle):
        return f"uuid-{handle}"

    def amdsmi_get_gpu_device_bdf(self, handle):
        return "0000:0c:00.0"

    def amdsmi_get_gpu_enumeration_info(self, handle):
        return {"hip_uuid": f"GPU-{handle}"}

    def amdsmi_get_gpu_activity(self, handle):
        self._call("activity")
        return {"gfx_activity": 91, "umc_activity": "N/A", "mm_activity": 0}

    def amdsmi_get_gpu_process_list(self, handle):
        self._call("processes")
        return [{"pid": 5, "name": "python", "mem": 1, "memory_usage": {"vram_mem": 700 << 20}}]

    def amdsmi_get_power_info(self, handle):
        self._call("power")
        return self.power

    def amdsmi_get_temp_metric(self, handle, kind, metric):
        self._call("temperature")
        return 66

    def amdsmi_get_clock_info(self, handle, kind):
        return {"clk": 2100, "min_clk": 132, "max_clk": 2100}


@pytest.fixture
def smi():
    return FakeSmi()


@pytest.fixture
def collector(smi):
    made = RocmCollector(smi, clock=lambda: 0.0)
    assert made.probe().ok
    return made


def test_contract(collector):
    assert isinstance(collector, Collector)
    assert [(device.index, device.uuid, device.total_bytes) for device in collector.devices()] == [
        (0, "uuid-a", 196592 << 20),
        (1, "uuid-b", 196592 << 20),
    ]


def test_a_full_sample(collector):
    record = collector.sample(ALL_TIERS)[0]
    assert record["used_bytes"] == 1000 << 20
    assert record["processes"] == [{"pid": 5, "used_bytes": 700 << 20, "type": "compute"}]
    assert record["power_mw"] == 640_000
    assert record["power_limit_mw"] == 750_000
    assert (record["temperature_c"], record["sm_clock_mhz"], record["utilization_pct"]) == (66, 2100, 91)
    assert "memory_utilization_pct" not in record, "N/A is absent, not zero"
    assert record["unsupported"] == {}


def test_the_process_list_is_not_asked_every_second(collector, smi):
    collector.sample(frozenset({Tier.FAST}))
    assert "processes" not in smi.calls


def test_a_limit_in_microwatts(collector, smi):
    smi.power = {"average_socket_power": 300, "power_limit": 750_000_000}
    record = collector.sample(ALL_TIERS)[0]
    assert (record["power_mw"], record["power_limit_mw"]) == (300_000, 750_000)


def test_a_refused_call_is_remembered(collector, smi):
    smi.fails = {"power"}
    for _ in range(5):
        record = collector.sample(ALL_TIERS)[0]
    assert smi.calls.count("power") == 2, "once for each card"
    assert record["unsupported"] == {"power": "AMDSMI_STATUS_NOT_SUPPORTED"}
    assert record["temperature_c"] == 66


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["uuid-a", "uuid-b"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["uuid-b"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["uuid-b"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-b"}, ["uuid-b"]),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, ["uuid-a"]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0"}, []),
    ],
)
def test_visible_devices(collector, environ, expected):
    assert collector.visible(environ) == expected


def test_without_driver_or_library(smi, monkeypatch):
    smi.fails = {"init"}
    assert RocmCollector(smi).probe().code == "no_driver"
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    missing = RocmCollector().probe()
    assert missing.code == "no_library"
    assert "/opt/rocm/share/amd_smi" in missing.help
    smi.fails, smi.cards = set(), []
    assert RocmCollector(smi).probe().code == "no_gpu"


def test_as_an_installed_plugin_in_its_own_process(tmp_path):
    """Entry point, child process and a module named amdsmi, all real but the cards."""
    info = tmp_path / "oomscope_rocm-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oomscope-rocm\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[oomscope.collectors]\nrocm = oomscope_rocm:RocmCollector\n")
    here = Path(__file__)
    (tmp_path / "amdsmi.py").write_text(
        f"import importlib.util as u\nspec = u.spec_from_file_location('fake', {str(here)!r})\n"
        "module = u.module_from_spec(spec)\nspec.loader.exec_module(module)\nfake = module.FakeSmi()\n"
        "def __getattr__(name):\n    return getattr(fake, name)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(here.parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "oomscope.collect.child", "rocm", "--count", "1"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["k"] for record in records] == ["devices", "gpu", "gpu", "tick"]
    assert records[1]["processes"][0]["pid"] == 5
