# ruff: noqa: E501  (recorded data: one fact a line)
"""Session folders in the real format, with made-up but plausible numbers, for tests and pictures.

Everything is written through the package's own writers, so a change of the format shows here first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from oomscope.protocol import layout
from oomscope.protocol.records import encode
from oomscope.store.files import write_json
from oomscope.store.session import Attempt, Session

GIB = 1 << 30
MIB = 1 << 20

#: The moment at which every recorded session is looked at: 2026-11-29 14:33:01 UTC, in nanoseconds.
NOW_NS = 1_795_962_781 * 10**9
#: Not the name of this machine, so that nobody looks for processes of these pids.
HOST = "node-a"


class Writer:
    """Appends records of one process."""

    def __init__(self, attempt: Attempt, rank: int, pid: int) -> None:
        self._path = attempt.procs / layout.proc_file(rank, HOST, pid)
        self._n = 0
        self._lines: list[bytes] = []

    def add(self, kind: str, t: int, **fields: Any) -> None:
        self._lines.append(encode({"t": t, "k": kind, "n": self._n, **fields}))
        self._n += 1

    def close(self) -> None:
        self._path.write_bytes(b"".join(self._lines))


def new_session(home: Path, script: str, *, command: Sequence[str] = (), age_s: float = 420) -> Session:
    """A session folder as `oomscope run` makes one, with a fixed name, time and host."""
    session = Session.create(
        home, name=script, command=command or ("python", script), cwd=Path("/home/ada/train")
    )
    info = {
        **session.info,
        "host": HOST,
        "created": NOW_NS - int(age_s * 1e9),
        "user": "ada",
        "environment": {},
    }
    path = session.path.parent / f"20261129-142601-{Path(script).stem}-3f9c"
    session.path.rename(path)
    info["id"] = path.name
    write_json(path / layout.SESSION_FILE, info)
    return Session.open(path)


def hello(
    writer: Writer, rank: int, *, t: int, world: int, gpu: str | None, capacity: int | None, simulated: bool
) -> None:
    """The first two records of a rank."""
    identity = {"rank": rank, "local_rank": rank, "world_size": world}
    writer.add(
        "hello", t, version=1, pid=14000 + rank, start_time=1, host=HOST, argv=["train.py"], python="3.11.9",
        identity=identity, torch="2.13.0", cuda=None, env={}, simulated=simulated,
    )  # fmt: skip
    writer.add(
        "rank", t, **identity, device=0 if gpu else None, gpu_name=gpu, gpu_uuid=None,
        capacity_bytes=capacity, simulated=simulated,
    )  # fmt: skip


def wave(step: int, rank: int, size: float) -> int:
    """A small reproducible wobble of at most `size` bytes."""
    return int(size * math.sin(step * 0.7 + rank * 1.3) * math.cos(step * 0.13 + rank))


def start(
    session: Session, number_of_ranks: int = 1, *, fixes: Iterable[str] = (), command: Sequence[str] = ()
) -> Attempt:
    """The next attempt's folder with its attempt.json."""
    attempt = session.new_attempt()
    fixes = list(fixes)
    attempt.write_info(
        {
            "attempt": attempt.number,
            "command": list(command or session.info["command"]),
            "cwd": session.info["cwd"],
            "fixes": fixes,
            "changes": {"env": {}, "plan": {"fixes": [{"id": each} for each in fixes]}, "argv": []},
        }
    )
    session.append_supervisor(
        {
            "t": NOW_NS - 400 * 10**9 + attempt.number * 10**9,
            "k": "attempt_started",
            "attempt": attempt.number,
            "command": list(session.info["command"]),
            "fixes": fixes,
            "pid": 13999,
        }
    )
    return attempt


