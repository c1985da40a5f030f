"""One description of the shared state, from which come the ctypes view for Python and the header for C."""

from __future__ import annotations

import ctypes as c

MAX_GPUS, MAX_PROCS, MAX_MIGS, MAX_EVENTS = 16, 16, 7, 32

#: Functions with a call counter and an injectable error. One name stands for all versions with the same
#: meaning.
_NAMES = """
InitWithFlags Shutdown SystemGetDriverVersion SystemGetNVMLVersion SystemGetCudaDriverVersion
SystemGetProcessName DeviceGetCount DeviceGetHandleByIndex DeviceGetHandleByUUID DeviceGetHandleByPciBusId
DeviceGetIndex DeviceGetMinorNumber DeviceGetName DeviceGetUUID DeviceGetSerial DeviceGetPciInfo
DeviceGetMemoryInfo DeviceGetMemoryInfo_v2 DeviceGetBAR1MemoryInfo DeviceGetUtilizationRates
DeviceGetEncoderUtilization DeviceGetDecoderUtilization DeviceGetTemperature DeviceGetTemperatureV
DeviceGetTemperatureThreshold DeviceGetPowerUsage DeviceGetEnforcedPowerLimit DeviceGetPowerManagementLimit
DeviceGetTotalEnergyConsumption DeviceGetClockInfo DeviceGetMaxClockInfo DeviceGetFanSpeed
DeviceGetPerformanceState DeviceGetCurrentClocksThrottleReasons DeviceGetCurrentClocksEventReasons
DeviceGetEccMode DeviceGetTotalEccErrors DeviceGetMemoryErrorCounter DeviceGetRemappedRows
DeviceGetPcieThroughput DeviceGetCurrPcieLinkGeneration DeviceGetCurrPcieLinkWidth DeviceGetPcieReplayCounter
DeviceGetFieldValues DeviceGetNvLinkState DeviceGetComputeRunningProcesses DeviceGetGraphicsRunningProcesses
DeviceGetMPSComputeRunningProcesses DeviceGetProcessUtilization DeviceGetMigMode DeviceGetMaxMigDeviceCount
DeviceGetMigDeviceHandleByIndex DeviceGetDeviceHandleFromMigDeviceHandle DeviceIsMigDeviceHandle
DeviceGetGpuInstanceId DeviceGetComputeInstanceId DeviceGetAttributes DeviceGetComputeMode
DeviceGetPersistenceMode DeviceGetDisplayActive DeviceGetDisplayMode DeviceGetCudaComputeCapability
DeviceGetArchitecture DeviceGetBrand DeviceGetNumGpuCores DeviceGetVirtualizationMode
DeviceGetSupportedEventTypes DeviceRegisterEvents EventSetCreate EventSetFree EventSetWait
"""
FUNCTIONS = _NAMES.split()

_U32, _U64, _I16 = c.c_uint32, c.c_uint64, c.c_int16


def _text(size: int):
    return c.c_char * size


class Proc(c.Structure):
    """A process on a GPU; `kind` bits: 1 compute, 2 graphics, 4 MPS."""

    _fields_ = [
        ("pid", _U32),
        ("kind", _U32),
        ("used", _U64),
        ("gi", _U32),
        ("ci", _U32),
        ("sm", _U32),
        ("mem", _U32),
    ]


class Mig(c.Structure):
    """A MIG instance."""

    _fields_ = [
        ("uuid", _text(96)), ("name", _text(96)), ("gi", _U32), ("ci", _U32),
        ("total", _U64), ("reserved", _U64), ("used", _U64), ("slices", _U32), ("mp", _U32),
    ]  # fmt: skip


class Event(c.Structure):
    """An event that EventSetWait delivers."""

    _fields_ = [("gpu", _U32), ("gi", _U32), ("type", _U64), ("data", _U64)]


class Gpu(c.Structure):
    """A GPU. Bytes, milliwatts, MHz, degrees Celsius, percent."""

    _fields_ = [
        ("name", _text(96)), ("uuid", _text(96)), ("serial", _text(32)), ("pci", _text(32)),
        ("domain", _U32), ("bus", _U32), ("dev", _U32), ("minor", _U32),
        ("cc_major", _U32), ("cc_minor", _U32), ("arch", _U32), ("cores", _U32),
        ("total", _U64), ("reserved", _U64), ("used", _U64), ("bar1_total", _U64), ("bar1_used", _U64),
        ("util", _U32), ("util_mem", _U32), ("temp", _U32), ("temp_slowdown", _U32),
        ("power_mw", _U32), ("power_limit_mw", _U32), ("energy_mj", _U64),
        ("clk", _U32 * 4), ("maxclk", _U32 * 4), ("fan", _U32), ("pstate", _U32), ("throttle", _U64),
        ("ecc_on", _U32), ("remap_pending", _U32), ("ecc_corr", _U64), ("ecc_uncorr", _U64),
        ("pcie_tx", _U32), ("pcie_rx", _U32), ("pcie_gen", _U32), ("pcie_width", _U32), ("pcie_replay", _U32),
        ("nvlinks", _U32), ("nvl_tx", _U64), ("nvl_rx", _U64),
        ("lost", _U32), ("mig_on", _U32), ("nmig", _U32), ("nproc", _U32),
        ("compute_mode", _U32), ("virt", _U32),
        ("procs", Proc * MAX_PROCS), ("migs", Mig * MAX_MIGS), ("err", _I16 * len(FUNCTIONS)),
    ]  # fmt: skip


class State(c.Structure):
    """Everything. `err` and `calls` are indexed by FUNCTIONS; `hang` blocks every call for ever."""

    _fields_ = [
        ("ngpu", _U32), ("init_err", c.c_int32), ("cuda", _U32), ("delay_us", _U32), ("hang", _U32),
        ("nevents", _U32), ("event_head", _U32), ("crash", _U32), ("driver", _text(80)), ("nvml", _text(80)),
        ("events", Event * MAX_EVENTS), ("calls", _U64 * len(FUNCTIONS)), ("err", _I16 * len(FUNCTIONS)),
        ("gpus", Gpu * MAX_GPUS),
    ]  # fmt: skip


_C_NAMES = {_U32: "uint32_t", _U64: "uint64_t", c.c_int32: "int32_t", _I16: "int16_t", c.c_char: "char"}


def header() -> str:
    """The same structures as C, with their sizes asserted."""
    lines = ["#include <stdint.h>", "enum {"]
    lines += [f"  F_{name}," for name in FUNCTIONS] + ["  F_COUNT", "};"]
    limits = {"GPUS": MAX_GPUS, "PROCS": MAX_PROCS, "MIGS": MAX_MIGS, "EVENTS": MAX_EVENTS}
    lines += [f"#define MAX_{name} {value}" for name, value in limits.items()]
    for structure in (Proc, Mig, Event, Gpu, State):
        lines.append("typedef struct {")
        for name, kind in structure._fields_:
            element = getattr(kind, "_type_", kind) if hasattr(kind, "_length_") else kind
            suffix = f"[{kind._length_}]" if hasattr(kind, "_length_") else ""
            lines.append(f"  {_C_NAMES.get(element) or element.__name__} {name}{suffix};")
        lines.append(f"}} {structure.__name__};")
        lines.append(f'_Static_assert(sizeof({structure.__name__}) == {c.sizeof(structure)}, "layout");')
    return "\n".join(lines) + "\n"
