# ruff: noqa: E501  # texts and tables
"""From records, snapshots and logs on disk to evidence and a verdict."""

import contextlib
import json
from pathlib import Path

import pytest

from oomscope.core.allocator.model import AllocatorOutOfMemory
from oomscope.core.allocator.synth import SyntheticProcess, frame, to_bytes
from oomscope.core.allocator.synth_workloads import fragmented_oom, graph_pool, shortage_oom
from oomscope.core.diagnosis import diagnose
from oomscope.core.diagnosis.log import scan_text
from oomscope.errors import InputError, SessionError, SnapshotError
from oomscope.live.evidence import collect
from oomscope.live.evidence_text import (
    choose,
    from_reading,
    from_snapshot,
    is_snapshot,
    read_stream,
    reject_binary,
)
from oomscope.units import GIB, MIB

T0 = 1_700_000_000_000_000_000
SCRIPT = """import torch
losses = []
for step in range(100):
    loss = model(x)
    loss.backward()
    losses.append(loss)
"""


class Attempt:
    """Writes the folder of one attempt."""

    def __init__(self, session: Path, number: int = 1) -> None:
        self.path = session / "attempts" / f"{number:03d}"
        (self.path / "procs").mkdir(parents=True)
        (self.path / "snapshots").mkdir()
        (self.path / "logs").mkdir()
        self.n = 0

    def write(self, *records: dict, rank: int | None = 0, name: str | None = None) -> None:
        head = "x0000" if rank is None else f"r{rank:05d}"
        with open(self.path / "procs" / (name or f"{head}-host-{100 + (rank or 0)}.jsonl"), "a") as stream:
            for record in records:
                self.n += 1
                stream.write(json.dumps({"t": T0 + self.n * 10**6, "n": self.n, **record}) + "\n")


@pytest.fixture
def attempt(tmp_path):
    return Attempt(tmp_path / "session")


def hello(script: Path | str = "train.py", **more):
    return {"k": "hello", "version": 1, "pid": 100, "host": "host", "argv": ["python", str(script)], "torch": "2.13.0",
            "identity": {"rank": 0, "local_rank": 0, "world_size": 1}, **more}  # fmt: skip


RANK = {"k": "rank", "rank": 0, "device": 0, "capacity_bytes": 24 * GIB, "simulated": True}
MODEL = {"k": "model", "parameters_bytes": GIB, "gradients_bytes": GIB, "optimizer_bytes": 2 * GIB, "optimizer": "AdamW",
         "autocast": False, "block_groups": [{"class": "Block", "count": 12, "path": "blocks"}], "root_class": "GPT"}  # fmt: skip


def step(number, low=4.0, peak=10.0, **more):
    return {"k": "step", "step": number, "low_allocated_bytes": int(low * GIB), "peak_allocated_bytes": int(peak * GIB),
            "reserved_bytes": int((peak + 1) * GIB), "rss_bytes": GIB, **more}  # fmt: skip


def oom(number=3, phase="forward", **more):
    return {"k": "oom", "step": number, "phase": phase, "device": 0, "requested_bytes": GIB, "device_free_bytes": GIB // 4,
            "allocated_bytes": 22 * GIB, "reserved_bytes": 23 * GIB, "capacity_bytes": 24 * GIB, "frames": [["/u/train.py", 4, "main"]],
            **more}  # fmt: skip


RAISED = {"k": "exception", "type": "torch.OutOfMemoryError", "is_oom": True, "message": (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 256.00 MiB is free. Including "
    "non-PyTorch memory, this process has 23.50 GiB memory in use. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 1.00 "
    "GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.")}  # fmt: skip


def cause(evidence):
    best = diagnose(evidence).verdict
    return best.rule.cause if best else None


def test_activations_from_records(attempt):
    attempt.write(hello(), RANK, *(step(n) for n in range(8)), MODEL, oom(8), RAISED)
    e = collect(attempt.path.parent.parent)
    assert (e.step, e.phase, e.rank.rank, e.attempt) == (8, "forward", 0, 1)
    assert e.message is not None
    assert e.message.rank == 0
    assert e.trend.kind == "flat"
    assert e.torch_version == "2.13.0"
    assert cause(e) == "capacity_activations"


def test_a_healthy_run(attempt):
    attempt.write(hello(), RANK, *(step(n) for n in range(20)), MODEL, {"k": "bye"})
    (attempt.path / "result.json").write_text(json.dumps({"exit_code": 0}))
    e = collect(attempt.path)
    assert e.finished is True
    assert diagnose(e).verdicts == ()


