# ruff: noqa: E501  # the texts are verbatim
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomscope.core.diagnosis.log import scan_text
from oomscope.core.diagnosis.message import OomMessage
from oomscope.core.diagnosis.messages import parse_text
from oomscope.units import GIB, MIB

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 1 has a total capacity of 24.00 GiB of which "
    "256.00 MiB is free. Process 4711 has 1.50 GiB memory in use. Including non-PyTorch memory, this process has 22.25 GiB memory in "
    "use. 23.00 GiB allowed; Of the allocated memory 20.00 GiB is allocated by PyTorch, with 64.00 MiB allocated in private pools "
    "(e.g., CUDA Graphs), and 1.75 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 8.00 GiB total capacity; 5.00 GiB already allocated; "
    "512.00 MiB free; 6.00 GiB allowed; 7.00 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
ASYNC = """torch.OutOfMemoryError: Allocation on device 2 would exceed allowed memory. (out of memory)
Currently allocated     : 4.25 GiB
Requested               : 2.00 GiB
Device limit            : 8.00 GiB
Free (according to CUDA): 512.00 MiB
PyTorch limit (set by user-supplied memory fraction)
                        : 17179869184.00 GiB"""
FIELDS = {
    "tried": "tried_bytes", "capacity": "capacity_bytes", "free": "free_bytes", "allocated": "allocated_bytes",
    "reserved": "reserved_bytes", "reserved_unallocated": "reserved_unallocated_bytes", "this_process": "this_process_bytes",
    "private_pools": "private_pools_bytes", "mps_allocated": "mps_allocated_bytes", "mps_other": "mps_other_bytes",
    "mps_max": "mps_max_bytes",
}  # fmt: skip


def one(text: str) -> OomMessage:
    found = parse_text(text)
    assert len(found) == 1, found
    return found[0]


def test_every_collected_text_is_read(cases):
    for row in cases("oom_messages.jsonl"):
        got = one(row["text"]).to_json()
        expected = {FIELDS.get(name, name): value for name, value in row["expect"].items()}
        if "nccl_bytes" in expected:
            expected["nccl_bytes"] = int(expected["nccl_bytes"])
        if "other_processes" in expected:
            expected["other_processes"] = [
                {"pid": pid, "bytes": count} for pid, count in expected["other_processes"]
            ]
        assert {name: got[name] for name in expected} == expected, row["text"]
        assert got["kind"] == row["kind"], row["text"]
        if row.get("expect_tags") is not None:
            assert got["tags"] == row["expect_tags"], row["text"]


def test_the_text_of_today():
    m = one(NEW)
    assert (m.kind, m.backend, m.gpu, m.exception) == ("cuda_oom", "cuda", 1, "torch.OutOfMemoryError")
    assert m.tried_bytes == 512 * MIB
    assert m.capacity_bytes == 24 * GIB
    assert m.free_bytes == 256 * MIB
    assert m.allocated_bytes == 20 * GIB
    assert m.reserved_bytes is None
    assert m.reserved_unallocated_bytes == 1792 * MIB
    assert m.this_process_bytes == 22.25 * GIB
    assert m.other_processes == ((4711, 1536 * MIB),)
    assert m.private_pools_bytes == 64 * MIB
    assert m.allowed_bytes == 23 * GIB
    assert m.conf_var == "PYTORCH_ALLOC_CONF"


def test_the_text_before_2_1():
    m = one(OLD)
    assert m.reserved_bytes == 7 * GIB
    assert m.allowed_bytes == 6 * GIB
    assert m.reserved_unallocated_bytes is None
    assert m.tags == ("defragmentation_major",)


