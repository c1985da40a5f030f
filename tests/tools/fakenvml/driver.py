"""Compiles the fake library once, and drives its state."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .layout import FUNCTIONS, MAX_EVENTS, Gpu, State, header

HERE = Path(__file__).parent
SCENARIOS = HERE.parents[1] / "data" / "nvml"

_DRIVERS = {470: "470.256.02", 535: "535.54.03", 580: "580.65.06"}
#: name, total MiB, held back MiB, compute capability, architecture, power limit mW, NVLinks, ECC
_MODELS: dict[str, tuple[str, int, int, tuple[int, int], int, int, int, bool]] = {
    "H100": ("NVIDIA H100 80GB HBM3", 81559, 551, (9, 0), 9, 700_000, 18, True),
    "A100": ("NVIDIA A100-SXM4-40GB", 40960, 571, (8, 0), 7, 400_000, 12, True),
    "V100": ("Tesla V100-SXM2-16GB", 16384, 300, (7, 0), 5, 300_000, 0, True),
    "RTX4090": ("NVIDIA GeForce RTX 4090", 24564, 400, (8, 9), 8, 450_000, 0, False),
}
_KINDS = {"compute": 1, "graphics": 2, "both": 3, "mps": 4}
_NONE32, _NONE64 = 2**32 - 1, 2**64 - 1


class NoCompilerError(RuntimeError):
    """There is no C compiler; use it as the reason of a skip."""


def compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


def build(folder: Path, driver: int) -> Path:
    """The library for `driver`, compiled into `folder` unless it is there already (0.5 s)."""
    program = compiler()
    if program is None:
        raise NoCompilerError("no C compiler (gcc) for the fake libnvidia-ml")
    source, declarations = HERE / "fake_nvml.c", header()
    key = hashlib.sha256((source.read_text() + declarations + str(driver)).encode()).hexdigest()[:12]
    target = folder / f"driver{driver}-{key}"
    library = target / "libnvidia-ml.so.1"
    if not library.exists():
        target.mkdir(parents=True, exist_ok=True)
        (target / "layout.h").write_text(declarations)
        temporary = target / f"{os.getpid()}.so"
        subprocess.run(
            [program, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", f"-DDRIVER={driver}", f"-I{target}",
             "-fvisibility=hidden", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(temporary), str(source)],
            check=True,
        )  # fmt: skip
        temporary.rename(library)
    return library


class FakeNvml:
    """A machine with GPUs: `fake[0].used = 70 << 30`, `fake.error("DeviceGetPowerUsage", 3)`."""

    def __init__(self, folder: Path, gpus: int = 2, model: str = "H100", driver: int = 580) -> None:
        self.library = build(folder, driver)
        self.path = folder / f"state-{uuid.uuid4().hex}"
        self.path.write_bytes(bytes(ctypes.sizeof(State)))
        self._file = self.path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)
        self.state = State.from_buffer(self._map)
        self.state.ngpu, self.state.cuda = gpus, 13000
        self.state.driver = _DRIVERS[driver].encode()
        self.state.nvml = b"13." + self.state.driver
        for index in range(gpus):
            _fill(self.state.gpus[index], index, model)

    def __getitem__(self, index: int) -> Gpu:
        return self.state.gpus[index]

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment in which a child process finds this library first."""
        env = dict(os.environ if base is None else base)
        before = env.get("LD_LIBRARY_PATH")
        env["LD_LIBRARY_PATH"] = f"{self.library.parent}:{before}" if before else str(self.library.parent)
        env["FAKE_NVML_STATE"] = str(self.path)
        return env

    def load_private_copy(self) -> ctypes.CDLL:
        """The library for this process, in a mapping of its own: a loaded library is never unloaded."""
        copy = self.path.with_suffix(".so")
        shutil.copy(self.library, copy)
        os.environ["FAKE_NVML_STATE"] = str(self.path)
        return ctypes.CDLL(str(copy))

    def error(self, function: str, code: int, gpu: int | None = None) -> None:
        """Makes `function` (without "nvml") return `code` for all devices or one; 0 mends it."""
        holder = self.state if gpu is None else self.state.gpus[gpu]
        holder.err[FUNCTIONS.index(function)] = code

    def calls(self) -> dict[str, int]:
        return {name: count for name, count in zip(FUNCTIONS, self.state.calls, strict=True) if count}

    def processes(self, gpu: int, rows: list[Mapping[str, Any]]) -> None:
        """Rows {"pid", "used_mib" | "used_bytes" | neither (hidden), "kind", "gi"}."""
        device = self.state.gpus[gpu]
        for slot, row in zip(device.procs, rows, strict=False):
            used = row["used_mib"] << 20 if "used_mib" in row else row.get("used_bytes")
            slot.pid, slot.kind = row["pid"], _KINDS[row.get("kind", "compute")]
            slot.used = _NONE64 if used is None else used
            slot.gi, slot.ci = row.get("gi", _NONE32), row.get("ci", _NONE32)
            slot.sm = row.get("sm", 0)
        device.nproc = len(rows)

    def mig(self, gpu: int, sizes_gib: list[int]) -> None:
        """Splits a GPU into instances with these sizes."""
        device = self.state.gpus[gpu]
        device.mig_on, device.nmig = 1, len(sizes_gib)
        for index, size in enumerate(sizes_gib):
            instance = device.migs[index]
            instance.uuid = f"MIG-{gpu:08x}-aaaa-bbbb-cccc-{index:012x}".encode()
            instance.name = device.name + f" MIG 1g.{size}gb".encode()
            instance.gi, instance.ci, instance.slices, instance.mp = 7 + index, 0, 1, 16
            instance.total, instance.used = size << 30, 13 << 20

    def xid(self, gpu: int, code: int) -> None:
        event = self.state.events[self.state.nevents % MAX_EVENTS]
        event.gpu, event.type, event.data = gpu, 8, code
        self.state.nevents += 1

    def apply(self, scenario: Mapping[str, Any], pids: Mapping[str, int] | None = None) -> None:
        """Sets what a scenario file describes; a pid "$NAME" in it is looked up in `pids`."""
        for name, code in scenario.get("errors", {}).items():
            self.error(name, code)
        self.state.init_err = scenario.get("init_error", 0)
        self.state.delay_us = scenario.get("delay_us", 0)
        for index, values in scenario.get("gpus", {}).items():
            self._apply_gpu(int(index), values, pids or {})
        for event in scenario.get("xid", []):
            self.xid(event["gpu"], event["code"])

    def _apply_gpu(self, index: int, values: Mapping[str, Any], pids: Mapping[str, int]) -> None:
        for name, value in values.items():
            if name == "processes":
                self.processes(index, [{**row, "pid": _pid(row["pid"], pids)} for row in value])
            elif name == "errors":
                for function, code in value.items():
                    self.error(function, code, index)
            elif name == "mig_gib":
                self.mig(index, value)
            elif name.endswith("_mib"):
                setattr(self[index], name[:-4], int(value) << 20)
            elif isinstance(value, list):
                getattr(self[index], name)[:] = value
            else:
                setattr(self[index], name, value.encode() if isinstance(value, str) else value)

    def close(self) -> None:
        del self.state
        self._map.close()
        self._file.close()
        self.path.unlink(missing_ok=True)


