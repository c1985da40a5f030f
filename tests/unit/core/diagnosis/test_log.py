# ruff: noqa: E501  # the texts are verbatim
import json

import pytest

from oomscope.core.diagnosis import log
from oomscope.core.diagnosis.log import scan, scan_text
from oomscope.core.diagnosis.messages_forms import FORMS

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {mib}.00 MiB. GPU 0 has a total capacity of {cap}.00 GiB of which 1.00 "
    "MiB is free. Including non-PyTorch memory, this process has 23.00 GiB memory in use. Of the allocated memory 22.00 GiB is "
    "allocated by PyTorch, and {mib}.50 MiB is reserved by PyTorch but unallocated."
)


def oom(mib: int = 20, cap: int = 24) -> str:
    return OOM.format(mib=mib, cap=cap)


STEP = "2026-01-01 10:00:00,000 INFO step 12 loss 3.21 memory 20.1 GiB\n"


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
def test_chunks_change_nothing(size):
    text = (
        STEP * 50
        + 'Traceback (most recent call last):\n  File "t.py", line 3, in f\n    g()\n[rank1]: '
        + oom()
        + "\n"
        + STEP * 50
    )
    data = text.encode()
    reading = scan(data[at : at + size] for at in range(0, len(data), size))
    assert [(m.line, m.rank, m.tried_bytes) for m in reading.messages] == [(54, 1, 20 << 20)]
    assert reading.lines == 104
    assert reading.bytes_read == len(data)


def test_a_big_log_is_streamed(monkeypatch):
    monkeypatch.setattr(log, "_BLOCK", 1 << 14)
    monkeypatch.setattr(log, "_BEFORE", 1 << 12)
    monkeypatch.setattr(log, "_SMALL", 0)
    pieces = []
    for mib in (1, 2, 3):
        pieces += [STEP] * 2000 + [oom(mib) + "\n"]
    scanner = log.LogScanner()
    held = 0
    for piece in pieces:
        scanner.feed(piece.encode())
        held = max(held, len(scanner._buffer))
    reading = scanner.finish()
    assert [m.line for m in reading.messages] == [2001, 4002, 6003]
    assert [m.tried_bytes for m in reading.messages] == [1 << 20, 2 << 20, 3 << 20]
    assert held < (1 << 16)


def test_an_endless_line_does_not_fill_memory(monkeypatch):
    monkeypatch.setattr(log, "_BLOCK", 1 << 12)
    scanner = log.LogScanner()
    for _ in range(64):
        scanner.feed(b"x" * 4096)
    scanner.feed(oom().encode())
    assert len(scanner._buffer) < 1 << 17
    assert len(scanner.finish().messages) == 1


def test_a_text_wrapped_at_the_border_of_two_blocks(monkeypatch):
    monkeypatch.setattr(log, "_BLOCK", 1 << 12)
    monkeypatch.setattr(log, "_SMALL", 0)
    for shift in range(0, 4096, 97):
        data = (STEP * 400)[: 20000 + shift].encode() + b"\n" + oom().encode() + b"\n" + STEP.encode() * 300
        reading = scan(data[at : at + 1000] for at in range(0, len(data), 1000))
        assert [m.tried_bytes for m in reading.messages] == [20 << 20], shift


def test_every_collected_text_is_found_in_a_long_log(cases, monkeypatch):
    monkeypatch.setattr(log, "_SMALL", 0)
    for row in cases("oom_messages.jsonl"):
        found = [m.kind for m in scan_text(f"{STEP * 2000}{row['text']}\n{STEP * 2000}").messages]
        # What is no memory problem may stay unnoticed in a long log.
        assert found == [row["kind"]] or row["kind"] == "nccl_other", row["text"]


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
        "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at x",
        "torch.OutOfMemoryError: Allocation on device",
        "NCCL WARN Failed to CUDA calloc async 608 bytes",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 5.00 GiB for an array with shape (1, 2)",
        "OSError: [Errno 12] Cannot allocate memory",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "OSError: [WinError 1455] The paging file is too small for this operation to complete",
        "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: No space left on device (28)",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=8.0.",
        "[1.2] Memory cgroup out of memory: Killed process 77 (python)",
        "    Reason:       OOMKilled",
        "exits with return code = -9",
        "returned non-zero exit status 247.",
        "RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly",
        "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    ],
)
def test_other_forms_are_found_in_a_long_log(text, monkeypatch):
    monkeypatch.setattr(log, "_SMALL", 0)
    assert len(scan_text(f"{STEP * 2000}{text}\n{STEP * 2000}").messages) == 1


