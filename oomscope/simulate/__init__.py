"""A CUDA device that is not there: unmodified scripts on fake tensors, sized by the allocator model.

Importing this package imports nothing else of it: cards are resolved without torch, and `start()` loads the
rest.
"""

from __future__ import annotations

from typing import Any, Callable


def start(config: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> Any:
    """Make `torch.cuda` work on a simulated card in this process; call it right after `import torch`.

    Args:
        config: `device` {"spec", and optionally "capacity_bytes", "total_bytes", "context_bytes", …} or a
            card's name; optionally `world_size`, `rank`, and `where`, a callable that tells (step, phase).
        emit: takes the records "peak" and "simulated" when the process ends.

    Raises:
        SetupError: this torch or platform cannot be simulated; the text is one sentence.
        ValueError: no such card.
    """
    from .session import start as begin

    return begin(config, emit)