def eight_ranks(home: Path, *, ranks: int = 8, steps: int = 188) -> Session:
    """A running job on 80 GB cards: rank 3 fragmented and flushing its cache, rank 5 leaking, the others well."""
    session = new_session(home, "train.py", command=("torchrun", "--nproc-per-node", str(ranks), "train.py"))
    attempt = start(session, ranks)
    capacity = int(79.1 * GIB)
    for rank in range(ranks):
        writer = Writer(attempt, rank, 14000 + rank)
        begun = NOW_NS - int(steps * 0.8e9)
        hello(
            writer,
            rank,
            t=begun,
            world=ranks,
            gpu="NVIDIA H100 80GB HBM3",
            capacity=capacity,
            simulated=False,
        )
        leak = 0.123 * GIB if rank % 8 == 5 else 0.0
        low = peak = reserved = 0
        for step in range(steps):
            grown = int(leak * step)
            low = int((26 + 0.3 * (rank % 8)) * GIB) + grown + wave(step, rank, 0.2 * GIB)
            if step < 2:
                low -= int((2 - step) * 8 * GIB)
            peak = low + int(11.5 * GIB) + wave(step, rank + 3, 0.6 * GIB)
            reserved = max(reserved, int(peak * (1.45 if rank % 8 == 3 else 1.06)))
            retries = step // 27 if rank % 8 == 3 and step > 60 else 0
            writer.add(
                "step", begun + int(step * 0.8e9), step=step, micro_steps=1, low_allocated_bytes=low,
                peak_allocated_bytes=peak, peak_reserved_bytes=reserved, reserved_bytes=reserved,
                rss_bytes=6 * GIB, peak_rss_bytes=7 * GIB, loss=10.8 * math.exp(-step / 90) + 2.1,
                input_numel=32768, duration_ns=800_000_000, retries=retries,
            )  # fmt: skip
        writer.add(
            "reading", NOW_NS - 200_000_000, allocated_bytes=low + int(7.5 * GIB), reserved_bytes=reserved,
            peak_allocated_bytes=peak, peak_reserved_bytes=reserved, device_free_bytes=capacity - reserved - int(1.4 * GIB),
            device_total_bytes=capacity, retries=(steps - 1) // 27 if rank % 8 == 3 else 0, ooms=0, rss_bytes=6 * GIB,
            peak_rss_bytes=7 * GIB, step=steps, micro_step=0, phase="forward",
        )  # fmt: skip
        writer.close()
    session.set_state("running", attempt=attempt.number)
    return session


def cpu_job(home: Path, *, steps: int = 60) -> Session:
    """Two ranks on gloo, without any device memory."""
    session = new_session(
        home, "ddp_cpu.py", command=("torchrun", "--nproc-per-node", "2", "samples/ddp_cpu.py")
    )
    attempt = start(session, 2)
    for rank in range(2):
        writer = Writer(attempt, rank, 15000 + rank)
        begun = NOW_NS - int(steps * 0.25e9)
        hello(writer, rank, t=begun, world=2, gpu=None, capacity=None, simulated=False)
        for step in range(steps):
            rss = int(420 * MIB + min(step, 6) * 28 * MIB) + wave(step, rank, 2 * MIB)
            writer.add(
                "step", begun + int(step * 0.25e9), step=step, micro_steps=1, low_allocated_bytes=None,
                peak_allocated_bytes=None, peak_reserved_bytes=None, reserved_bytes=None, rss_bytes=rss,
                peak_rss_bytes=int(640 * MIB), loss=4.2 * math.exp(-step / 40) + 1.3, input_numel=4096,
                duration_ns=250_000_000, retries=None,
            )  # fmt: skip
        writer.add("reading", NOW_NS - 100_000_000, rss_bytes=590 * MIB, peak_rss_bytes=640 * MIB, step=steps, micro_step=0, phase="backward")  # fmt: skip
        writer.close()
    session.set_state("running", attempt=attempt.number)
    return session


CAPACITY = int(39.38 * GIB)