def load_scenario(name: str) -> dict[str, Any]:
    """A scenario of tests/data/nvml; its README says what may stand in it."""
    value: dict[str, Any] = json.loads((SCENARIOS / f"{name}.json").read_text())
    return value


def from_scenario(folder: Path, name: str, pids: Mapping[str, int] | None = None) -> FakeNvml:
    """A machine as the scenario describes it."""
    scenario = load_scenario(name)
    fake = FakeNvml(
        folder, scenario.get("count", 2), scenario.get("model", "H100"), scenario.get("driver", 580)
    )
    fake.apply(scenario, pids)
    return fake


def _pid(value: int | str, pids: Mapping[str, int]) -> int:
    return pids[value[1:]] if isinstance(value, str) else value


def _fill(gpu: Gpu, index: int, model: str) -> None:
    name, total, held_back, capability, architecture, limit, links, ecc = _MODELS[model]
    gpu.name, gpu.serial = name.encode(), f"165442400{index:04d}".encode()
    gpu.uuid = f"GPU-{index:08x}-1111-2222-3333-{index:012x}".encode()
    gpu.bus, gpu.minor = 0x10 + 0x10 * index, index
    gpu.pci = f"00000000:{gpu.bus:02X}:00.0".encode()
    (gpu.cc_major, gpu.cc_minor), gpu.arch, gpu.cores = capability, architecture, 16896
    gpu.total, gpu.reserved, gpu.used, gpu.bar1_total = total << 20, held_back << 20, 2 << 20, 131072 << 20
    gpu.temp, gpu.temp_slowdown, gpu.power_mw, gpu.power_limit_mw = 34, 87, 71_000, limit
    gpu.clk[:], gpu.maxclk[:] = [345, 345, 2619, 765], [1980, 1980, 2619, 1545]
    gpu.fan = 30 if model == "RTX4090" else _NONE32
    gpu.ecc_on, gpu.nvlinks, gpu.pcie_gen, gpu.pcie_width, gpu.throttle = int(ecc), links, 5, 16, 1
