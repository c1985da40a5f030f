"""The loader: every container a snapshot comes in, and files that mean harm."""

from __future__ import annotations

import base64
import gzip
import os
import pickle
import random
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_snapshots import MIB, like_torch_2_0, like_torch_2_13, training

from oomscope.core.snapshot.model import Snapshot
from oomscope.core.snapshot.parse import parse_snapshot
from oomscope.core.snapshot.scan import Unscannable, scan
from oomscope.core.snapshot.scanned_rows import ScannedRows
from oomscope.errors import SnapshotError
from oomscope.store._snapshot_child import forgetting, reference_of, unpickle
from oomscope.store.snapshots import (
    Limits,
    Selection,
    SnapshotLoader,
    estimated_bytes,
    identity_of,
    load_snapshot,
    snapshot_files,
)


def same(one: Snapshot, other: Snapshot) -> None:
    """Both hold the same, whatever the order of their tables."""
    assert one.settings == other.settings
    assert one.torch_version == other.torch_version
    for a, b in zip(one.devices, other.devices, strict=True):
        for name in ("action", "address", "size", "time_us"):
            assert np.array_equal(getattr(a.events, name), getattr(b.events, name)), name
        stacks = [one.stacks[stack] for stack in a.events.stack.tolist()]
        assert stacks == [other.stacks[stack] for stack in b.events.stack.tolist()]
        assert [one.streams[n] for n in a.events.stream] == [other.streams[n] for n in b.events.stream]
        for name in ("compile_context", "user_metadata"):
            x, y = getattr(a.events, name), getattr(b.events, name)
            assert (x is None) == (y is None)
            if x is not None:
                assert [one.texts[n] for n in x] == [other.texts[n] for n in y]
        if a.events.pool is not None:
            assert b.events.pool is not None
            assert [one.pools[n] for n in a.events.pool] == [other.pools[n] for n in b.events.pool]
        for each in fields(a.blocks):
            if each.name != "stack":
                assert np.array_equal(getattr(a.blocks, each.name), getattr(b.blocks, each.name)), each.name


@pytest.fixture(scope="module")
def loader() -> Any:
    with SnapshotLoader() as shared:
        yield shared


@pytest.fixture
def raw() -> dict[str, Any]:
    return training(steps=3)


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(tmp_path: Path, loader: SnapshotLoader, raw: dict[str, Any], protocol: int) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(raw, protocol=protocol))
    same(loader.load(path), parse_snapshot(raw))


def test_containers(tmp_path: Path, loader: SnapshotLoader, raw: dict[str, Any]) -> None:
    data = pickle.dumps(raw, protocol=4)
    page = b'\n<!DOCTYPE html>\n<script>const local_files = [{"name": "snapshot.pickle", "base64": "%s"}]</script>'
    forms = {
        "nuls.pickle": data + b"\x00\x00\x00",
        "page.html": page % base64.b64encode(data + b"\x00\x00"),
        "a.pickle.gz": gzip.compress(data),
        "page.html.gz": gzip.compress(page % base64.b64encode(data)),
        "list.p": pickle.dumps(raw["segments"]),
    }
    for name, content in forms.items():
        path = tmp_path / name
        path.write_bytes(content)
        found = loader.load(path)
        assert int(found.devices[0].segments.total_size.sum()) > 0, name
        if name != "list.p":
            same(found, parse_snapshot(raw))


def test_zstd(tmp_path: Path, loader: SnapshotLoader, raw: dict[str, Any]) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.pickle.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(pickle.dumps(raw)))
    same(loader.load(path), parse_snapshot(raw))


def test_selection(tmp_path: Path, loader: SnapshotLoader, raw: dict[str, Any]) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(raw))
    count = len(raw["device_traces"][0])
    device = loader.load(path, selection=Selection(last=5)).devices[0]
    assert (len(device.events), device.skipped_events) == (5, count - 5)
    device = loader.load(path, selection=Selection(start=3, stop=10)).devices[0]
    assert (device.skipped_events, device.window, device.n_analysed) == (3, 7, 7)
    assert device.events.size[0] == raw["device_traces"][0][3]["size"]