FORM_SAMPLES = [
    "RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.",
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB",
    "RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate 5.00 GiB",
    "RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "RuntimeError: MPS backend out of memory (MPS allocated: 8.00 GiB, max allowed: 9.00 GiB)",
    "Allocation on device 2 would exceed allowed memory. (out of memory)",
    "torch.OutOfMemoryError: Allocation on device",
    "cuda runtime error (2) : out of memory at x.cu:66",
    "RuntimeError: HIP driver error: hipErrorOutOfMemory",
    "RuntimeError: CUDA driver error: 2",
    "pycuda: CUDA_ERROR_OUT_OF_MEMORY",
    "RuntimeError: HIP error: hipErrorOutOfMemory",
    "RuntimeError: CUDA error: cudaErrorMemoryAllocation",
    "Error: cuda failed with error 2: out of memory",
    "MemoryError: std::bad_alloc: out_of_memory: CUDA error",
    "RuntimeError: cudaErrorMemoryAllocation(2): out of memory",
    "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,024 bytes",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED",
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
    "RuntimeError: FIND was unable to find an engine to execute this computation",
    "RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED",
    "RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED",
    "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at x",
    "NCCL WARN Failed to CUDA calloc async 608 bytes",
    "NCCL WARN Cuda failure 2 'out of memory'",
    "RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, unhandled system error",
    "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes. Error code 12",
    "RuntimeError: $ Torch: not enough memory: you tried to allocate 4GB. Buy new RAM!",
    "RuntimeError: posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
    "numpy.core._exceptions.MemoryError: Unable to allocate 5.00 GiB for an array with shape (1, 2)",
    "OSError: [Errno 28] No space left on device: '/dev/shm/x'",
    "This might be caused by insufficient shared memory (shm).",
    "RuntimeError: unable to write to file </torch_1_2>",
    "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-abc",
    "OSError: [Errno 12] Cannot allocate memory",
    "OSError: [WinError 1455] The paging file is too small for this operation to complete",
    "failed (exitcode: -9) local_rank: 0 (pid: 12) of binary: python",
    "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 12)",
    "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed.",
    "RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly",
    "error: Detected 1 oom-kill event(s) in StepId=8.0.",
    "error: Exceeded job memory limit",
    "error: Exceeded step memory limit at some point.",
    "[1.2] Memory cgroup out of memory: Killed process 77 (python)",
    "[1.2] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null)",
    "    Reason:       OOMKilled",
    "[1.2] Out of memory: Killed process 77 (python)",
    "[1.2] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null)",
    "the container exited with status 137",
    "exits with return code = -9",
    "died with <Signals.SIGKILL: 9>.",
    "ray: Task was killed due to the node running low on memory.",
    "torch.multiprocessing: Signal 9 (SIGKILL) received by PID 12",
    "jax: RESOURCE_EXHAUSTED: Out of memory while trying",
    "torch.cuda.OutOfMemoryError: CUDA out of memory.",
]


# Each must be found by itself: the line that usually comes with it may be missing.
def test_every_form_has_a_sample_here():
    squeezed = ["".join(text.split()) for text in FORM_SAMPLES]
    unseen = [f.anchor.pattern for f in FORMS if not any(f.anchor.search(text) for text in squeezed)]
    assert unseen == []


@pytest.mark.parametrize("text", FORM_SAMPLES)
def test_every_form_is_found_in_a_log_too_long_to_parse_whole(text):
    alone = [m.kind for m in scan_text(text).messages]
    log_text = f"{STEP * 1100}{text}\n{STEP * 1100}"
    assert len(log_text) > 64 << 10
    assert len(alone) == 1
    assert [m.kind for m in scan_text(log_text).messages] == alone


def test_powershell_writes_utf16():
    reading = scan([b"\xff\xfe" + oom().encode("utf-16-le")])
    assert [m.tried_bytes for m in reading.messages] == [20 << 20]


def test_tracebacks_of_other_kinds_are_counted():
    other = 'Traceback (most recent call last):\n  File "t.py", line 3, in f\n    g()\nValueError: no\n'
    reading = scan_text(other * 2)
    assert (reading.events, reading.tracebacks, reading.other_tracebacks) == ((), 2, 2)
    mixed = scan_text(
        other + 'Traceback (most recent call last):\n  File "t.py", line 3, in f\n    g()\n' + oom()
    )
    assert (len(mixed.events), mixed.other_tracebacks) == (1, 1)


def test_first_rank_by_order():
    reading = scan_text(f"[rank3]: {oom(1)}\n[rank0]: {oom(2)}\n")
    assert (reading.first_rank, reading.first_rank_reason) == (3, "first in the log")


def test_first_rank_by_time_stamp():
    reading = scan_text(f"2026-01-01 10:00:09 [rank3]: {oom(1)}\n2026-01-01 10:00:02 [rank0]: {oom(2)}\n")
    assert (reading.first_rank, reading.first_rank_reason) == (0, "earliest time stamp")


def test_first_rank_by_the_launcher():
    root = "Root Cause (first observed failure):\n[1]:\n  time      : 2026\n  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 9)\n"
    reading = scan_text(f"[rank3]: {oom(1)}\n[rank2]: {oom(2)}\n{root}")
    assert (reading.first_rank, reading.first_rank_reason) == (2, "the launcher's root cause")
    assert {m.kind for m in reading.messages} == {"cuda_oom"}


def test_no_rank_no_claim():
    assert scan_text(oom()).first_rank is None


def test_two_jobs_in_one_log():
    reading = scan_text(f"{oom(1, 24)}\n{STEP * 5}{oom(2, 80)}\n")
    assert [m.job for m in reading.messages] == [0, 1]
    assert reading.jobs == 2
    launcher = "W0101 torch/distributed/run.py:793] ****\n"
    reading = scan_text(f"{launcher}[rank0]: {oom(1)}\n{launcher}[rank0]: {oom(2)}\n")
    assert [m.job for m in reading.messages] == [0, 1]
    assert scan_text(f"{launcher}[rank0]: {oom(1)}\n[rank1]: {oom(2)}\n").jobs == 1


def test_a_job_that_repeats_itself_for_hours(monkeypatch):
    monkeypatch.setattr(log, "_MAX_MESSAGES", 5)
    monkeypatch.setattr(log, "_SMALL", 0)
    gap = STEP * 800
    reading = scan_text("".join(f"{gap}{oom(mib)}\n" for mib in range(1, 10)))
    assert len(reading.messages) == 5
    assert reading.dropped >= 4


def test_messages_are_json():
    text = json.dumps([m.to_json() for m in scan_text(oom()).messages])
    assert json.loads(text)[0]["other_processes"] == []