def _failed_attempt(session: Session) -> Attempt:
    """Attempt 1 on a simulated 40 GB card: out of memory in the first backward."""
    attempt = start(session)
    writer = Writer(attempt, 0, 16000)
    begun = NOW_NS - 380 * 10**9
    hello(writer, 0, t=begun, world=1, gpu="NVIDIA A100-SXM4-40GB", capacity=CAPACITY, simulated=True)
    allocated, reserved = int(38.41 * GIB), int(38.96 * GIB)
    for n, phase in enumerate(("init", "forward", "backward")):
        writer.add(
            "phase_peak",
            begun + n * 10**9,
            phase=phase,
            step=0,
            peak_allocated_bytes=(int(2.8 * GIB), int(37.2 * GIB), allocated)[n],
        )
    writer.add(
        "oom", begun + 3 * 10**9, step=0, micro_step=0, phase="backward", device=0, requested_bytes=768 * MIB,
        device_free_bytes=430 * MIB, allocated_bytes=allocated, reserved_bytes=reserved,
        peak_allocated_bytes=allocated, peak_reserved_bytes=reserved, capacity_bytes=CAPACITY,
        message="CUDA out of memory. Tried to allocate 768.00 MiB.", caught=None, snapshot=None, in_backward=True,
        frames=[["samples/activations_too_big.py", 20, "main"]],
    )  # fmt: skip
    writer.add("exception", begun + 3 * 10**9 + 1, type="OutOfMemoryError", message="CUDA out of memory.", traceback=[], is_oom=True, frames=[])  # fmt: skip
    shares = (("activations", 35.6), ("parameters", 1.32), ("gradients", 1.29), ("inputs", 0.2))
    writer.add(
        "peak", begun + 3 * 10**9 + 2, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved, step=0, phase="backward",
        composition=[{"category": name, "bytes": int(size * GIB)} for name, size in shares],
        modules=[{"module": f"blocks.{i}", "bytes": int(1.44 * GIB)} for i in range(24)] + [{"module": "head", "bytes": 700 * MIB}],
    )  # fmt: skip
    writer.close()
    attempt.write_result(
        {
            "exit_code": 1,
            "oom": True,
            "first_failing_rank": 0,
            "ranks": [
                {
                    "rank": 0,
                    "steps": 0,
                    "peak_allocated_bytes": allocated,
                    "peak_reserved_bytes": reserved,
                    "capacity_bytes": CAPACITY,
                    "peak_rss_bytes": 2 * GIB,
                    "losses": [],
                }
            ],
        }
    )
    write_json(attempt.path / layout.FINDINGS_FILE, findings())
    logs = attempt.logs / "rank0"
    logs.mkdir()
    (logs / "stdout.log").write_text("model: 24 layers, 354.8 M parameters\n")
    (logs / "stderr.log").write_text(
        "Traceback (most recent call last):\n"
        '  File "samples/activations_too_big.py", line 20, in main\n'
        "    loss.backward()\n"
        "torch.OutOfMemoryError: \x1b[31mCUDA out of memory.\x1b[0m Tried to allocate 768.00 MiB.\n"
    )
    return attempt