def test_the_asynchronous_allocator():
    m = one(ASYNC)
    assert (m.kind, m.gpu) == ("cuda_oom", 2)
    assert (m.tried_bytes, m.capacity_bytes, m.free_bytes) == (2 * GIB, 8 * GIB, GIB // 2)
    assert m.allocated_bytes == 4.25 * GIB


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RuntimeError: CUDA out of memory.", "cuda_oom"),
        ("torch.OutOfMemoryError: Allocation on device", "cuda_oom"),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.", "cuda_oom_1eb"),
        ("RuntimeError: HIP error: out of memory", "hip_error_oom"),
        ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "cuda_error_oom"),
        ("RuntimeError: CUDA driver error: out of memory", "cuda_driver_oom"),
        ("MPS backend out of memory (MPS allocated: 8.00 GiB, other allocations: 1.00 MiB, max allowed: 9.00 GiB). Tried to allocate 2.00 GiB on shared pool.", "mps_oom"),
        ("NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 32.00 GiB total capacity; 30.00 GiB already allocated; 1.00 MiB free; 31.00 GiB reserved in total by PyTorch)", "npu_oom"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "cublas_maybe_oom"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cudnn_alloc"),
        ("RuntimeError: Unable to find a valid cuDNN algorithm to run convolution", "cudnn_maybe_oom"),
        ("RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED", "cusolver_alloc"),
        ("RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at \"../c10/cuda/CUDACachingAllocator.cpp\":838", "nvml_assert"),
        ("node1:12:34 [0] NCCL INFO x\nnode1:12:34 [0] include/alloc.h:99 NCCL WARN Failed to CUDA calloc async 608 bytes", "nccl_oom"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1048576 bytes.", "cpu_alloc"),
        ("RuntimeError: $ Torch: not enough memory: you tried to allocate 4GB. Buy new RAM!", "cpu_alloc"),
        ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 5.00 GiB for an array with shape (1, 2) and data type float32", "host_alloc"),
        ("OSError: [Errno 12] Cannot allocate memory", "host_alloc"),
        ("MemoryError", "host_alloc"),
        ("OSError: [WinError 1455] The paging file is too small for this operation to complete", "host_commit"),
        ("RuntimeError: unable to open shared memory object </torch_12_34> in read-write mode: No space left on device (28)", "shm"),
        ("exitcode  : -7 (pid: 44)", "shm"),
        ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).", "shm"),
        ("RuntimeError: Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) -5 (PI_ERROR_OUT_OF_RESOURCES)", "xpu_oom"),
        ("RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", "xpu_oom"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "cudnn_maybe_oom"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacty of 23.69 GiB of which 1.00 GiB is free.", "cuda_oom"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=8.0. Some of the step tasks have been OOM Killed.", "slurm_oom"),
        ("[123.4] Memory cgroup out of memory: Killed process 77 (python) total-vm:9kB", "cgroup_oom"),
        ("    Reason:       OOMKilled", "cgroup_oom"),
        ("[123.4] Out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:8kB", "kernel_oom"),
        ("Killed", "host_kill"),
        ("./run.sh: line 3: 12345 Killed                  python train.py", "host_kill"),
        ("returned non-zero exit status 247.", "host_kill"),
        ("[launch.py:321:sigkill_handler] ['python'] exits with return code = -9", "host_kill"),
        ("torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL", "host_kill"),
        ("RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly", "host_maybe_kill"),
    ],
)  # fmt: skip
def test_other_forms(text, kind):
    assert one(text).kind == kind


@pytest.mark.parametrize(
    "text",
    [
        "",
        "If you run out of memory, lower the batch size.",
        "Tip: on 'CUDA out of memory' try --batch-size 4.",
        "    raise RuntimeError('CUDA out of memory. Tried to allocate {} GiB')",
        "    if 'out of memory' in str(error):",
        "except torch.cuda.OutOfMemoryError:",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376.",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: device-side assert triggered",
        "Process finished with exit code 1",
        "Process finished with exit code 1370",
        'State: {"OOMKilled": false}',
        "Killed zombie connections: 3",
        "loss 0.9 memory 22.1 GiB free 1.2 GiB",
    ],
)
def test_speaking_of_it_is_not_having_it(text):
    assert parse_text(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "[rank7]: torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:275, unhandled cuda error\n[rank7]: Last error:\n"
        "[rank7]: Cuda failure 1 'invalid argument'",
        "exitcode  : -11 (pid: 5277) (SIGSEGV)",
        "RuntimeError: DataLoader worker (pid 12) is killed by signal: Segmentation fault.",
    ],
)
def test_the_same_envelope_with_another_content_raises_no_alarm(text):
    assert not one(text).is_oom


@pytest.mark.parametrize("width", [23, 41, 80, 120])
@pytest.mark.parametrize("text", [NEW, OLD, ASYNC])
def test_wrapping_changes_nothing(text, width):
    wrapped = "\n".join(text[at : at + width] for at in range(0, len(text), width))
    assert numbers(one(wrapped)) == numbers(one(text))


def numbers(message: OomMessage) -> dict[str, object]:
    return {
        k: v
        for k, v in message.to_json().items()
        if k not in ("line", "text", "exception", "frames", "time_s", "is_warning", "before")
    }