class Evil:
    """Unpickling it would make a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"hello world, this is no snapshot\n", "not a readable pickle"),
    "json": (b'{"segments": []}', "is JSON"),
    "zip": (b"PK\x03\x04rest", "zip archive"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", "Git LFS pointer"),
    "page": (b"<html><body>d3 was here</body></html>", "without an embedded snapshot"),
    "page-bad": (b'<html>"base64": "!!!!"</html>', "damaged"),
    "gzip-cut": (gzip.compress(b"x" * 1000)[:20], "damaged compressed data"),
    "global": (b"cos\nsystem\n(S'true'\ntR.", "refused.*os.system"),
    "stack-global": (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", "refused.*os.system"),
    "persistent": (b"Pabc\n.", "refused.*persistent"),
    "persistent-binary": (b"\x80\x04K\x01Q.", "refused.*persistent"),
    "extension": (b"\x80\x02\x82\x01.", "not a readable pickle"),
    "build": (b"\x80\x02}}b.", "not a readable pickle"),
    "newobj": (b"\x80\x02K\x01)\x81.", "not a readable pickle"),
    "reduce": (b"\x80\x02K\x01)R.", "not a readable pickle"),
    "long-text": (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "not a readable pickle"),
    "long-frame": (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.", "not a readable pickle"),
    "long-number": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "not a readable pickle"),
    "memo": (b"]r\xff\xff\xff\x0f.", "more memory than the limit"),
    "deep-lists": (b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", "holds a list of list"),
    "deep-key": (b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.", "SIGSEGV|RecursionError|nested"),
    "laughs": (
        b"\x80\x02]q\x00" + b"".join(b"]q%c(" % (n + 1) + (b"h%c" % n) * 10 + b"e" for n in range(60)) + b".",
        "holds a list of list",
    ),
    "laughing-frames": (
        b"\x80\x02]q\x00" + b"".join(b"]q%c(" % (n + 1) + (b"h%c" % n) * 10 + b"e" for n in range(60))
        + b"}X\x0d\x00\x00\x00device_traces]]}X\x06\x00\x00\x00framesh\x3csaas.",
        "^$",
    ),
    "number": (b"K\x05.", "type int"),
    "future-protocol": (b"\x80\x09.", "not a readable pickle"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_clear_error(tmp_path: Path, loader: SnapshotLoader, name: str) -> None:
    content, words = HOSTILE[name]
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    if words == "^$":
        loader.load(path)  # harmless: what does not look like a frame is left out
        return
    with pytest.raises(SnapshotError, match=words) as caught:
        loader.load(path)
    assert str(path) in caught.value.message
    assert len(caught.value.message) < 500


def test_nothing_in_a_file_is_run(tmp_path: Path, loader: SnapshotLoader, raw: dict[str, Any]) -> None:
    target = tmp_path / "made"
    raw["segments"][0]["frames"] = [Evil(target)]
    for protocol in range(6):
        path = tmp_path / f"{protocol}.pickle"
        path.write_bytes(pickle.dumps(raw, protocol=protocol))
        with pytest.raises(SnapshotError, match="refused"):
            loader.load(path)
    assert not target.exists()


def test_cut_file(tmp_path: Path, loader: SnapshotLoader, raw: dict[str, Any]) -> None:
    path = tmp_path / "a.pickle"
    data = pickle.dumps(raw)
    for size in (1, 2, 11, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(SnapshotError):
            loader.load(path)


def test_not_files(tmp_path: Path, loader: SnapshotLoader) -> None:
    with pytest.raises(SnapshotError, match="No such file"):
        loader.load(tmp_path / "missing")
    with pytest.raises(SnapshotError, match="not a regular file"):
        loader.load(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SnapshotError, match="not a regular file"):
        loader.load(pipe)


def test_decompression_bomb_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pickle.gz"
    path.write_bytes(gzip.compress(bytes(600 * MIB), compresslevel=1))
    with pytest.raises(SnapshotError, match="unfolds to more than"):
        load_snapshot(path, limits=Limits(memory_bytes=400 * MIB))


def test_memory_limit_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(
        pickle.dumps({"segments": [], "device_traces": [[]], "x": [f"{n:032d}" for n in range(300_000)]})
    )
    with pytest.raises(SnapshotError, match="more memory than the limit"):
        load_snapshot(path, limits=Limits(memory_bytes=20 * MIB))
    assert load_snapshot(path).keys == ("segments", "device_traces", "x")


def test_time_limit_holds_and_the_loader_lives_on(tmp_path: Path) -> None:
    # One dictionary many times, each time with the same hundred thousand blocks: small to load, endless to read.
    slow = tmp_path / "slow.pickle"
    block = {"size": 512, "state": "inactive"}
    slow.write_bytes(pickle.dumps({"segments": [{"address": 0, "blocks": [block] * 100_000}] * 3000}))
    good = tmp_path / "good.pickle"
    good.write_bytes(pickle.dumps(training()))
    with SnapshotLoader(limits=Limits(seconds=1.0)) as loader:
        with pytest.raises(SnapshotError, match="within 1 s"):
            loader.load(slow)
        assert loader.load(good).n_events > 0


def test_estimate_grows_with_the_file() -> None:
    assert estimated_bytes(0) < estimated_bytes(100 * MIB) < estimated_bytes(200 * MIB)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with a few bytes changed, cut, doubled or swapped for opcodes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place = rng.randrange(len(out))
        kind = rng.randrange(6)
        if kind == 0:
            out[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[place] = rng.randrange(256)
        elif kind == 2:
            del out[place : place + rng.randrange(1, 30)]
        elif kind == 3:
            out[place:place] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        elif kind == 4:
            out[place] = rng.choice(b"cRbi\x81\x82\x93QP\x8b\x8d\x8e\x95r}](.\x85\x86\x87\x94jhJG")
        else:
            struct.pack_into("<I", out, min(place, len(out) - 4), rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF)))
        if not out:
            return b"."
    return bytes(out)


def test_five_thousand_mutated_copies(tmp_path: Path) -> None:
    rng = random.Random(20)
    originals = [
        pickle.dumps(make(training(steps=1, layers=1)), protocol=protocol)
        for make in (like_torch_2_0, like_torch_2_13, lambda raw: raw)
        for protocol in (0, 2, 4)
    ]
    path = tmp_path / "a.pickle"
    survived = refused = 0
    with SnapshotLoader(limits=Limits(memory_bytes=512 * MIB, seconds=10)) as loader:
        for number in range(5_000):
            path.write_bytes(mutated(originals[number % len(originals)], rng))
            try:
                loader.load(path)
                survived += 1
            except SnapshotError as error:
                refused += bool(error.message)
    assert survived > 100
    assert survived + refused == 5_000
    assert refused > 1000


def scanned(data: bytes) -> Snapshot:
    found = scan(memoryview(data), reference_of, forgetting(data))
    rest, objects = unpickle(found.rest)  # type: ignore[misc]
    return parse_snapshot(rest, runs=ScannedRows(found, objects))


@pytest.mark.parametrize("make", [lambda raw: raw, like_torch_2_13], ids=["plain", "newest"])
@pytest.mark.parametrize("protocol", [4, 5])
def test_scanning_gives_what_unpickling_gives(make: Any, protocol: int) -> None:
    raw = make(training(steps=40, layers=4, oom=True))
    data = pickle.dumps(raw, protocol=protocol)
    found = scan(memoryview(data), reference_of, forgetting(data))
    assert sum(len(run.values[0]) for run in found.runs) > 100
    same(scanned(data), parse_snapshot(raw))


@pytest.mark.parametrize("seed", range(8))
def test_scanning_rows_that_hold_their_stacks_themselves(seed: int) -> None:
    """As torch writes them: one list per allocation, shared by its rows and its block, of frames that all share."""
    rng = random.Random(seed)
    raw = training(steps=40, layers=3)
    lists: dict[Any, Any] = {}
    for number, row in enumerate(raw["device_traces"][0]):
        depth = rng.choice((0, 1, 2, 3, 5))
        made = list(row["frames"][:depth]) if rng.random() < 0.8 else row["frames"]
        row["frames"] = lists.get(row["addr"], made) if row["action"] != "alloc" else made
        lists[row["addr"]] = row["frames"]
        if seed % 2:
            row["pool_id"] = (0, number % 3)
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                block["frames"] = lists[block["address"]]
    order = ["device_traces", "segments"] if seed % 3 else ["segments", "device_traces"]
    raw = {key: raw[key] for key in (*order, "allocator_settings", "external_annotations")}
    data = pickle.dumps(raw, protocol=4)
    found = scan(memoryview(data), reference_of, forgetting(data))
    assert sum(len(run.values[0]) for run in found.runs) > 200
    assert len(found.taken) > 3
    one, other = scanned(data), parse_snapshot(unpickle(data))
    same(one, other)
    for a, b in zip(one.devices, other.devices, strict=True):
        stacks = [one.stacks[stack] for stack in a.blocks.stack.tolist()]
        assert stacks == [other.stacks[stack] for stack in b.blocks.stack.tolist()]


def test_scanning_learns_what_follows_a_list_later_on() -> None:
    raw = training(steps=40)
    for number, row in enumerate(raw["device_traces"][0]):
        row["frames"] = list(row["frames"])
        if number >= 100:
            row["pool_id"] = (0, number)
    data = pickle.dumps(raw, protocol=4)
    found = scan(memoryview(data), reference_of, forgetting(data))
    assert sum(len(run.values[0]) for run in found.runs) > len(raw["device_traces"][0]) - 50
    same(scanned(data), parse_snapshot(unpickle(data)))


_WIDTHS = st.sampled_from([0, 1, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 62) + 5])
_STACKS = [[{"name": f"f{n}", "filename": "a.py", "line": n} for n in range(depth)] for depth in (0, 1, 2, 9)]
_ODD = st.one_of(
    st.none(), st.floats(allow_nan=False), st.text(max_size=90), st.integers(-(1 << 70), 1 << 70)
)


@st.composite
def any_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of one form as torch might write them, mostly; now and then with something odd in one place."""
    has_context, has_pool, is_odd = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 4)) == 0
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        stack = draw(st.sampled_from(_STACKS))
        row: dict[str, Any] = {
            "action": draw(st.sampled_from(["alloc", "free_requested", "free_completed", "snapshot"])),
            "addr": draw(_WIDTHS),
            "size": draw(_WIDTHS),
            "stream": draw(st.sampled_from([0, 0, 0, 300, 1 << 40])),
            "time_us": draw(st.sampled_from([1_700_000_000_000_000, 5])),
            "frames": list(stack) if draw(st.booleans()) else stack,
        }
        if has_context:
            row["compile_context"] = draw(st.sampled_from(["N/A", "", "0/1", "é" * 40]))
        if has_pool:
            row["pool_id"] = draw(st.sampled_from([(0, 0), (0, 300), (7, 70_000), (255, 256)]))
        rows.append(row)
    if is_odd:
        odd = draw(st.sampled_from(rows))
        odd[draw(st.sampled_from(sorted(odd)))] = draw(_ODD)
    return rows