def findings() -> dict[str, Any]:
    """A diagnosis in the shape of `oomscope.diagnosis/1`."""

    def fact(text: str, source: str, value: Any = None) -> dict[str, Any]:
        return {"text": text, "source": source, "value": value}

    flow: list[dict[str, Any]] = [
        {
            "node": "G0", "parent": None, "question": "Is it this process's own GPU memory?", "answer": "yes", "on_path": True, "verdict": None,
            "evidence": [fact("38.96 of 39.38 GiB are held by PyTorch in this process", "oom record")], "missing": [], "guide": None,
        },
        {
            "node": "Q1", "parent": None, "question": "First iteration?", "answer": "yes", "on_path": True, "verdict": None,
            "evidence": [fact("the error came at step 0, in backward", "oom record"), fact("no optimizer step had finished", "step records")],
            "missing": [], "guide": "says the model and optimizer do not fit; optimizer state does not exist yet at this point",
        },
        {
            "node": "Q1.1", "parent": "Q1", "question": "Loaded or copied twice?", "answer": "no", "on_path": False, "verdict": "oom.load_duplicate",
            "evidence": [fact("no checkpoint was loaded before the error", "phase records")], "missing": [], "guide": None,
        },
        {
            "node": "Q1.3", "parent": "Q1", "question": "One giant request?", "answer": "no", "on_path": False, "verdict": "oom.giant_transient",
            "evidence": [fact("the request of 768 MiB is 1.9 % of the card", "oom record")], "missing": [], "guide": None,
        },
        {
            "node": "Q1.4", "parent": "Q1", "question": "Activations exceed the card?", "answer": "yes", "on_path": True, "verdict": "oom.capacity_activations",
            "evidence": [
                fact("activations hold 35.6 GiB, 93 % of the peak", "composition at the peak"),
                fact("parameters and gradients hold 2.7 GiB", "model record"),
                fact("24 equal blocks of class Block hold 1.4 GiB of activations each", "module peaks"),
            ],
            "missing": [], "guide": None,
        },
        {
            "node": "Q1.8", "parent": "Q1", "question": "Do model and optimizer fit alone?", "answer": "yes", "on_path": False, "verdict": None,
            "evidence": [fact("5.3 GiB with AdamW state, 13 % of the card", "model record")], "missing": [], "guide": None,
        },
        {"node": "Q2", "parent": None, "question": "A random iteration?", "answer": "no", "on_path": False, "verdict": None, "evidence": [], "missing": [], "guide": None},
        {
            "node": "Q2.2", "parent": "Q2", "question": "Fragmentation?", "answer": "unknown", "on_path": False, "verdict": "oom.fragmentation", "evidence": [fact("0.55 GiB inactive, 1.4 % of reserved", "oom record")],
            "missing": [{"what": "whether the free blocks could be joined", "capture": "a snapshot with history: oomscope run --history"}], "guide": None,
        },
        {"node": "Q3", "parent": None, "question": "The same iteration each time?", "answer": "unknown", "on_path": False, "verdict": None, "evidence": [], "missing": [{"what": "whether it repeats at the same step", "capture": "a second run: oomscope run --repeat"}], "guide": None},
    ]  # fmt: skip
    return {
        "schema": "oomscope.diagnosis/1",
        "subject": {
            "attempt": 1, "rank": 0, "step": 0, "phase": "backward", "requested_bytes": 768 * MIB, "device_free_bytes": 430 * MIB,
            "capacity_bytes": CAPACITY, "allocated_bytes": int(38.41 * GIB), "reserved_bytes": int(38.96 * GIB), "script": "samples/activations_too_big.py",
        },
        "messages": [],
        "first_rank": 0,
        "verdicts": [
            {
                "rule": "oom.capacity_activations",
                "cause": "capacity_activations",
                "title": "Activations exceed the card",
                "confidence": 0.93,
                "explanation": "The values that the forward pass keeps for backward need 35.6 GiB at this batch size; with "
                "parameters and gradients that is more than the card holds. Nothing is leaking and nothing is fragmented: "
                "the batch is too large for storing every activation.",
                "evidence": [fact("the peak was still rising when memory ran out: layer 19 of 24", "module peaks")],
                "missing": [],
                "fixes": ["ckpt", "amp-bf16", "micro-batch"],
                "where": {"file": "samples/activations_too_big.py", "line": 20, "function": "main", "source": "        loss.backward()"},
            }
        ],
        "flow": flow,
    }  # fmt: skip