@pytest.mark.parametrize(
    "decorate",
    [
        lambda t: f"\x1b[31m{t[:30]}\x1b[0m{t[30:]}\x1b[0m",
        lambda t: t.replace("CUDA", "\\u001b[0;31mCUDA\\u001b[0m"),
        lambda t: f"InstantiationException({t!r})",
        lambda t: "\n".join(f"│ {t[at : at + 60]:<60} │" for at in range(0, len(t), 60)),
        lambda t: "\n".join(f"> {t[at : at + 60]}" for at in range(0, len(t), 60)),
        lambda t: f"2026-01-02 03:04:05,678 - trainer - ERROR - {t}",
        lambda t: t.replace(". ", ".\\n"),
    ],
)
def test_decoration_changes_nothing(decorate):
    assert numbers(one(decorate(NEW))) == numbers(one(NEW))


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[rank2]: ", 2), ("[rank 12] ", 12), ("[rank: 1] ", 1), ("[default3]:[rank11]: ", 11), ("3: ", 3), ("[1,5]<stderr>:", 5),
        ("Rank 4: ", 4), ("", None),
    ],
)  # fmt: skip
def test_rank_prefixes(prefix, rank):
    assert one(prefix + NEW).rank == rank
    assert numbers(one(prefix + NEW)) | {"rank": None, "local_rank": None} == numbers(one(NEW))


def test_lines_of_two_ranks_may_be_mixed():
    words = [
        NEW.replace("GPU 1", f"GPU {gpu}").replace("512.00 MiB.", f"{gpu + 1}.00 MiB.") for gpu in (0, 1)
    ]
    halves = [(text[:150], text[150:]) for text in words]
    log = "\n".join(f"[rank{r}]: {halves[r][part]}" for part in (0, 1) for r in (0, 1))
    assert [(m.rank, m.gpu, m.tried_bytes) for m in parse_text(log)] == [(0, 0, MIB), (1, 1, 2 * MIB)]


def test_a_cut_text_gives_what_it_has():
    m = one(NEW[: NEW.index("Process")])
    assert (m.tried_bytes, m.capacity_bytes, m.free_bytes, m.allocated_bytes) == (
        512 * MIB,
        24 * GIB,
        256 * MIB,
        None,
    )
    assert m.tags == ()


def test_impossible_numbers_are_kept_and_prove_nothing():
    m = one(NEW.replace("22.25 GiB", "17179869184.00 GiB"))
    assert m.this_process_bytes == 17179869184 * GIB
    assert "foreign_memory" not in m.tags


def test_a_swallowed_text_is_marked():
    text = (
        "/x/_state_dict_utils.py:1: UserWarning: Failed to clone() tensor with name lm_head.weight on rank 1. Error: CUDA out of memory. "
        "Tried to allocate 502.00 MiB (GPU 1; 39.59 GiB total capacity; 35.54 GiB already allocated; 276.19 MiB free; 37.22 GiB "
        "reserved in total by PyTorch)"
    )
    m = one(text)
    assert m.is_warning
    assert m.rank == 1
    assert not one(NEW).is_warning


def test_the_frames_above():
    text = (
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 88, in main\n    loss.backward()\n'
        '  File "/x/torch/_tensor.py", line 5, in backward\n    torch.autograd.backward(\n' + NEW
    )
    frames = one(text).frames
    assert [(f.file, f.line, f.function, f.source) for f in frames] == [
        ("/home/u/train.py", 88, "main", "loss.backward()"),
        ("/x/torch/_tensor.py", 5, "backward", "torch.autograd.backward("),
    ]


def test_the_frames_of_rich_and_of_a_notebook():
    rich = (
        "Traceback (most recent call last)\n│ /home/u/train.py:61 in main │\n│   60 │   x = 1 │\n│ ❱ 61 │   losses.append(loss) │\n"
        + OLD
    )
    assert [(f.line, f.function, f.source) for f in one(rich).frames] == [(61, "main", "losses.append(loss)")]
    cell = "Traceback (most recent call last)\nCell In[3], line 7\n      7 y = model(x)\n" + OLD
    assert [(f.file, f.line) for f in one(cell).frames] == [("Cell In[3]", 7)]


def test_the_echo_of_an_event_is_one_event():
    log = f"ERROR {NEW}\n[rank1]: {NEW}\n"
    m = one(log)
    assert m.rank == 1
    killed = (
        "failed (exitcode: -9) local_rank: 3 (pid: 55) of binary: python\nRoot Cause (first observed failure):\n[0]:\n"
        "  rank      : 11 (local_rank: 3)\n  exitcode  : -9 (pid: 55)\n  traceback : Signal 9 (SIGKILL) received by PID 55"
    )
    assert [(m.kind, m.rank, m.local_rank, m.exitcode) for m in parse_text(killed)] == [
        ("elastic_sigkill", 11, 3, -9)
    ]


