"""What the agent costs a training step on the CPU: the time inside its hooks, measured where it is spent.

    python benchmarks/agent.py [--steps 30] [--json]

A GPT of width 256 with 8 layers trains in this process with the agent armed as in an ordinary job; every hook
of the training thread is timed, the agent's own thread by its CPU time. The target is 1 % of a step for the
default probes. For `--detail`, whose wrapper stands around every module call, the added time of one empty
call is multiplied by the calls of a step.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WIDTH, LAYERS, CONTEXT, BATCH, VOCABULARY = 256, 8, 64, 4, 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Seconds of each step."""
    times = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT))
        started = time.perf_counter()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return times


class Clock:
    """Sums the time spent inside methods of a class."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def around(self, owner: type, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += clock() - started
                self.calls += 1

        setattr(owner, name, timed)


def arm(folder: Path, *, detail: bool) -> tuple[Clock, Clock]:
    """Start the agent in this process as the bootstrap would.

    Returns the clocks of its hooks and its thread.
    """
    from oomscope.agent import bootstrap
    from oomscope.agent.agent import Agent
    from oomscope.agent.probes import StepProbe

    hooks, thread = Clock(), Clock()
    for name in ("_before_step", "_after_step", "_saw_backward", "note_low"):
        hooks.around(StepProbe, name)
    thread.around(Agent, "_tick", time.thread_time)
    for name in ("procs", "snapshots", "stacks", "run"):
        (folder / name).mkdir()
    config = {
        "attempt_dir": str(folder), "rundir": str(folder / "run"), "device": None, "steps": None, "detail": detail,
        "main_is_rank": False, "role": "attempt", "history": {},
    }  # fmt: skip
    (folder / "agent.json").write_text(json.dumps(config))
    bootstrap.start(str(folder))
    return hooks, thread


def module_calls(model: nn.Module) -> tuple[int, float]:
    """Module calls of one step, and the seconds that one empty call takes now."""
    count = sum(1 for _ in model.modules()) - sum(
        isinstance(each, nn.MultiheadAttention) for each in model.modules()
    )
    inner = nn.Sequential(*(nn.Identity() for _ in range(1000)))
    best = min(_seconds(inner) for _ in range(30))
    return count, best / 1000


def _seconds(inner: nn.Module) -> float:
    x = torch.ones(1)
    started = time.perf_counter()
    inner(x)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer = build()
    calls, bare = module_calls(model)
    train(model, optimizer, 3)
    with tempfile.TemporaryDirectory() as name:
        hooks, thread = arm(Path(name), detail=True)
        _, wrapped = module_calls(model)
        hooks.seconds = thread.seconds = 0.0
        began = time.perf_counter()
        times = train(model, optimizer, options.steps)
        wall = time.perf_counter() - began
        from oomscope.agent.bootstrap import AGENT

        records = sum(1 for _ in (Path(name) / "procs").glob("*"))
        AGENT.goodbye()
    step = sorted(times)[len(times) // 2]
    result = {
        "step_ms": round(step * 1e3, 2),
        "hooks_us_per_step": round(hooks.seconds / options.steps * 1e6, 1),
        "hooks_percent": round(100 * hooks.seconds / sum(times), 4),
        "thread_ms_cpu_per_s": round(thread.seconds / wall * 1e3, 3),
        "detail_us_per_module_call": round((wrapped - bare) * 1e6, 3),
        "detail_percent": round(100 * (wrapped - bare) * calls / step, 4),
        "record_files": records,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"training step (d{WIDTH}, {LAYERS} layers, 1 thread): {result['step_ms']} ms")
    hooks_us, percent = result["hooks_us_per_step"], result["hooks_percent"]
    print(f"hooks in the training thread: {hooks_us} us a step = {percent} %  (target: 1 %)")
    print(f"agent's thread: {result['thread_ms_cpu_per_s']} ms CPU per second of training")
    call_us, percent = result["detail_us_per_module_call"], result["detail_percent"]
    print(f"--detail: {call_us} us a module call = {percent} % of the step")


if __name__ == "__main__":
    main()
