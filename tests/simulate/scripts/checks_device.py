# ruff: noqa: PT017, BLE001
"""torch.cuda as programs see it."""

import contextlib
import pickle
import threading

import torch
from checks import run_all

MIB = 1 << 20


def check_properties():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
    properties = torch.cuda.get_device_properties(0)
    assert properties.multi_processor_count == 132
    assert properties.total_memory > 79 << 30
    assert torch.cuda.is_bf16_supported()
    assert torch.version.cuda


def check_wrong_device_ordinal():
    try:
        torch.cuda.set_device(7)
    except torch.AcceleratorError as error:
        assert "invalid device ordinal" in str(error)
    else:
        raise AssertionError("device 7 exists")


def check_memory_statistics():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 3 * MIB
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    del tensor
    assert torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before
    assert torch.cuda.memory_stats()["num_ooms"] == 0
    assert "CUDA OOMs" in torch.cuda.memory_summary()
    torch.cuda.reset_accumulated_memory_stats()


def check_mem_get_info_and_fraction():
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    torch.cuda.set_per_process_memory_fraction(0.001)
    try:
        torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        assert "allowed" in str(error)
    else:
        raise AssertionError("the fraction did not hold")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def check_small_and_large_pools():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    small = torch.empty(100, device="cuda")
    large = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    grown = torch.cuda.memory_reserved() - before
    assert grown in (20 * MIB, 22 * MIB), grown
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.small_pool.current"] >= 512
    assert stats["allocated_bytes.large_pool.current"] >= 2 * MIB
    del small, large


def check_streams_and_events():
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        tensor = torch.ones(10, device="cuda")
        event.record()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.current_stream().wait_stream(stream)
    stream.synchronize()
    torch.cuda.synchronize()
    tensor.record_stream(torch.cuda.current_stream())
    end = torch.cuda.Event(enable_timing=True)
    end.record()
    assert event.elapsed_time(end) > 0


def check_record_stream_defers_the_free():
    torch.cuda.memory._record_memory_history(max_entries=1000)
    tensor = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    tensor.record_stream(torch.cuda.Stream())
    address = tensor.data_ptr()
    del tensor
    blocks = [b for s in torch.cuda.memory_snapshot() for b in s["blocks"] if b["address"] == address]
    assert blocks[0]["state"] == "active_pending_free", blocks
    torch.cuda.synchronize()
    blocks = [b for s in torch.cuda.memory_snapshot() for b in s["blocks"] if b["address"] == address]
    assert not blocks or blocks[0]["state"] == "inactive", blocks
    torch.cuda.memory._record_memory_history(enabled=None)


def check_streams_have_their_own_cache():
    torch.cuda.empty_cache()
    tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    del tensor
    before = torch.cuda.memory_reserved()
    with torch.cuda.stream(torch.cuda.Stream()):
        other = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - before == 30 * MIB
    del other


def check_device_contexts():
    with torch.cuda.device(0), torch.device("cuda"):
        assert torch.zeros(3).device == torch.device("cuda", 0)
    torch.set_default_device("cuda")
    assert torch.ones(2).is_cuda
    torch.set_default_device(None)


def check_ways_to_move():
    x = torch.ones(3)
    assert x.to(0).is_cuda
    assert x.cuda(0).is_cuda
    assert x.to("cuda:0").is_cuda
    assert x.to(x.cuda()).is_cuda
    assert torch.cuda.FloatTensor([1, 2]).is_cuda
    assert x.cuda().cpu().tolist() == [1, 1, 1]


def check_out_of_memory_is_catchable():
    sizes = []
    count = 200_000
    while True:
        try:
            tensor = torch.empty(count, 200_000, device="cuda")
            break
        except torch.cuda.OutOfMemoryError as error:
            assert "CUDA out of memory. Tried to allocate" in str(error)
            assert "has a total capacity of 79.10 GiB" in str(error)
            torch.cuda.empty_cache()
            sizes.append(count)
            count //= 2
    assert sizes == [200_000]
    assert tensor.shape[0] == 100_000
    assert torch.cuda.memory_stats()["num_ooms"] >= 1
    del tensor
    torch.cuda.empty_cache()