def test_old_errors_came_in_two_lines():
    text = (
        "THCudaCheck FAIL file=/pytorch/THCStorage.cu line=58 error=2 : out of memory\nTraceback (most recent call last):\n"
        '  File "a.py", line 1, in f\nRuntimeError: cuda runtime error (2) : out of memory at /pytorch/THCStorage.cu:58'
    )
    assert one(text).kind == "cuda_oom_short"


@given(st.text(max_size=300), st.text(max_size=300))
@settings(max_examples=60, deadline=None)
def test_any_text_around_it(before, after):
    found = [m for m in parse_text(f"{before}\n{NEW}\n{after}") if m.backend == "cuda"]
    assert [m.tried_bytes for m in found] == [512 * MIB]


@given(st.integers(0, len(NEW)))
@settings(max_examples=60, deadline=None)
def test_any_cut_is_read(length):
    assert len(parse_text(NEW[:length])) <= 1


@given(st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_read(data):
    scan_text(data.decode("latin-1"))


def test_a_frame_without_source_and_an_impossible_date():
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n  File "b.py", line 2, in g\n    h()\n'
        "2026-99-99 10:00:00 " + NEW
    )
    m = one(text)
    assert [f.source for f in m.frames] == ["", "h()"]
    assert m.time_s is None
    assert one("E0325 20:57:27.620000 99 " + NEW).time_s == pytest.approx((3 * 31 + 25) * 86400 + 75447.62)


def test_the_richer_echo_is_kept():
    swallowed = "UserWarning: Failed to clone() tensor x. " + NEW.replace("torch.OutOfMemoryError: ", "")
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
    m = one(f"{swallowed}\n{trace}{NEW}")
    assert not m.is_warning
    assert len(m.frames) == 1
    killed = one(
        "Signal 9 (SIGKILL) received by PID 5\nfailed (exitcode: -9) local_rank: 0 (pid: 5) of binary: p"
    )
    assert (killed.kind, killed.exitcode) == ("elastic_sigkill", -9)


def test_local_ranks_make_streams_too():
    m = one(f"[default1]: {NEW[:100]}\n[default1]: {NEW[100:]}")
    assert (m.local_rank, m.allocated_bytes) == (1, 20 * GIB)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "RuntimeError: /build/include/tensorview/tensor.h 151\ncuda failed with error 2 out of memory. use CUDA_LAUNCH_BLOCKING=1",
            {"kind": "cuda_error_oom"},
        ),
        ("CUDA Error: out of memory", {"kind": "cuda_error_oom"}),
        ("CUDA error (src/kernel.cu:12): out of memory", {"kind": "cuda_error_oom"}),
        (
            "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes (allocated so far: 2,147,483,648 bytes).",
            {"kind": "cuda_error_oom", "tried_bytes": GIB},
        ),
        (
            "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: /rmm/mr/device/cuda_memory_resource.hpp:62: cudaErrorMemoryAllocation out of memory",
            {"kind": "cuda_error_oom"},
        ),
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the node was 60.5GB / 62.8GB",
            {"kind": "host_kill"},
        ),
        (
            "(RayTrainWorker pid=4711, ip=10.0.0.3) RuntimeError: NPU out of memory. Tried to allocate 36.00 MiB (NPU 3; 60.00 GiB total capacity; "
            "59.00 GiB already allocated; 59.00 GiB current active; 12.00 MiB free; 59.50 GiB reserved in total by PyTorch) [repeated 7x across cluster]",
            {"kind": "npu_oom", "gpu": 3, "free_bytes": 12 * MIB, "reserved_bytes": round(59.5 * GIB)},
        ),
        (
            "!!! Exception during processing !!! HIP out of memory. Tried to allocate 30.00 GiB. GPU 0 has a total capacity of 20.00 GiB of which "
            "12.00 GiB is free. Of the allocated memory 5.00 GiB is allocated by PyTorch, and 256.00 MiB is reserved by PyTorch but unallocated.",
            {"kind": "hip_oom", "tried_bytes": 30 * GIB, "reserved_unallocated_bytes": 256 * MIB},
        ),
        (
            '{"level":"error","rank":3,"msg":"CUDA out of memory. Tried to allocate 1.50 GiB. GPU 3 has a total capacity of 80.00 GiB of which 512.00 MiB is free."}',
            {"kind": "cuda_oom", "gpu": 3, "free_bytes": 512 * MIB},
        ),
    ],
)
def test_texts_of_other_libraries_and_wrappers(text, expected):
    got = one(text).to_json()
    assert {name: got[name] for name in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        "slurmstepd: error: *** STEP 12.0 ON node1 CANCELLED AT 2024-01-01T00:00:00 DUE TO TIME LIMIT ***",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
    ],
)
def test_what_only_sounds_like_a_shortage_is_silent(text):
    assert parse_text(text) == []
