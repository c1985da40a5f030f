"""What every collector is: one Protocol, typed availability, and the records it produces.

A collector runs in its own child process (`collect.child`), because a call into a broken GPU driver may never
return. Records are plain dictionaries, one JSON line each, in `host/NODE.jsonl` of an attempt. Every one has
`t` (UTC epoch, ns) and `k` (kind); readers skip unknown kinds and fields. A field that the hardware does not
answer is absent.

`gpu`, one per device and sample, only the fields of the tiers that were due::

    gpu                      index on this host (NVML's, PCI bus order); of the parent for a MIG instance
    uuid name bus            identity; `uuid` is the key
    mig_parent_uuid          of a MIG instance; with `gpu_instance`
    state                    "ok" | "lost"
    total_bytes used_bytes free_bytes
    driver_reserved_bytes    held back by the driver; absent with drivers before 510, where it counts as used
    utilization_pct memory_utilization_pct
    processes                [{"pid", "used_bytes"|null, "type": "compute"|"graphics", "gpu_instance"?}]
    power_mw power_limit_mw temperature_c sm_clock_mhz
    throttle                 ["sw_power_cap", …]: why the clock is not at its maximum
    ecc_uncorrected          volatile count since the driver was loaded
    remapped_rows_pending    a row waits for a reset of the GPU
    pcie_tx_kib_s pcie_rx_kib_s nvlink_tx_kib nvlink_rx_kib
    unsupported              {"power": "Not Supported", …}: why a field is absent (slow tier only)

`host`, one per sample::

    mem_total_bytes mem_available_bytes swap_used_bytes
    shm_total_bytes shm_free_bytes    /dev/shm as this process sees it
    memory_pressure_pct      PSI "some avg10"
    oom_kills                of /proc/vmstat: the whole machine, since boot
    cgroup                   {"path", "version", "limit_bytes"|null, "usage_bytes", "oom_kills", "limit_hits"}
    processes                of the watched pids: [{"pid", "start_ticks", "state", "rss_bytes",
                             "rss_shared_bytes", "threads", "cpu_ticks", "private_bytes"?,
                             "shm_total_bytes"?, "shm_free_bytes"?, "cgroup"?}]; private: in no other process, which
                             resident pages of a forked child mostly are not

Others::

    devices      {"collector", "driver"?, "devices": [Device as JSON]}     once at the start
    xid          {"uuid", "gpu", "code", "pid"?, "source": "nvml"|"kernel log", "text"?}
    oom_kill     {"pid", "name", "anon_rss_bytes", "shmem_rss_bytes", "scope": "cgroup"|"machine", "text"}
    fault        {"pid"|null, "name", "text"}   of the kernel log: segfault, trap
    process_end  {"pid", "start_ticks", "status": int|null, "source"}   negative = signal
    collector    {"name", "state", "code", "why"}   a change of state, see `State`
    tick         {"collector", "cost_us", "tiers"}                   on the pipe only: the collector is alive
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

API = 1
"""Version of `Collector`; a plugin that declares another one is refused."""

Record = dict[str, Any]


class Tier(str, enum.Enum):
    """How often a value is worth asking for: what changes fast and is cheap, up to what is slow to read."""

    FAST = "fast"
    MEDIUM = "medium"
    SLOW = "slow"


ALL_TIERS = frozenset(Tier)

#: Seconds between two readings of a tier. NVML's own utilisation window is 1/6 to 1 s (NVML reference,
#: nvmlUtilization_t), so a second is what the fast tier can carry; PCIe counters block 20 ms a call.
PERIOD_S: dict[Tier, float] = {Tier.FAST: 1.0, Tier.MEDIUM: 2.0, Tier.SLOW: 10.0}


class State(str, enum.Enum):
    """What is known about a collector."""

    STARTING = "starting"
    OK = "ok"
    STALE = "stale"
    """It ran, and has been silent for too long: its last values are old."""
    UNAVAILABLE = "unavailable"
    """This machine does not have what it reads; it is not asked again."""
    FAILED = "failed"
    """It broke repeatedly and was given up."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a collector can work here; `code` for programs, `help` (what to do) for people."""

    ok: bool
    code: str = "ok"
    help: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one partition of it."""

    uuid: str
    """Stable key, as the vendor writes it."""
    index: int
    """On this host, in the vendor's enumeration; of the parent for a partition."""
    name: str
    bus: str
    total_bytes: int
    parent_uuid: str | None = None
    """Of a partition (MIG instance)."""
    instance: int | None = None
    """GPU instance id of a partition, which NVML's process list names."""
    state: str = "ok"

    def to_json(self) -> Record:
        return asdict(self)


@runtime_checkable
class Collector(Protocol):
    """A reader of one kind of hardware; entry-point group `oomscope.collectors`.

    Built without arguments in a child process. `probe` first; the others only when it says ok.
    """

    api: int
    name: str

    def probe(self) -> Availability:
        """Can it work here? Below two seconds, never raises."""
        ...

    def devices(self) -> list[Device]: ...

    def sample(self, tiers: frozenset[Tier]) -> list[Record]:
        """Records of the tiers that are due, without `t` (the child adds it)."""
        ...

    def events(self, timeout_s: float) -> list[Record]:
        """Waits at most `timeout_s` for events; called from a thread of its own. [] without any."""
        ...

    def watch(self, pids: Iterable[int]) -> None:
        """The processes that matter to the caller from now on."""
        ...

    def visible(self, environ: Mapping[str, str]) -> list[str]:
        """UUIDs in the order in which a process with this environment numbers its devices."""
        ...

    def close(self) -> None: ...