def fixes() -> dict[str, Any]:
    """Predictions in the shape of `oomscope.fixes/1`."""

    def predicted(peak: float, half: float, time: float, phase: str, fits: bool) -> dict[str, Any]:
        return {
            "peak_reserved_bytes": int(peak * GIB), "low_bytes": int((peak - half) * GIB), "high_bytes": int((peak + half) * GIB),
            "time_factor": time, "next_peak_phase": phase, "fits": fits, "basis": "simulated device",
        }  # fmt: skip

    def fix(id: str, title: str, risk: str, **more: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "id": id, "title": title, "risk": risk, "applicable": True, "why_not": None, "effective": True, "why_ineffective": None,
            "saving_bytes": None, "predicted": None, "how": ["runtime"], "conflicts": [], "effort_s": 30,
            "preview": {"env": {}, "argv": [], "runtime": [], "diff": None},
        }  # fmt: skip
        return {**base, **more}

    diff = (
        "--- a/samples/gpt_model.py\n+++ b/samples/gpt_model.py\n@@ -61,3 +61,3 @@\n"
        "         for block in self.blocks:\n-            x = block(x)\n"
        "+            x = checkpoint(block, x, use_reentrant=False)\n"
    )
    return {
        "schema": "oomscope.fixes/1",
        "capacity_bytes": CAPACITY,
        "peak_reserved_bytes": int(46.7 * GIB),
        "basis": "simulated device",
        "fixes": [
            fix("expandable", "Expandable segments in the allocator", "none", effective=False, how=["env"], saving_bytes=int(0.2 * GIB),
                why_ineffective="nothing is fragmented: saves 0.2 GiB, 0.4 %", predicted=predicted(46.5, 0.1, 1.0, "backward", False),
                preview={"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "argv": [], "runtime": [], "diff": None}),
            fix("ckpt", "Activation checkpointing of Block ×24", "exact", saving_bytes=int(32.1 * GIB), predicted=predicted(14.6, 0.3, 1.31, "optimizer", True),
                preview={"env": {}, "argv": [], "runtime": ["checkpoint the 24 modules of class Block (use_reentrant=False)"], "diff": diff}),
            fix("amp-bf16", "Autocast to bfloat16", "rounding", saving_bytes=int(17.4 * GIB), predicted=predicted(29.3, 0.9, 0.62, "backward", True), conflicts=["amp-fp16"],
                preview={"env": {}, "argv": [], "runtime": ["wrap forward and loss in torch.autocast('cuda', torch.bfloat16)"], "diff": None}),
            fix("micro-batch", "Two micro-batches in place of one batch", "exact", saving_bytes=int(19.0 * GIB), predicted=predicted(27.7, 0.6, 1.12, "backward", True)),
            fix("fused-optimizer", "Fused AdamW", "rounding", effective=False, why_ineffective="the peak is in backward, not in the optimizer", predicted=predicted(46.7, 0.1, 1.0, "backward", False), saving_bytes=0),
            fix("fsdp2", "Shard with FSDP2", "topology", applicable=False, why_not="one rank only: there is nothing to shard over"),
            fix("grad-bucket-view", "Gradients as views of DDP buckets", "none", applicable=False, why_not="the model is not wrapped in DDP"),
        ],
        "plans": [{"fixes": ["ckpt", "amp-bf16"], "fits": True, "predicted": predicted(9.8, 0.4, 0.84, "optimizer", True)}],
        "recommended": ["ckpt"],
    }  # fmt: skip


def waiting(home: Path) -> Session:
    """After the OOM on the simulated card: cause found, fixes predicted, the supervisor waits for a choice."""
    session = new_session(
        home, "activations_too_big.py", command=("python", "samples/activations_too_big.py")
    )
    attempt = _failed_attempt(session)
    write_json(attempt.path / layout.FIXES_FILE, fixes())
    t = NOW_NS - 300 * 10**9
    for n, record in enumerate(
        (
            {"k": "attempt_ended", "attempt": 1, "exit_code": 1, "oom": True},
            {"k": "diagnosing", "attempt": 1},
            {"k": "diagnosed", "attempt": 1, "rule": "oom.capacity_activations"},
            {"k": "predicting", "fix": "expandable", "done": 0, "total": 5},
            {"k": "predicting", "fix": "ckpt", "done": 1, "total": 5},
            {"k": "predicted", "attempt": 1},
            {"k": "waiting"},
        )
    ):
        session.append_supervisor({"t": t + n * 4 * 10**9, **record})
    session.set_state("waiting", attempt=1)
    return session


def predicting(home: Path) -> Session:
    """After the OOM, in the middle of the prediction runs."""
    session = new_session(
        home, "activations_too_big.py", command=("python", "samples/activations_too_big.py")
    )
    _failed_attempt(session)
    t = NOW_NS - 20 * 10**9
    for n, record in enumerate(
        (
            {"k": "attempt_ended", "attempt": 1, "exit_code": 1, "oom": True},
            {"k": "diagnosing", "attempt": 1},
            {"k": "diagnosed", "attempt": 1, "rule": "oom.capacity_activations"},
            {"k": "predicting", "fix": "amp-bf16", "done": 2, "total": 5},
        )
    ):
        session.append_supervisor({"t": t + n * 4 * 10**9, **record})
    session.set_state("predicting", attempt=1)
    return session


def finished(home: Path) -> Session:
    """The rerun with checkpointing has finished on the simulated card."""
    session = waiting(home)
    t = NOW_NS - 100 * 10**9
    session.append_supervisor({"t": t, "k": "decision", "fixes": ["ckpt"], "by": "user"})
    attempt = start(session, fixes=["ckpt"])
    writer = Writer(attempt, 0, 16100)
    hello(writer, 0, t=t, world=1, gpu="NVIDIA A100-SXM4-40GB", capacity=CAPACITY, simulated=True)
    low = peak = reserved = 0
    for step in range(6):
        low = int((2.7 if step == 0 else 5.4) * GIB)
        peak = int((12.9 if step == 0 else 13.9) * GIB)
        reserved = int((13.4 if step == 0 else 14.66) * GIB)
        writer.add(
            "step", t + step * 10**9, step=step, micro_steps=1, low_allocated_bytes=low, peak_allocated_bytes=peak,
            peak_reserved_bytes=reserved, reserved_bytes=reserved, rss_bytes=2 * GIB, peak_rss_bytes=2 * GIB, loss=None,
            input_numel=24576, duration_ns=900_000_000, retries=0,
        )  # fmt: skip
    for phase, size in (("init", 2.8), ("forward", 11.2), ("backward", 13.9), ("optimizer", 12.1)):
        writer.add("phase_peak", t + 7 * 10**9, phase=phase, step=5, peak_allocated_bytes=int(size * GIB))
    writer.add("bye", t + 8 * 10**9, steps=6)
    writer.close()
    attempt.write_result(
        {
            "exit_code": 0,
            "oom": False,
            "first_failing_rank": None,
            "ranks": [
                {
                    "rank": 0, "steps": 6, "peak_allocated_bytes": peak, "peak_reserved_bytes": reserved,
                    "capacity_bytes": CAPACITY, "peak_rss_bytes": 2 * GIB, "losses": [],
                }
            ],
        }
    )  # fmt: skip
    session.append_supervisor(
        {"t": t + 9 * 10**9, "k": "attempt_ended", "attempt": 2, "exit_code": 0, "oom": False}
    )
    session.append_supervisor(
        {"t": t + 10 * 10**9, "k": "finished", "exit_code": 0, "text": "attempt 2 finished"}
    )
    session.set_state("done", attempt=2)
    return session


def starting(home: Path) -> Session:
    """Just created: nothing has reported yet."""
    session = new_session(home, "train.py")
    start(session)
    session.set_state("starting", attempt=1)
    return session


def dump(value: Any) -> str:
    """JSON for a hand-made file."""
    return json.dumps(value)