def check_out_of_memory_in_backward():
    class Hungry(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return torch.empty(1 << 40, device="cuda")

    x = torch.ones(4, device="cuda", requires_grad=True)
    try:
        Hungry.apply(x).sum().backward()
    except torch.OutOfMemoryError as error:
        assert "4096.00 GiB" in str(error)
    else:
        raise AssertionError("no error")
    (x * 2).sum().backward()
    assert x.grad is not None


def check_observers_see_the_state_before_unwinding():
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(
        lambda device, wanted, total, free: seen.append(
            (device, wanted, total, free, torch.cuda.memory_allocated(), torch.cuda.memory._snapshot())
        )
    )
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
    device, wanted, total, free, allocated, snapshot = seen[0]
    assert (device, wanted) == (0, 100 << 30)
    assert free < total
    assert allocated >= 1 << 30
    assert any(block["size"] == 1 << 30 for each in snapshot["segments"] for block in each["blocks"])
    del held


def check_history_has_python_frames():
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    loss = (weight @ weight).relu().sum()
    loss.backward()
    rows = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    assert {row["action"] for row in rows} >= {"alloc", "free_requested", "free_completed"}
    first = next(row for row in rows if row["action"] == "alloc")["frames"][0]
    assert first["filename"] == __file__
    assert first["name"] == "check_history_has_python_frames"
    assert isinstance(first["line"], int)
    grad = next(row for row in rows if row["addr"] == weight.grad.data_ptr() and row["action"] == "alloc")
    assert any(frame["name"] == "check_history_has_python_frames" for frame in grad["frames"])


def check_history_ring_is_bounded():
    torch.cuda.memory._record_memory_history(max_entries=20)
    for _ in range(50):
        torch.empty(10, device="cuda")
    assert len(torch.cuda.memory._snapshot()["device_traces"][0]) == 20
    torch.cuda.memory._record_memory_history(enabled=None)


def check_snapshot_is_read_by_torchs_own_viewer():
    from torch.cuda import _memory_viz

    torch.cuda.memory._record_memory_history(max_entries=1000)
    held = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (1, 3, 30)]
    del held[1]
    snapshot = pickle.loads(pickle.dumps(torch.cuda.memory._snapshot()))
    torch.cuda.memory._record_memory_history(enabled=None)
    assert "segsum" in dir(_memory_viz)
    assert "segments: " in _memory_viz.segsum(snapshot)
    assert _memory_viz.trace(snapshot)
    assert _memory_viz.trace_plot(snapshot)
    assert _memory_viz.segment_plot(snapshot)
    assert snapshot["allocator_settings"]["expandable_segments"] is False


def check_cuda_graph_uses_a_private_pool():
    x = torch.ones(1000, 1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        y = x @ x
    graph.replay()
    assert not torch.cuda.is_current_stream_capturing()
    assert graph.pool() in [segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()]
    del y


def check_memory_pool():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.id in [segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()]
    del tensor


def check_accelerator():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "cuda"
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
    assert torch.accelerator.max_memory_reserved() == torch.cuda.max_memory_reserved()


def check_random_state():
    torch.manual_seed(1)
    torch.cuda.manual_seed_all(1)
    generator = torch.Generator(device="cuda").manual_seed(3)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    permutation = torch.randperm(5, device="cuda", generator=generator)
    assert sorted(permutation.tolist()) == [0, 1, 2, 3, 4]


def check_addresses():
    x = torch.empty(8, 8, device="cuda")
    assert x.data_ptr() == x.untyped_storage().data_ptr() > 0
    assert x[1].data_ptr() - x.data_ptr() == 8 * 4
    assert x.data_ptr() != torch.empty(8, 8, device="cuda").data_ptr()


def check_snapshots_from_another_thread():
    failures, done = [], threading.Event()

    def look():
        while not done.is_set():
            try:
                torch.cuda.memory._snapshot()
                torch.cuda.memory_stats()
            except Exception as problem:
                failures.append(repr(problem))
                return

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(300):
        held = [torch.empty(100 + 50 * i, 1000, device="cuda") for i in range(10)]
        del held
    done.set()
    thread.join()
    assert not failures, failures


def check_threads_are_simulated():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(1000, device="cuda").sum().device.type))
    thread.start()
    thread.join()
    assert seen == ["cuda"]


def check_profiler_and_nvtx():
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("x"):
        torch.ones(10, device="cuda").sum()
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()
    assert any(event.key == "x" for event in profile.key_averages())


run_all(globals())