def test_a_leak_names_the_line_of_the_script(attempt, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    attempt.write(hello(script), RANK, *(step(n, low=4 + n * 0.5) for n in range(30)), MODEL, oom(30), RAISED)
    verdict = diagnose(collect(attempt.path)).verdict
    assert verdict.rule.cause == "graph_accumulation"
    assert (verdict.finding.where.file, verdict.finding.where.line) == (str(script), 6)
    assert verdict.finding.where.source == "losses.append(loss)"


def test_the_rank_that_failed_first_is_judged(attempt):
    attempt.write(hello(), {**RANK, "rank": 0}, oom(5), RAISED, rank=0)
    attempt.write(hello(), {**RANK, "rank": 1}, {**oom(2), "t": T0}, RAISED, rank=1)
    e = collect(attempt.path)
    assert (e.rank.rank, e.first_rank, e.step) == (1, 1, 2)
    assert e.first_rank_reason == "earliest record"
    assert collect(attempt.path, rank=0).rank.rank == 0
    assert len(e.ranks) == 2


def test_clocks_of_other_nodes_are_set_right_before_times_are_compared(attempt):
    """Rank 4's node is 30 s behind: by its own clock it failed first."""
    there = {"rank": 4, "local_rank": 0, "world_size": 8, "node_rank": 1}
    attempt.write(hello(), {**RANK, "rank": 0}, {**oom(5), "t": T0 + 10**9}, RAISED, rank=0)
    late = {**oom(2), "t": T0 + 2 * 10**9 - 30 * 10**9}
    attempt.write(
        hello(identity=there, host="b"), {**RANK, "rank": 4}, late, {**RAISED, "t": late["t"]}, rank=4
    )
    assert collect(attempt.path).first_rank == 4
    journal = {"k": "node", "node": 1, "host": "b", "offset_ns": 30 * 10**9, "error_ns": 10**5}
    (attempt.path / "nodes.jsonl").write_text(json.dumps(journal) + "\n")
    assert collect(attempt.path).first_rank == 0


def test_helpers_are_no_ranks(attempt):
    attempt.write(hello(), RANK, step(0), rank=0)
    attempt.write(hello(), rank=None)
    assert len(collect(attempt.path).ranks) == 1


def test_caught_errors_are_not_the_end(attempt):
    attempt.write(hello(), RANK, oom(1, caught=True), *(step(n) for n in range(2, 20)), {"k": "bye"})
    e = collect(attempt.path)
    assert e.oom is None
    assert not e.failed


def test_several_errors_in_one_process(attempt, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("try:\n    train_step(b)\nexcept torch.cuda.OutOfMemoryError:\n    train_step(b)\n")
    attempt.write(hello(script), RANK, oom(1), oom(1), RAISED)
    assert cause(collect(attempt.path)) == "exception_holds"


def test_settings_come_from_the_environment(attempt):
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8"}
    attempt.write(hello(env=conf), RANK, oom(1), RAISED)
    e = collect(attempt.path)
    assert (e.settings.expandable, e.settings.max_split, e.settings.gc_threshold) == (True, False, True)
    assert all("expandable" not in v.fixes for v in diagnose(e).verdicts)


def test_logs_of_ranks_are_read(attempt):
    attempt.write(hello(), RANK, step(0))
    logs = attempt.path / "logs" / "rank0"
    logs.mkdir()
    (logs / "stderr.log").write_text(
        "epoch 1\nRuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error.\n"
    )
    e = collect(attempt.path)
    assert [m.kind for m in e.messages] == ["shm"]
    assert cause(e) == "host_shm"


def test_composition_of_a_simulated_peak(attempt):
    peak = {"k": "peak", "peak_allocated_bytes": 22 * GIB, "peak_reserved_bytes": 23 * GIB,
            "composition": [{"category": "activations", "bytes": 15 * GIB}, {"category": "parameters", "bytes": 4 * GIB}]}  # fmt: skip
    attempt.write(hello(), RANK, oom(1), RAISED, peak)
    e = collect(attempt.path)
    assert dict(e.composition)["activations"] == 15 * GIB
    assert cause(e) == "capacity_activations"


def test_a_failure_of_another_kind_is_no_memory_problem(attempt):
    raised = {
        "k": "exception",
        "type": "ValueError",
        "message": "no",
        "is_oom": False,
        "frames": [["/u/t.py", 3, "forward"]],
    }
    attempt.write(hello(), RANK, *(step(n) for n in range(8)), raised)
    e = collect(attempt.path)
    assert e.signal("phase:forward") is not None
    assert diagnose(e).verdicts == ()


def test_growth_without_failure_is_told(attempt, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("for x in y:\n    out = f(x)\n    kept.append(out.detach())\n")
    attempt.write(
        hello(script), RANK, *(step(n, low=1 + n * 0.1, peak=2 + n * 0.1) for n in range(40)), {"k": "bye"}
    )
    found = diagnose(collect(attempt.path))
    assert found.verdict.rule.cause == "container_accumulation"
    assert found.to_json()["failed"] is False
    assert any("card is full in about" in f.text for f in found.verdict.finding.evidence)


def test_malformed_records_are_skipped(attempt):
    attempt.write(
        hello(argv="x", env=7), {"k": "step", "step": "three"}, {"k": "oom", "frames": [[1], "x", ["f", 2, "g"]], "step": None},
        {"k": "model", "block_groups": "none"}, {"k": "peak", "composition": [{"category": "x"}, 3]}, {"k": "snapshot", "path": 5},
        {"k": "snapshot", "path": "../../outside.pickle"}, {"k": "exception", "message": None},
    )  # fmt: skip
    e = collect(attempt.path)
    assert e.oom is not None
    assert diagnose(e).verdict is not None
    assert any("no snapshot" in note for note in e.notes)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(SessionError, match="no attempt"):
        collect(tmp_path)
    (tmp_path / "attempts").mkdir()
    with pytest.raises(SessionError):
        collect(tmp_path)


def test_the_newest_attempt_is_judged(tmp_path):
    for number in (1, 2, 10):
        Attempt(tmp_path, number).write(hello(), RANK, step(0))
    assert collect(tmp_path).attempt == 10


def test_long_series_are_thinned(attempt):
    attempt.write(hello(), RANK, *(step(n) for n in range(9000)))
    rows = collect(attempt.path).rank.steps
    assert len(rows) <= 5000
    assert rows[-1].step == 8999


# -- snapshots


def saved(tmp_path: Path, process: SyntheticProcess, name: str = "s.pickle") -> Path:
    path = tmp_path / name
    path.write_bytes(to_bytes(process.snapshot()))
    return path


def test_fragmentation_is_proved_by_replay(tmp_path):
    process = SyntheticProcess(capacity=12 * 42 * MIB)
    fragmented_oom(process)
    e = from_snapshot(saved(tmp_path, process))
    assert e.allocator.exact
    assert e.allocator.shortfall <= 0
    assert e.allocator.what_ifs[0].fits
    verdict = diagnose(e).verdict
    assert verdict.rule.cause == "fragmentation"
    assert verdict.finding.confidence >= 0.9
    assert verdict.fixes[0] == "expandable"


def test_a_shortage_is_no_fragmentation(tmp_path):
    process = SyntheticProcess(capacity=512 * MIB)
    shortage_oom(process)
    e = from_snapshot(saved(tmp_path, process))
    assert e.allocator.shortfall > 0
    causes = [v.rule.cause for v in diagnose(e).verdicts]
    assert "fragmentation" not in causes
    assert all("expandable" not in v.fixes for v in diagnose(e).verdicts)


def test_a_snapshot_taken_after_the_exception_unwound(tmp_path):
    """The shape of a real file: 99.8 % live at the event, 99 % free at the end, expandable segments."""
    process = SyntheticProcess("expandable_segments:True", capacity=8 * GIB, devices=2)
    gpu = process.devices[1]
    forward = [
        frame("/x/site-packages/torch/nn/modules/module.py", 1, "_call_impl"),
        frame("models.py", 181, "update_nodes"),
        frame("train.py", 9, "main"),
    ]
    keep = gpu.malloc(
        32 * MIB,
        [frame("/x/site-packages/torch/nn/modules/module.py", 1, "_apply"), frame("train.py", 3, "main")],
    )
    held = []
    with contextlib.suppress(AllocatorOutOfMemory):
        while True:
            held.append(gpu.malloc(420 * MIB, forward))
    for address in held:
        gpu.free(address)
    assert keep
    e = from_snapshot(saved(tmp_path, process))
    at_end = sum(s["active_size"] for s in process.snapshot()["segments"] if s["device"] == 1)
    assert at_end < 0.01 * 8 * GIB
    assert e.oom.allocated_bytes > 0.93 * 8 * GIB
    assert e.shortfall > 0
    assert e.live[0].where.place == "models.py:181"
    causes = [v.rule.cause for v in diagnose(e).verdicts]
    assert causes[0] == "capacity_activations"
    assert "fsdp2" not in diagnose(e).verdicts[0].fixes
    assert "fragmentation" not in causes
    assert all("expandable" not in v.fixes for v in diagnose(e).verdicts)


def test_private_pools_are_counted(tmp_path):
    process = SyntheticProcess(capacity=400 * MIB)
    graph_pool(process)
    with contextlib.suppress(AllocatorOutOfMemory):
        while True:
            process.device.malloc(32 * MIB, [frame("train.py", 9, "main")])
    e = from_snapshot(saved(tmp_path, process))
    assert e.allocator.private_pools > 0


def test_a_snapshot_without_history(tmp_path):
    process = SyntheticProcess(max_entries=0)
    process.device.malloc(64 * MIB)
    e = from_snapshot(saved(tmp_path, process))
    assert not e.failed
    assert diagnose(e).verdicts == ()


def test_survivors_of_steps_are_matched_by_time(attempt, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = SyntheticProcess(capacity=2 * GIB)
    gpu = process.device
    module = frame("/x/site-packages/torch/nn/modules/module.py", 1, "_call_impl")
    records = [hello(script), RANK]
    number = 0
    with contextlib.suppress(AllocatorOutOfMemory):
        for number in range(200):
            for line in (31, 32, 33, 34):
                gpu.malloc(
                    4 * MIB,
                    [module, frame("/u/model.py", line, "forward"), frame(str(script), 4, "<module>")],
                )
            scratch = gpu.malloc(
                8 * MIB, [module, frame("/u/model.py", 40, "forward"), frame(str(script), 4, "<module>")]
            )
            gpu.free(scratch)
            low = gpu.allocator.allocated_bytes / GIB
            records.append({**step(number, low=low, peak=low + 0.01), "t": process.now_us() * 1000})
    (attempt.path / "snapshots" / "s.pickle").write_bytes(to_bytes(process.snapshot()))
    free = process.snapshot()["device_traces"][0][-1]["device_free"]
    failed = oom(number, requested_bytes=4 * MIB, device_free_bytes=free, allocated_bytes=gpu.allocator.allocated_bytes,
                 reserved_bytes=gpu.allocator.reserved_bytes, capacity_bytes=2 * GIB)  # fmt: skip
    attempt.write(*records, failed, RAISED, {"k": "snapshot", "path": "snapshots/s.pickle", "reason": "oom"})
    e = collect(attempt.path)
    assert e.notes == ()
    assert e.growth is not None
    assert e.growth.stacks == 4
    assert e.growth.births[0] == 2
    assert e.growth.caller.line == 4
    verdict = diagnose(e).verdict
    assert verdict.rule.cause == "graph_accumulation"
    assert verdict.finding.where.line == 6


def test_a_damaged_snapshot_is_a_note(attempt):
    (attempt.path / "snapshots" / "s.pickle").write_bytes(b"\x80\x04garbage")
    attempt.write(
        hello(), RANK, oom(1), RAISED, {"k": "snapshot", "path": "snapshots/s.pickle", "reason": "oom"}
    )
    e = collect(attempt.path)
    assert any("snapshot not read" in note for note in e.notes)
    assert diagnose(e).verdict is not None
    with pytest.raises(SnapshotError):
        from_snapshot(attempt.path / "snapshots" / "s.pickle")


# -- texts


def test_what_kind_of_file_it_is():
    assert is_snapshot(b"\x80\x04\x95")
    assert is_snapshot(b"<!DOCTYPE html><script>MemoryViz")
    assert not is_snapshot(b"step 1\nstep 2\n")
    assert not is_snapshot(b"<html>an error page</html>")
    with pytest.raises(InputError, match="binary"):
        reject_binary(b"\x7fELF\x00\x00", "a.out")
    reject_binary("\ufeffstep".encode("utf-16"), "log")


def test_streams_are_read_in_blocks(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("step 1\n" * 1000 + RAISED["message"] + "\n")
    with path.open("rb") as stream:
        reading = read_stream(stream, "train.log")
    assert [m.tried_bytes for m in reading.messages] == [GIB]
    e = from_reading(reading, source="log")
    assert cause(e) == "capacity_activations"


def test_the_message_with_numbers_is_judged():
    text = f"RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED\n{RAISED['message']}\n"
    messages = scan_text(text).messages
    assert choose(messages, None).kind == "cuda_oom"
    assert choose([], None) is None


def test_two_runs_in_one_log():
    other = RAISED["message"].replace("24.00 GiB", "80.00 GiB").replace("22.00 GiB", "10.00 GiB")
    reading = scan_text(f"{RAISED['message']}\n{other}\n")
    assert reading.jobs == 2
    last = from_reading(reading, source="log")
    assert last.capacity == 80 * GIB
    assert "2 runs" in last.notes[0]
    assert from_reading(reading, source="log", job=0).capacity == 24 * GIB


def test_ranks_of_a_log_are_a_sign():
    e = from_reading(scan_text(f"[rank0]: {RAISED['message']}\n[rank1]: {RAISED['message']}\n"), source="log")
    assert e.signal("uses:ranks") is not None
    assert e.first_rank == 0


def test_a_snapshot_of_a_device_that_did_not_fail(tmp_path):
    process = SyntheticProcess(capacity=512 * MIB, devices=2)
    shortage_oom(process)
    from oomscope.live.evidence_snapshot import read_snapshot

    path = saved(tmp_path, process)
    found = read_snapshot(path, device=1, steps=(), oom=None)
    assert found.allocator is None
    assert found.oom is None
    assert read_snapshot(path, device=0, steps=(), oom=None).allocator is not None
    assert read_snapshot(path, device=9, steps=(), oom=None).allocator is not None


def test_a_long_history_is_left_to_whatif(tmp_path, monkeypatch):
    from oomscope.live import evidence_allocator

    monkeypatch.setattr(evidence_allocator, "MAX_ROWS", 3)
    process = SyntheticProcess(capacity=512 * MIB)
    shortage_oom(process)
    e = from_snapshot(saved(tmp_path, process))
    assert e.allocator is None
    assert "oomscope whatif" in e.notes[0]


def test_an_edited_history_is_not_replayed(tmp_path):
    process = SyntheticProcess(capacity=512 * MIB)
    shortage_oom(process)
    snapshot = process.snapshot()
    for event in snapshot["device_traces"][0][2:6]:
        if "addr" in event:
            event["addr"] += 512
    path = tmp_path / "edited.pickle"
    path.write_bytes(to_bytes(snapshot))
    e = from_snapshot(path)
    assert e.allocator is None
    assert any("was not replayed" in note for note in e.notes)
    assert diagnose(e).verdict is not None


def test_expandable_segments_are_not_tried_where_they_are_on(tmp_path):
    process = SyntheticProcess("expandable_segments:True", capacity=512 * MIB)
    shortage_oom(process)
    e = from_snapshot(saved(tmp_path, process))
    assert e.settings.expandable is True
    assert all("expandable" not in v.fixes for v in diagnose(e).verdicts)


def test_sources_that_cannot_be_read(tmp_path):
    from oomscope.live.evidence_source import MAX_SOURCE_BYTES, find_script, inspect, read_source

    large = tmp_path / "large.py"
    large.write_bytes(b"#" * (MAX_SOURCE_BYTES + 1))
    assert read_source(large) is None
    assert read_source(tmp_path / "none.py") is None
    assert inspect(tmp_path / "none.py", ["/x/site-packages/a.py"]) == ((), ())
    assert find_script({}, None) is None
    assert str(find_script({"command": ["python", "gone.py"]}, {})) == "gone.py"
    (tmp_path / "here.py").write_text("x = 1\n")
    assert find_script({"script": "here.py", "cwd": str(tmp_path)}, None) == tmp_path / "here.py"


def test_compressed_snapshots_are_recognised():
    assert is_snapshot(b"\x28\xb5\x2f\xfd....")
    assert is_snapshot(b"\x1f\x8b\x08\x08....snapshot.pickle")
    assert not is_snapshot(b"\x1f\x8b\x08\x08....train.log")


def test_a_log_that_repeats_itself_is_noted(monkeypatch):
    from oomscope.core.diagnosis import log

    monkeypatch.setattr(log, "_MAX_MESSAGES", 1)
    monkeypatch.setattr(log, "_SMALL", 0)
    gap = "step 1 loss 2.0\n" * 5000
    reading = scan_text("".join(f"{RAISED['message']}\n{gap}" for _ in range(3)))
    assert any("were not read" in note for note in from_reading(reading, source="log").notes)


def test_a_failed_clone_is_a_sign_of_saving():
    text = f"UserWarning: Failed to clone() tensor with name x on rank 1. {RAISED['message']}"
    e = from_reading(scan_text(text), source="log")
    assert e.message.is_warning
    assert cause(e) == "ckpt_full_gather"