def copied(row: dict[str, Any]) -> dict[str, Any]:
    """A row that shares no text and no pool with others, as torch makes them."""
    fresh = {key: "".join(list(row[key])) for key in ("compile_context",) if isinstance(row.get(key), str)}
    if isinstance(row.get("pool_id"), tuple):
        fresh["pool_id"] = (*list(row["pool_id"]),)
    return {**row, **fresh}


@settings(max_examples=300, deadline=None)
@given(any_rows(), st.integers(4, 20))
def test_scanning_any_rows_gives_what_unpickling_gives(pattern: list[dict[str, Any]], times: int) -> None:
    rows = [copied(row) for _ in range(times) for row in pattern]
    data = pickle.dumps({"device_traces": [rows], "segments": []}, protocol=4)
    try:
        found = scanned(data)
    except (Unscannable, SnapshotError, ValueError, KeyError, TypeError, OverflowError):
        return  # and is unpickled whole
    same(found, parse_snapshot(unpickle(data)))


def test_scanning_gives_up_on_rows_that_hold_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = like_torch_2_0(training(steps=60))
    for row in raw["device_traces"][0]:
        row["frames"] = [dict(frame) for frame in row["frames"]]
    data = pickle.dumps({"device_traces": raw["device_traces"], "segments": raw["segments"]}, protocol=4)
    monkeypatch.setattr("oomscope.core.snapshot.scan.CHUNK", 20_000)
    monkeypatch.setattr("oomscope.core.snapshot.scan.GIVE_UP", 50_000)
    read: list[int] = []
    with pytest.raises(Unscannable):
        scan(memoryview(data), reference_of, read.append)
    assert read[-1] < len(data) // 2


