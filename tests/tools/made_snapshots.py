"""Memory snapshots made by a small allocator that keeps torch's books: shapes of real files, known contents."""

from __future__ import annotations

import copy
from typing import Any

MIB = 1 << 20
SITE = "/opt/env/lib/python3.11/site-packages"


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}


UNWIND = frame("??", 0, "torch::unwind::unwind()")
CALL = frame(f"{SITE}/torch/nn/modules/module.py", 1739, "_wrapped_call_impl")
MAIN = frame("/home/alice/work/train.py", 88, "main")
LOOP = frame("/home/alice/work/train.py", 61, "step")
STACKS = {
    "parameters": [UNWIND, frame(f"{SITE}/torch/nn/modules/module.py", 927, "_apply"), MAIN],
    "forward": [UNWIND, frame("/home/alice/work/model.py", 42, "forward"), CALL, LOOP, MAIN],
    "attention": [UNWIND, frame("/home/alice/work/model.py", 57, "forward"), CALL, LOOP, MAIN],
    "backward": [UNWIND, frame("??", 0, "torch::autograd::generated::MulBackward0::apply(x)")],
    "gradient": [UNWIND, frame("??", 0, "torch::autograd::AccumulateGrad::apply(x)")],
    "optimizer": [UNWIND, frame(f"{SITE}/torch/optim/adamw.py", 120, "_init_group"), LOOP, MAIN],
    "leak": [UNWIND, frame("/home/alice/work/train.py", 70, "log_loss"), LOOP, MAIN],
    "driver": [UNWIND, frame("??", 0, "cudaMalloc")],
}


class Allocator:
    """One segment per allocation, no splitting: enough to keep sums, blocks and rows consistent."""

    def __init__(
        self, device: int = 0, *, times: bool = True, frames: bool = True, start: int = 0x7F0000000000
    ) -> None:
        self.device = device
        self.stacks = copy.deepcopy(STACKS)  # tests may change what they got
        self.rows: list[dict[str, Any]] = []
        self.recording = True
        self.live: dict[int, tuple[int, int, Any]] = {}
        self.segments: dict[int, int] = {}
        self._next = start
        self._clock = 1_700_000_000_000_000
        self._times, self._frames = times, frames

    def _row(self, action: str, addr: int, size: int, stack: Any, **more: Any) -> None:
        if not self.recording:
            return
        self._clock += 10
        row = {"action": action, "addr": addr, "size": size, "stream": 0, **more}
        if self._times:
            row["time_us"] = self._clock
        if self._frames:
            row["frames"] = stack
        if action == "oom":
            row["device_free"] = row.pop("addr")
        self.rows.append(row)

    def malloc(self, size: int, kind: str) -> int:
        stack = self.stacks[kind]
        need = max(2 * MIB, -(-size // (2 * MIB)) * 2 * MIB)
        free = next((a for a, n in self.segments.items() if n == need and a not in self.live), None)
        if free is None:
            free = self._next
            self._next += need + (1 << 30)
            self.segments[free] = need
            self._row("segment_alloc", free, need, self.stacks["driver"])
        self.live[free] = (size, -(-size // 512) * 512, stack)
        self._row("alloc", free, size, stack)
        return free

    def free(self, address: int) -> None:
        size, _, stack = self.live.pop(address)
        self._row("free_requested", address, size, stack)
        self._row("free_completed", address, size, stack)

    def oom(self, size: int, device_free: int) -> None:
        self._row("oom", device_free, size, self.stacks["forward"])

    def snapshot_segments(self) -> list[dict[str, Any]]:
        found = []
        for address, total in sorted(self.segments.items()):
            blocks = []
            used = requested = 0
            if address in self.live:
                requested, used, stack = self.live[address]
                blocks.append(
                    {"address": address, "size": used, "requested_size": requested, "state": "active_allocated",
                     "frames": stack}
                )  # fmt: skip
            if used < total:
                blocks.append(
                    {"address": address + used, "size": total - used, "requested_size": 7, "state": "inactive",
                     "frames": []}
                )  # fmt: skip
            found.append(
                {"device": self.device, "address": address, "total_size": total, "allocated_size": used,
                 "active_size": used, "requested_size": requested, "stream": 0,
                 "segment_type": "small" if total == 2 * MIB else "large", "segment_pool_id": (0, 0),
                 "is_expandable": False, "frames": [], "blocks": blocks}
            )  # fmt: skip
        return found


def training(
    *,
    steps: int = 4,
    layers: int = 3,
    leak: bool = False,
    late: bool = False,
    oom: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A training loop: parameters, activations, gradients, optimizer state, perhaps a leak or an OOM."""
    memory = Allocator(**options)
    memory.recording = not late
    parameters = [memory.malloc(8 * MIB, "parameters") for _ in range(layers)]
    memory.recording = True
    state: list[int] = []
    for step in range(steps):
        kept = [memory.malloc(16 * MIB + step, "forward") for _ in range(layers)]
        scratch = memory.malloc(3 * MIB, "attention")
        memory.free(scratch)
        if oom and step == steps - 1:
            memory.oom(64 * MIB, 5 * MIB)
            for address in kept:
                memory.free(address)
            break
        gradients = []
        for address in reversed(kept):
            work = memory.malloc(4 * MIB, "backward")
            gradients.append(memory.malloc(8 * MIB, "gradient"))
            memory.free(work)
            memory.free(address)
        if not state:
            state = [memory.malloc(8 * MIB, "optimizer") for _ in range(2 * layers)]
        if leak:
            memory.malloc(5 * MIB, "leak")
        for address in gradients:
            memory.free(address)
    assert len(parameters) == layers
    return wrap(memory)


def wrap(*devices: Allocator) -> dict[str, Any]:
    """The dictionary of torch.cuda.memory._snapshot()."""
    return {
        "segments": [segment for memory in devices for segment in memory.snapshot_segments()],
        "device_traces": [memory.rows for memory in devices],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "expandable_segments": False,
        },
        "external_annotations": [],
    }


def like_torch_2_0(raw: dict[str, Any]) -> dict[str, Any]:
    """The same in the oldest form: block histories, no addresses, no times."""
    raw = copy.deepcopy(raw)
    for segment in raw["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames"):
            del segment[key]
        for block in segment["blocks"]:
            block["history"] = [
                {
                    "addr": block.pop("address"),
                    "real_size": block["requested_size"],
                    "frames": block.pop("frames"),
                }
            ]
    for rows in raw["device_traces"]:
        for row in rows:
            row.pop("time_us", None)
    return {"segments": raw["segments"], "device_traces": raw["device_traces"]}


def like_torch_2_13(raw: dict[str, Any]) -> dict[str, Any]:
    """The same in the newest form."""
    for rows in raw["device_traces"]:
        for number, row in enumerate(rows):
            row.update(compile_context="N/A", user_metadata="", pool_id=(0, number % 2))
            if row["action"] == "alloc":
                row["forward_frames"] = ['File "/home/alice/work/model.py", line 42, in forward']
    return raw
