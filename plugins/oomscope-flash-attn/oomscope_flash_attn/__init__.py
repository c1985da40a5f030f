"""FlashAttention 2 on oomscope's simulated CUDA device.

The device calls `register` before the script starts. Shapes and memory of the kernels are described in `kernels`.
Where the package `flash_attn` is not installed (it needs a CUDA compiler), a stand-in takes its place: the same
functions over the same operations, found by `import flash_attn` last, after everything that is really there.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register(registry: Any) -> None:
    """Describe the kernels to the device, and offer the stand-in.

    Args:
        registry: the module `oomscope.simulate.ops.registry` of the running job.
    """
    from . import kernels, stand_in

    kernels.describe(registry)
    stand_in.offer()