def test_scanning_leaves_other_streams_alone() -> None:
    for data in (
        b"",
        b"\x80\x02.",
        pickle.dumps([1, 2], protocol=4),
        pickle.dumps(training(steps=1), protocol=2),
    ):
        with pytest.raises(Unscannable):
            scan(memoryview(data), reference_of, forgetting(data))


def rows_of_their_own(raw: dict[str, Any]) -> dict[str, Any]:
    """As torch 2.8 and later write rows: each with a stack and a compile context that no other row shares."""
    for row in raw["device_traces"][0]:
        row["compile_context"] = "".join(["N/", "A" if row["size"] % 3 else "B"])
        if row["action"] == "alloc":
            row["frames"] = list(row["frames"])
            row["forward_frames"] = ["".join(['File "model.py", line ', str(row["size"] % 3)])]
    return raw


def test_scanning_rows_that_hold_texts_and_two_lists() -> None:
    raw = rows_of_their_own(training(steps=40, layers=3))
    # One row's text is met again where the unpickler reads: in a block.
    raw["segments"][0]["note"] = raw["device_traces"][0][-1]["compile_context"]
    raw = {key: raw[key] for key in sorted(raw)}
    data = pickle.dumps(raw, protocol=4)
    found = scan(memoryview(data), reference_of, forgetting(data))
    assert sum(len(run.values[0]) for run in found.runs) > 200
    one, other = scanned(data), parse_snapshot(unpickle(data))
    same(one, other)
    for a, b in zip(one.devices, other.devices, strict=True):
        assert a.events.forward_stack is not None
        assert b.events.forward_stack is not None
        told = [one.stacks[stack] for stack in a.events.forward_stack.tolist()]
        assert told == [other.stacks[stack] for stack in b.events.forward_stack.tolist()]


