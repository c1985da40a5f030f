"""Request streams for synthetic snapshots: training steps, fragmentation, streams, graph pools, noise.

Each fills a `SyntheticProcess`; `process.snapshot()` then gives the file.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ...units import KIB, MIB
from .model import AllocatorOutOfMemory
from .synth import Frame, SyntheticDevice, SyntheticProcess, frame

_TRAIN = "train.py"


def _stack(line: int, name: str, *inner: tuple[str, int, str]) -> list[Frame]:
    return [*(frame(*each) for each in inner), frame(_TRAIN, line, name), frame(_TRAIN, 1, "<module>")]


FORWARD = _stack(20, "main", ("torch/nn/modules/linear.py", 134, "forward"), ("model.py", 31, "forward"))
BACKWARD: list[Frame] = []
"""Autograd's threads have no Python frames."""
OPTIMIZER = _stack(24, "main", ("torch/optim/adamw.py", 176, "_init_group"))
INIT = _stack(12, "main", ("torch/nn/modules/module.py", 1329, "convert"))
INPUT = _stack(18, "main")


def training(
    process: SyntheticProcess,
    *,
    layers: int = 12,
    width_bytes: int = 8 * MIB,
    activation_bytes: int = 24 * MIB,
    steps: int = 3,
    device: int = 0,
) -> None:
    """Forward, backward and AdamW over `layers` layers for some steps; ends between two steps.

    Args:
        process: where it runs.
        layers: depth; forward keeps one activation per layer, backward frees them in reverse.
        width_bytes: bytes of one layer's parameter; the gradient and two optimizer states have the same size.
        activation_bytes: bytes that one layer keeps for backward.
        steps: optimizer steps.
        device: ordinal.

    Raises:
        AllocatorOutOfMemory: the device is too small; the history ends with the `oom` row.
    """
    gpu = process.devices[device]
    for _ in range(layers):
        gpu.malloc(width_bytes, INIT)
    has_state = False
    for step in range(steps):
        process.annotate(f"ProfilerStep#{step}", True, device)
        batch = gpu.malloc(2 * MIB, INPUT)
        activations = []
        for layer in range(layers):
            scratch = gpu.malloc(300 * KIB + 512 * layer, FORWARD)
            activations.append(gpu.malloc(activation_bytes, FORWARD))
            gpu.free(scratch)
        loss = gpu.malloc(4, FORWARD)
        gradients = []
        for _ in range(layers):
            temporary = gpu.malloc(activation_bytes, BACKWARD)
            gradients.append(gpu.malloc(width_bytes, BACKWARD))
            gpu.free(activations.pop())
            gpu.free(temporary)
        if not has_state:
            for _ in range(2 * layers):
                gpu.malloc(width_bytes, OPTIMIZER)
            has_state = True
        for address in gradients:
            gpu.free(address)
        gpu.free(loss)
        gpu.free(batch)
        process.annotate(f"ProfilerStep#{step}", False, device)


def fragmented_oom(process: SyntheticProcess, *, blocks: int = 12, device: int = 0) -> int:
    """Fail although far more than the request is free, in pieces that are each too small.

    Blocks of 40 MiB are replaced one by one by results of 22 MiB. A result fits only where a whole block
    was, so every segment keeps a hole of 18 MiB, and the next 60 MiB find no place. In one expandable
    segment the holes join. Give the process a capacity between 40 and 40 + 60 / `blocks` MiB per block.
    Returns the bytes of the failed request.

    Raises:
        ValueError: nothing failed, so the capacity is larger.
    """
    gpu = process.devices[device]
    batches = [gpu.malloc(40 * MIB, FORWARD) for _ in range(blocks)]
    for address in batches:
        gpu.free(address)
        gpu.malloc(22 * MIB, _stack(33, "collect", ("model.py", 77, "keep_result")))
    try:
        gpu.malloc(60 * MIB, FORWARD)
    except AllocatorOutOfMemory as error:
        return error.requested
    raise ValueError("no out-of-memory error: give the process less capacity")


def shortage_oom(process: SyntheticProcess, *, device: int = 0) -> int:
    """Keep activations until nothing is left: no setting helps. Returns the failed request's bytes."""
    gpu = process.devices[device]
    gpu.malloc(64 * MIB, INIT)
    while True:
        try:
            gpu.malloc(48 * MIB, FORWARD)
        except AllocatorOutOfMemory as error:
            return error.requested


def side_stream(process: SyntheticProcess, *, steps: int = 8, stream: int = 7, device: int = 0) -> None:
    """Copies on a second stream with record_stream: freed blocks wait until that stream has passed."""
    gpu = process.devices[device]
    waiting = 0
    for _ in range(steps):
        batch = gpu.malloc(12 * MIB, INPUT, stream=stream)
        gpu.record_stream(batch, 0)
        kept = gpu.malloc(30 * MIB, FORWARD)
        gpu.free(batch)
        waiting += 1
        if waiting == 3:
            gpu.process_events(FORWARD)
            waiting = 0
        gpu.free(kept)


def graph_pool(process: SyntheticProcess, *, pool: tuple[int, int] = (1, 0), device: int = 0) -> None:
    """Warm up, then capture a CUDA graph: the blocks of the capture live in a private pool."""
    gpu = process.devices[device]
    for _ in range(2):
        gpu.free(gpu.malloc(16 * MIB, FORWARD))
    static = gpu.malloc(4 * MIB, INPUT)
    gpu.allocator.begin_capture(pool)
    inside = [gpu.malloc(size * MIB, FORWARD, pool=pool) for size in (3, 18, 1, 26)]
    for address in inside[:3]:
        gpu.free(address)
    gpu.malloc(5 * MIB, FORWARD, pool=pool)
    gpu.allocator.end_capture(pool)
    gpu.free(static)


def random_stream(
    process: SyntheticProcess,
    seed: int,
    *,
    requests: int = 1500,
    streams: Sequence[int] = (0, 0, 0, 7),
    pools: Sequence[tuple[int, int]] = ((0, 0),),
    device: int = 0,
) -> None:
    """Sizes over six orders of magnitude, frees at once and after events, emptied caches, failures."""
    gpu = process.devices[device]
    rng = random.Random(seed)
    live: list[int] = []
    for number in range(requests):
        stack = _stack(number, "noise")
        draw = rng.random()
        if draw < 0.52 or not live:
            _request(gpu, rng, live, stack, streams, pools)
        elif draw < 0.93:
            gpu.free(_pop(rng, live))
        elif draw < 0.96:
            address = _pop(rng, live)
            gpu.record_stream(address, 99)
            gpu.free(address)
        elif draw < 0.995:
            gpu.process_events(stack)
        elif draw > 0.998:
            gpu.empty_cache()


def _request(
    gpu: SyntheticDevice,
    rng: random.Random,
    live: list[int],
    stack: list[Frame],
    streams: Sequence[int],
    pools: Sequence[tuple[int, int]],
) -> None:
    kind = rng.randrange(4)
    low, high = ((1, 4096), (1, MIB), (MIB, 12 * MIB), (10 * MIB, 90 * MIB))[kind]
    size = rng.randrange(low, high)
    try:
        live.append(gpu.malloc(size, stack, stream=rng.choice(streams), pool=rng.choice(pools)))
    except AllocatorOutOfMemory:
        for _ in range(len(live) // 2):
            gpu.free(_pop(rng, live))


def _pop(rng: random.Random, live: list[int]) -> int:
    return live.pop(rng.randrange(len(live)))
