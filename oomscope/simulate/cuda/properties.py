"""Devices, their properties, random state and what a build says about itself."""

from __future__ import annotations

import uuid
from typing import Any

import torch

from .runtime import Runtime

_LEGACY_TYPES = {
    "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Double": torch.float64,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Byte": torch.uint8, "Bool": torch.bool,
}  # fmt: skip


class DeviceProperties:
    """What `torch.cuda.get_device_properties()` returns."""

    def __init__(self, mode: Any, index: int) -> None:
        card = mode.device.card
        self.name = card.product
        self.total_memory = mode.device.total_bytes
        self.major, self.minor = card.compute_capability
        self.multi_processor_count = card.multiprocessors
        self.is_integrated = self.is_multi_gpu_board = 0
        self.max_threads_per_multi_processor = 2048 if card.compute_capability in ((8, 0), (9, 0)) else 1536
        self.max_threads_per_block = 1024
        self.warp_size = 32
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 49152
        self.shared_memory_per_block_optin = 232448 if card.compute_capability >= (9, 0) else 101376
        self.shared_memory_per_multiprocessor = 233472 if card.compute_capability >= (9, 0) else 102400
        self.L2_cache_size = 40 << 20
        self.gcnArchName = ""
        self.uuid = uuid.UUID(int=(0x51A0CAFE << 96) + index)
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = index, 0, 0
        self.clock_rate, self.memory_clock_rate, self.memory_bus_width = 1_500_000, 1_500_000, 5120

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, "
            f"multi_processor_count={self.multi_processor_count})"
        )


def install(mode: Any) -> None:
    """Make torch.cuda see the simulated cards."""
    _devices(mode)
    _initialization(mode)
    _random(mode)
    _build()
    _cudnn(mode)
    for name, dtype in _LEGACY_TYPES.items():
        setattr(torch.cuda, f"{name}Tensor", _legacy_constructor(dtype))


def _devices(mode: Any) -> None:
    device = mode.device
    cuda = torch.cuda

    def set_device(index: int) -> None:
        if index >= device.count:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        cuda._lazy_init()
        device.current = int(index)

    def exchange(index: int) -> int:
        before: int = device.current
        if index is not None and index >= 0:
            device.current = index
        return before

    def properties_of(which: Any = None) -> DeviceProperties:
        index = cuda._get_device_index(which, optional=True)
        if index < 0 or index >= device.count:
            raise AssertionError("Invalid device id")
        return DeviceProperties(mode, index)

    for name, function in {
        "getDeviceCount": lambda: device.count,
        "getDevice": lambda: device.current,
        "setDevice": set_device,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "canDeviceAccessPeer": lambda first, second: True,
        "hasPrimaryContext": lambda index: index == device.current,
        "getCompiledVersion": lambda: 12080,
        "getArchFlags": lambda: "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
        "getCurrentBlasHandle": lambda: 1,
        "set_sync_debug_mode": lambda level: None,
        "get_sync_debug_mode": lambda: 0,
        "sleep": lambda cycles: None,
    }.items():
        setattr(torch._C, f"_cuda_{name}", function)
    cuda._exchange_device = cuda._maybe_exchange_device = exchange
    cuda._get_device_properties = lambda index: DeviceProperties(mode, index)
    cuda.get_device_properties = properties_of
    cuda.get_device_capability = lambda device=None: mode.device.card.compute_capability
    cuda.get_device_name = lambda device=None: mode.device.card.product
    cuda.device_count = lambda: mode.device.count
    cuda.is_available = lambda: True
    for name in ("utilization", "temperature", "power_draw", "clock_rate", "memory_usage"):
        setattr(cuda, name, lambda device=None: 0)


def _initialization(mode: Any) -> None:
    cuda = torch.cuda
    torch._C._cuda_init = lambda: None
    torch._C._cuda_isInBadFork = lambda: False
    cuda._is_in_bad_fork = lambda: False
    cuda._initialized = False  # until something is done on a card, which some libraries ask for

    def initialize() -> None:
        cuda._initialized = True

    cuda._lazy_init = cuda.init = mode.tracker.on_first_use = initialize
    cuda._queued_calls.clear()
    cuda._lazy_call = lambda call, **_kwargs: call()
    runtime = Runtime(mode)
    cuda._cudart = runtime
    cuda.cudart = lambda: runtime
    from torch.cuda import nvtx

    nvtx._nvtx = _Nothing()


class _Nothing:
    """Swallows every call of the NVTX library."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: 0


def _random(mode: Any) -> None:
    cuda = torch.cuda
    state = {"seed": 0}

    def get_state(device: Any = "cuda") -> Any:
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(new_state: Any, device: Any = "cuda") -> None:
        return None

    def manual_seed(seed: int) -> None:
        state["seed"] = int(seed)
        mode.values.generator.manual_seed(int(seed))

    for module in (cuda, cuda.random):
        module.get_rng_state, module.set_rng_state = get_state, set_state
        module.get_rng_state_all = lambda: [get_state() for _ in range(mode.device.count)]
        module.set_rng_state_all = lambda new_states: None
        module.manual_seed = module.manual_seed_all = manual_seed
        module.seed = module.seed_all = lambda: manual_seed(torch.initial_seed() & 0x7FFFFFFF)
        module.initial_seed = lambda: state["seed"]
        module._lazy_call = lambda call, **_kwargs: call()
        module._lazy_init = cuda._lazy_init
    cuda.default_generators = tuple(torch.Generator() for _ in range(mode.device.count))
    plain = torch.Generator

    class Generator(plain):  # type: ignore[misc, valid-type]
        """`torch.Generator("cuda")` works.

        It is one for the CPU, as nothing is drawn on the simulated device.
        """

        def __new__(cls, device: Any = "cpu") -> Any:
            return plain.__new__(cls, "cpu" if torch.device(device).type == "cuda" else device)

    Generator.__module__, Generator.__qualname__ = "torch._C", "Generator"
    torch.Generator = Generator


def _build() -> None:
    """A build with CUDA: version, cuDNN, NCCL."""
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.backends.cuda.is_built = lambda: True
    from torch.cuda import nccl

    nccl.version = lambda: (2, 27, 3)
    nccl.is_available = lambda *_args: True


def _cudnn(mode: Any) -> None:
    """Say that cuDNN is there, and can be switched off; torch's own code must not call it, as it asks for a driver."""
    cudnn: Any = torch.backends.cudnn
    if getattr(torch._C, "_has_cuda", False):
        torch._C._set_cudnn_enabled(False)

    def enable(enabled: bool) -> None:
        mode.cudnn_enabled = bool(enabled)

    torch._C._get_cudnn_enabled = lambda: mode.cudnn_enabled
    torch._C._set_cudnn_enabled = enable
    kind: Any = type(cudnn)
    kind.enabled = torch.backends.ContextProp(torch._C._get_cudnn_enabled, enable)
    cudnn.is_available = lambda: True
    cudnn.version = lambda: 91002
    cudnn.is_acceptable = lambda tensor: mode.cudnn_enabled and tensor.device.type == "cuda"
    torch._use_cudnn_rnn_flatten_weight = lambda: (
        False
    )  # parameters stay where they are; the bytes are the same


def _legacy_constructor(dtype: Any) -> Any:
    def construct(*args: Any) -> Any:
        if len(args) == 1 and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=dtype, device="cuda")
        return torch.empty(args, dtype=dtype, device="cuda")

    return construct