@pytest.mark.parametrize(
    "make", [lambda raw: raw, like_torch_2_13, rows_of_their_own], ids=["plain", "newest", "own"]
)
def test_scanning_damaged_streams_gives_what_unpickling_gives_or_nothing(make: Any) -> None:
    rng = random.Random(5)
    data = pickle.dumps(make(training(steps=20)), protocol=4)
    damage = (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, KeyError, IndexError)
    read = 0
    for _ in range(500):
        damaged = mutated(data, rng)
        try:
            found = scanned(damaged)
        except (Unscannable, SnapshotError, MemoryError, OverflowError, RecursionError, *damage):
            continue  # and is unpickled whole
        same(found, parse_snapshot(unpickle(damaged)))
        read += 1
    assert read > 10


@pytest.mark.parametrize(
    ("name", "rank", "step", "pid"),
    [
        ("r00003-step000120-oom.pickle", 3, 120, None),
        ("rank_7.pickle", 7, None, None),
        ("rank3_memory_snapshot.pickle", 3, None, None),
        ("memory_snapshot_rank-12_step_400.pickle", 12, 400, None),
        ("step_000000000010/000003_step_10.pickle", 3, 10, None),
        ("iteration_25/rank1_memory_snapshot.pickle", 1, 25, None),
        ("snapshot_pid4711_rank0.pkl", 0, None, 4711),
        ("node1_1234.1757044802340508.pickle", None, None, 1234),
        ("oom_snapshot_gpu2.pickle", 2, None, None),
        ("snapshot.pickle", None, None, None),
        ("final_report_8b.pickle", None, None, None),
        ("ep0-ba5-rank3.memory_snapshot.pickle", 3, 5, None),
        ("mem_epoch3_step20_rank1.pickle", 1, 20, None),
        ("mem_epoch3.pickle", None, 3, None),
        ("local_rank0_rank5.pickle", 5, None, None),
        ("cuda:1.pickle", 1, None, None),
        ("rank_7/step_40/oom.pickle", 7, 40, None),
    ],
)
def test_names(name: str, rank: int | None, step: int | None, pid: int | None) -> None:
    found = identity_of(Path("/x") / name)
    assert (found.rank, found.step, found.pid) == (rank, step, pid)


def test_folder_is_ordered_by_step_and_rank(tmp_path: Path) -> None:
    for step in (20, 3):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        for rank in (10, 2):
            (folder / f"rank_{rank}.pickle").touch()
    (tmp_path / "notes.txt").touch()
    found = [(identity_of(path).step, identity_of(path).rank) for path in snapshot_files(tmp_path)]
    assert found == [(3, 2), (3, 10), (20, 2), (20, 10)]


def test_scrub_keeps_the_graph(tmp_path: Path, loader: SnapshotLoader) -> None:
    raw = training(steps=3)
    source, target = tmp_path / "a.pickle", tmp_path / "b.pickle"
    source.write_bytes(pickle.dumps(raw))
    raw["note"] = "made by alice, not malice"
    source.write_bytes(pickle.dumps(raw))
    done = loader.convert(source, target, scrub=True)
    assert done["replaced"] == {"alice": "user01"}
    data = target.read_bytes()
    assert data[:2] == b"\x80\x04"
    assert b"/home/alice" not in data
    assert b"not malice" in data
    before, after = pickle.loads(source.read_bytes()), pickle.loads(data)
    assert shape(before) == shape(after)
    one, other = parse_snapshot(before), parse_snapshot(after)
    assert np.array_equal(one.devices[0].events.stack, other.devices[0].events.stack)
    assert np.array_equal(one.devices[0].events.address, other.devices[0].events.address)


def shape(raw: Any) -> list[int]:
    """Order in which containers are met for the first time, by identity: the sharing of objects."""
    seen: dict[int, int] = {}
    order, waiting = [], [raw]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (dict, list, tuple)):
            new = id(item) not in seen
            order.append(seen.setdefault(id(item), len(seen)))
            if new:
                waiting.extend(item.values() if isinstance(item, dict) else item)
    return order
