# ruff: noqa: E501  # one form a line
"""The forms of out-of-memory texts, as patterns over *squeezed* text.

Squeezed means: without any white space (`messages.squeeze`). A log may wrap a text at any column, even inside
a word or a number; without white space all wrappings look the same. Each form has an anchor that decides the
kind; the numbers after it are found field by field, so that a cut message still gives what it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SIZE = r"(?P<{0}>\d+(?:\.\d+)?)(?P<{0}_u>bytes|[KMGTPE]i?B|B)"
_FACTOR = {
    "bytes": 1,
    "B": 1,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
    "P": 1 << 50,
    "E": 1 << 60,
}
# torch writes "GB" for GiB in the MPS texts before 2.6 (format_size in MPSAllocator.mm divides by 1024): both
# spellings are binary.


def size_of(number: str, unit: str) -> int:
    """Bytes of "1.39", "GiB"; rounded to the nearest byte."""
    return round(float(number) * _FACTOR.get(unit, _FACTOR.get(unit[0], 1)))


def _field(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("<N>", SIZE.format("n")), re.IGNORECASE)


#: Fields of the caching allocators' texts (CUDA, HIP, XPU, NPU …), all ages.
#: "capacty" is torch's own typo of 2.1 and 2.2.
ALLOCATOR_FIELDS: dict[str, tuple[re.Pattern[str], ...]] = {
    "tried_bytes": (_field(r"Triedtoallocate<N>"), _field(r"Requested:<N>")),
    "capacity_bytes": (
        _field(r"<N>totalcapaci?ty"),
        _field(r"totalcapaci?tyof<N>"),
        _field(r"Devicelimit:<N>"),
    ),
    "free_bytes": (_field(r"ofwhich<N>isfree"), _field(r"<N>free;"), _field(r"Free\(accordingtoCUDA\):<N>")),
    "allocated_bytes": (
        _field(r"allocatedmemory<N>isallocatedbyPyTorch"),
        _field(r"<N>alreadyallocated"),
        _field(r"Currentlyallocated:<N>"),
    ),
    "reserved_bytes": (_field(r"<N>reservedintotalbyPyTorch"), _field(r"<N>cached\b")),
    "reserved_unallocated_bytes": (_field(r"<N>isreservedbyPyTorchbutunallocated"),),
    "this_process_bytes": (_field(r"thisprocesshas<N>memoryinuse"),),
    "private_pools_bytes": (_field(r"with<N>allocatedinprivatepools"),),
    "allowed_bytes": (
        _field(r"[;.]<N>allowed[;.]"),
        _field(r"PyTorchlimit\(setbyuser-suppliedmemoryfraction\):<N>"),
    ),
}
MPS_FIELDS: dict[str, tuple[re.Pattern[str], ...]] = {
    "mps_allocated_bytes": (_field(r"MPSallocated:<N>"),),
    "mps_other_bytes": (_field(r"otherallocations:<N>"),),
    "mps_max_bytes": (_field(r"maxallowed:<N>"),),
    "tried_bytes": (_field(r"Triedtoallocate<N>"),),
}
PROCESS = _field(r"Process(?P<pid>\d+)has<N>memoryinuse")
CONF_VAR = re.compile(r"PYTORCH(?:_[A-Z]+)?_ALLOC_CONF")
GPU = re.compile(r"(?:GPU|NPU|MLU|MUSA|HPU)(\d+)(?:;|hasatotal)|Allocationondevice(\d+)would")

Fields = dict[str, Any]
Reader = Callable[["re.Match[str]", str], Fields]


def _read_fields(table: dict[str, tuple[re.Pattern[str], ...]], segment: str) -> Fields:
    found: Fields = {}
    for name, patterns in table.items():
        for pattern in patterns:
            match = pattern.search(segment)
            if match:
                found[name] = size_of(match["n"], match["n_u"])
                break
    return found


def _allocator(match: re.Match[str], segment: str) -> Fields:
    found = _read_fields(ALLOCATOR_FIELDS, segment)
    processes = tuple((int(m["pid"]), size_of(m["n"], m["n_u"])) for m in PROCESS.finditer(segment))
    if processes:
        found["other_processes"] = processes
    conf, gpu = CONF_VAR.search(segment), GPU.search(segment)
    if conf:
        found["conf_var"] = conf.group()
    if gpu:
        found["gpu"] = int(gpu.group(1) or gpu.group(2))
    return found


def _backend_allocator(match: re.Match[str], segment: str) -> Fields:
    backend = match["backend"].lower()
    return {**_allocator(match, segment), "backend": backend, "kind": f"{backend}_oom"}


def _async_allocator(match: re.Match[str], segment: str) -> Fields:
    return {**_allocator(match, segment), "backend": "cuda"}


def _exabyte(match: re.Match[str], segment: str) -> Fields:
    return {"backend": match["backend"].lower()}


def _mps(match: re.Match[str], segment: str) -> Fields:
    return {**_read_fields(MPS_FIELDS, segment), "backend": "mps"}


def _backend_kind(suffix: str) -> Reader:
    def read(match: re.Match[str], segment: str) -> Fields:
        return {"kind": f"{match['backend'].lower()}_{suffix}"}

    return read


def _ints(**groups: str) -> Reader:
    """A reader that takes integer groups: field name -> group name; a group that took no part is left out."""

    def read(match: re.Match[str], segment: str) -> Fields:
        values = match.groupdict()
        return {field: int(values[group]) for field, group in groups.items() if values.get(group) is not None}

    return read


def _nothing(match: re.Match[str], segment: str) -> Fields:
    return {}


def _elastic(match: re.Match[str], segment: str) -> Fields:
    found = _ints(exitcode="code", local_rank="local", pid="pid", rank="rank")(match, segment)
    code = found["exitcode"]
    found["kind"] = {-9: "elastic_sigkill", 137: "elastic_sigkill", -7: "shm"}.get(code, "elastic_fail_other")
    return found


def _worker(match: re.Match[str], segment: str) -> Fields:
    signal = match["signal"].lower()
    kind = "host_kill" if signal == "killed" else "shm" if signal == "buserror" else "worker_other"
    return {"kind": kind, "pid": int(match["pid"])}


def _grouped_bytes(match: re.Match[str], segment: str) -> Fields:
    return {"tried_bytes": int(match["n"].replace(",", ""))}


def _buy_ram(match: re.Match[str], segment: str) -> Fields:
    return {"cpu_bytes": int(match["n"]) << 30}


def _numpy(match: re.Match[str], segment: str) -> Fields:
    return {"cpu_bytes": size_of(match["n"], match["n_u"])}


@dataclass(frozen=True)
class Form:
    """One form.

    The anchor in squeezed text, its kind (a reader may refine it), and how to read the numbers of its segment.
    """

    kind: str
    anchor: re.Pattern[str]
    read: Reader = _nothing
    ends_in_number: bool = False
    """No further digit may follow on the same line: 137 is meant, not 1370."""


def _form(
    kind: str,
    anchor: str,
    read: Reader = _nothing,
    *,
    ignore_case: bool = False,
    ends_in_number: bool = False,
) -> Form:
    pattern = re.compile(anchor.replace("<N>", SIZE.format("n")), re.IGNORECASE if ignore_case else 0)
    return Form(kind, pattern, read, ends_in_number)


_BACKENDS = r"(?P<backend>CUDA|HIP|XPU|NPU|MLU|MUSA|HPU|MTIA|PrivateUse\w+?)"
# "Error: CUDA out of memory" without "Tried to": accept it only behind an exception's name. A sentence that
# merely speaks of the error, and a source line that raises it, stay silent.
_RAISED = r"(?<!raise)(?<![A-Za-z])(?:RuntimeError|(?:torch\.(?:cuda\.)?)?OutOfMemoryError|AcceleratorError|torch\.AcceleratorError)[:(]['\"]?"

#: In order of trust: of two forms that match the same place the earlier one wins.
FORMS: tuple[Form, ...] = (
    _form("cuda_oom_1eb", _BACKENDS + r"outofmemory[.!]?Triedtoallocatemorethan1EBmemory", _exabyte),
    _form("cuda_oom", _BACKENDS + r"outofmemory[.!]?Triedtoallocate" + SIZE.format("n"), _backend_allocator),
    _form(
        "xpu_oom",
        r"Currentplatformcan(?:NOT|not)allocatememoryblockwithsizelargerthan\w+!?Triedtoallocate",
        _allocator,
    ),
    _form("xpu_oom", r"(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES|HOST_MEMORY)"),
    _form("mps_oom", r"MPSbackendoutofmemory", _mps),
    _form("cuda_oom", r"Allocationondevice\d+wouldexceedallowedmemory", _async_allocator),
    _form("cuda_oom", _RAISED + r"Allocationondevice", _async_allocator),
    _form(
        "cuda_oom_short",
        r"cudaruntimeerror\(2\):outofmemory|THCudaCheckFAILfile=\S{1,200}?error=2:outofmemory",
    ),
    _form(
        "cuda_driver_oom",
        r"(?P<backend>CUDA|HIP)drivererror:?(?:outofmemory|hipErrorOutOfMemory|2\b)",
        _backend_kind("driver_oom"),
    ),
    _form("cuda_driver_oom", r"CUDA_ERROR_OUT_OF_MEMORY"),
    _form(
        "cuda_error_oom",
        r"(?P<backend>CUDA|HIP)(?:error|failure)(?:\d+)?:?(?:outofmemory|hipErrorOutOfMemory|cudaErrorMemoryAllocation)",
        _backend_kind("error_oom"),
    ),
    _form(
        "cuda_error_oom",
        r"cudafailedwitherror2:?outofmemory|CUDAError:outofmemory|CUDAerror\(\S{1,200}?:\d+\):outofmemory",
    ),
    # RMM and CuPy bring allocators of their own.
    _form(
        "cuda_error_oom",
        r"std::bad_alloc:out_of_memory:CUDA|cudaErrorMemoryAllocation(?:\(2\))?:?outofmemory",
    ),
    _form(
        "cuda_error_oom",
        r"(?:OutOfMemoryError|cudaErrorMemoryAllocation):Outofmemoryallocating(?P<n>[\d,]{1,30})bytes",
        _grouped_bytes,
    ),
    _form("cublas_alloc", r"CUBLAS_STATUS_ALLOC_FAILED"),
    _form("cublas_maybe_oom", r"CUBLAS_STATUS_NOT_INITIALIZED"),
    _form("cudnn_alloc", r"CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)"),
    _form("host_alloc", r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    _form(
        "cudnn_maybe_oom",
        r"CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR(?!_)|UnabletofindavalidcuDNNalgorithm|FINDwasunabletofindanengine",
    ),
    _form(
        "cusolver_alloc",
        r"CUSOLVER_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_(?:ALLOC_FAILED|INSUFFICIENT_RESOURCES)",
    ),
    _form("cufft_alloc", r"CUFFT_ALLOC_FAILED"),
    _form("nvml_assert", r"NVML_SUCCESS==r\W{0,4}INTERNALASSERT|nvmlInit_v2_\(\)\W{0,4}INTERNALASSERT"),
    _form(
        "nccl_oom",
        r"FailedtoCUDA(?:host)?[cm]?alloc(?:async|host)?(?P<n>\d+)bytes",
        _ints(nccl_bytes="n"),
        ignore_case=True,
    ),
    _form("nccl_oom", r"Cudafailure\d*'outofmemory'"),
    _form("nccl_other", r"NCCLerrorin:"),
    _form(
        "cpu_alloc",
        r"(?:DefaultCPUAllocator:(?:can'tallocatememory|notenoughmemory):)youtriedtoallocate(?P<n>\d+)bytes",
        _ints(cpu_bytes="n"),
    ),
    _form(
        "cpu_alloc", r"(?<![A-Za-z])\$?(?:Torch:)?notenoughmemory:youtriedtoallocate(?P<n>\d+)GB", _buy_ram
    ),
    _form("cpu_alloc", r"posix_memalign\(&data,gAlignment,nbytes\)==0\.12vs0"),
    _form("host_alloc", r"Unabletoallocate<N>foranarraywithshape", _numpy),
    _form(
        "shm",
        r"Nospaceleftondevice.{0,40}?/dev/shm|/dev/shm/\S{1,80}?Nospaceleftondevice|unabletoopensharedmemoryobject</torch_\S{1,120}?Nospaceleftondevice",
    ),
    _form(
        "shm",
        r"insufficientsharedmemory\(shm\)|unabletowritetofile</torch_|creatingsharedmemorysegment/dev/shm/nccl",
    ),
    _form(
        "host_alloc",
        r"OSError:\[Errno12\]Cannotallocatememory|unabletommap\d+bytesfromfile\S{1,120}?Cannotallocatememory|std::bad_alloc",
    ),
    _form("host_commit", r"\[WinError1455\]|[Pp]agingfileistoosmall"),
    _form(
        "elastic_fail",
        r"failed\(exitcode:(?P<code>-?\d+)\)local_rank:(?P<local>\d+)\(pid:(?P<pid>\d+)\)",
        _elastic,
    ),
    _form(
        "elastic_fail",
        r"(?:rank:(?P<rank>\d+)\(local_rank:(?P<local>\d+)\))?exitcode:(?P<code>-?\d+)\(pid:(?P<pid>\d+)\)(?:\(SIG[A-Z]+\))?",
        _elastic,
    ),
    _form(
        "worker_other",
        r"DataLoaderworker\(pid(?:\(s\))?:?(?P<pid>\d+)[,\d]*\)iskilledbysignal:(?P<signal>Killed|Buserror|[A-Z][a-z]+[a-z]*)",
        _worker,
    ),
    _form(
        "host_maybe_kill",
        r"DataLoaderworker\(pid(?:\(s\))?:?(?P<pid>\d+)[,\d]*\)exitedunexpectedly",
        _ints(pid="pid"),
    ),
    _form(
        "slurm_oom",
        r"Detected\d+oom[-_]killevent|oom[-_]killevent\(?s?\)?in(?:Step|step)|Exceeded(?:job|step)memorylimit",
    ),
    _form("cgroup_oom", r"[Mm]emorycgroupoutofmemory:Kill(?:ed)?process(?P<pid>\d+)", _ints(pid="pid")),
    _form("cgroup_oom", r"oom-kill:constraint=CONSTRAINT_MEMCG|(?<![A-Za-z])OOMKilled(?![=\"':]*false)"),
    _form("kernel_oom", r"Outofmemory:Kill(?:ed)?process(?P<pid>\d+)", _ints(pid="pid")),
    _form("kernel_oom", r"oom-kill:constraint=CONSTRAINT_NONE"),
    _form(
        "host_kill",
        r"(?:[Ee]xit(?:ed)?(?:with)?(?:return)?(?:code|status)|exitswithreturncode|returned?(?:non-zeroexitstatus|code))[:=]?(?P<code>-9|137|247)",
        _ints(exitcode="code"),
        ends_in_number=True,
    ),
    _form(
        "host_kill", r"diedwith<Signals\.SIGKILL:9>|terminatedwithsignalSIGKILL|interruptedbysignal9:SIGKILL"
    ),
    _form(
        "host_kill",
        r"(?:Task|Actor|Worker)(?:\(s\))?waskilledduetothenoderunninglowonmemory",
        ignore_case=True,
    ),
    _form("host_kill", r"Signal9\(SIGKILL\)receivedbyPID(?P<pid>\d+)", _ints(pid="pid")),
    _form("xla_oom", r"RESOURCE_EXHAUSTED:(?:XLA:TPUcompile\S{0,40})?Outofmemory"),
    _form("cuda_oom", _RAISED + r"(?P<backend>CUDA|HIP|XPU)outofmemory(?![\w])", _backend_allocator),
)

#: A whole line (after prefixes) that says it: the shell's word for a killed child, and Python's own error.
LINE_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("host_kill", re.compile(r"^(?:\S+: line \d+:\s+\d+ )?Killed(?:\s.*python.*)?$")),
    ("host_alloc", re.compile(r"^MemoryError(?!.*(?:CUDA|cuda))(?::.*)?$")),
    ("shm", re.compile(r"^Bus error(?: \(core dumped\))?(?:\s.*python.*)?$")),
)
