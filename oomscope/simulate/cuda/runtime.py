"""The few functions of the CUDA runtime that Python code calls through `torch.cuda.cudart()`."""

from __future__ import annotations

from typing import Any


class Runtime:
    """Stands for `torch.cuda.cudart()`."""

    class cudaError:
        """Error codes that scripts compare with."""

        success = 0

    class cudaOutputMode:
        """Formats of the old profiler."""

        KeyValuePair = 0
        CSV = 1

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def cudaMemGetInfo(self, index: int) -> tuple[int, int]:
        device = self._mode.device
        return device.free_bytes(index), device.total_bytes

    def cudaGetErrorString(self, _error: int) -> str:
        return "no error"

    def __getattr__(self, name: str) -> Any:
        """Anything else succeeds and does nothing: cudaProfilerStart, cudaHostRegister and the like."""
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: 0
