"""Peaks per step must not take the script's own peaks away."""

import copy
import types

from hypothesis import given
from hypothesis import strategies as st

from oomscope.agent.readings import DeviceMemory, DevicePeaks, HostMemory


class Allocator:
    """Counts like torch's allocator, in torch's nested form."""

    def __init__(self):
        self.current = self.peak = 0

    def set(self, value):
        self.current = value
        self.peak = max(self.peak, value)

    def stats(self, device):
        pool = {"current": self.current, "peak": self.peak, "allocated": 0, "freed": 0}
        return {
            "allocated_bytes": {"all": dict(pool), "large_pool": dict(pool)},
            "reserved_bytes": {"all": dict(pool)},
            "oversize_allocations": dict(pool),
            "num_alloc_retries": 2,
            "num_ooms": 0,
        }

    def reset(self, device):
        self.peak = self.current


def backend(allocator):
    return types.SimpleNamespace(
        _cuda_memoryStats=allocator.stats,
        _cuda_resetPeakMemoryStats=allocator.reset,
        _accelerator_getDeviceStats=allocator.stats,
        _accelerator_resetPeakStats=allocator.reset,
    )


actions = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 100)),
        st.tuples(st.sampled_from(["user reads", "user resets", "interval", "split"]), st.integers(0, 1)),
    ),
    max_size=40,
)


@given(actions)
def test_the_script_sees_the_peaks_it_would_see_without_us(steps):
    watched, plain = Allocator(), Allocator()
    torch_c = backend(watched)
    peaks = DevicePeaks(torch_c)
    assert peaks.install()
    since_interval = [0]
    for action, value in steps:
        if action == "set":
            watched.set(value)
            plain.set(value)
            since_interval.append(value)
        elif action == "user reads":
            seen = torch_c._cuda_memoryStats(0)
            assert seen == plain.stats(0)
            assert torch_c._accelerator_getDeviceStats(0) == seen
        elif action == "user resets":
            reset = torch_c._accelerator_resetPeakStats if value else torch_c._cuda_resetPeakMemoryStats
            reset(0)
            plain.reset(0)
        elif action == "split":
            peaks.split(0)
        else:
            assert peaks.interval(0)["allocated_bytes.all"] == max(since_interval)
            since_interval = [watched.current]


def test_without_counters_nothing_is_wrapped():
    empty = types.SimpleNamespace()
    assert not DevicePeaks(empty).install()
    assert vars(empty) == {}


class Torch:
    def __init__(self, allocator, capturing=False):
        self.allocator = allocator
        self._C = backend(allocator)
        self._C._cuda_isCurrentStreamCapturing = lambda: capturing
        self.asked = 0
        self.cuda = types.SimpleNamespace(
            is_initialized=lambda: True, current_device=lambda: 0, mem_get_info=self.mem_get_info
        )

    def mem_get_info(self, device):
        self.asked += 1
        return 10, 100


def test_a_step_has_its_own_peak():
    allocator = Allocator()
    memory = DeviceMemory(Torch(allocator))
    allocator.set(80)
    allocator.set(10)
    assert memory.step()["peak_allocated_bytes"] == 80
    allocator.set(30)
    allocator.set(10)
    reading = memory.step()
    assert reading["peak_allocated_bytes"] == 30
    assert reading["allocated_bytes"] == 10
    assert reading["retries"] == 2
    assert memory.driver() == (10, 100)


def test_the_driver_is_left_alone_during_a_graph_capture():
    torch = Torch(Allocator(), capturing=True)
    torch.allocator.set(5)
    DeviceMemory(torch).step()
    assert torch.asked == 0


def test_the_driver_is_left_alone_until_there_is_a_context():
    torch = Torch(Allocator())
    memory = DeviceMemory(torch)
    memory.notice()
    assert torch.asked == 0, "it would create a context on whatever device is current"
    torch.allocator.set(5)
    memory.notice()
    assert torch.asked == 1


def test_reading_never_changes_what_it_reads():
    allocator = Allocator()
    memory = DeviceMemory(Torch(allocator))
    allocator.set(50)
    memory.notice()
    before = copy.copy(vars(allocator))
    memory.now()
    memory.allocated_bytes()
    assert vars(allocator) == before


def test_host_memory_is_plausible():
    host = HostMemory()
    rss = host.rss_bytes()
    assert 1 << 20 < rss <= host.peak_rss_bytes
    assert host.read_high_water() >= rss
    host.close()
    assert host.rss_bytes() == 0
