"""What was seen from outside the job: host memory, cgroup, loader workers, GPU processes, earlier predictions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oomscope.collect import outside
from oomscope.collect.recorder import node_name
from oomscope.core.diagnosis.evidence import KILLED_CODES, Fact, FixOutcome, HostFact, ProcessFact, RankFact
from oomscope.core.series.trend import judge
from oomscope.live.evidence_ranks import integer
from oomscope.protocol import layout
from oomscope.store.files import read_json
from oomscope.units import format_bytes

Record = Mapping[str, Any]
MAX_BYTES = 64 << 20
"""Of each host file only the end is read beyond this."""


def read_host(folder: Path, host: str = "") -> list[Record]:
    """Records of `folder/host/*.jsonl` in order of time; lines that do not parse are left out.

    A job of several nodes has a file for each, and pids mean something on one of them only: with `host`, the others
    are left out.
    """
    found: list[Record] = []
    paths = sorted((folder / layout.HOST_DIR).glob("*.jsonl"))
    own = node_name(host)
    here = [path for path in paths if host and own in (path.stem, path.stem.rpartition("-node")[0])]
    for path in here or paths:
        try:
            with path.open("rb") as stream:
                stream.seek(max(0, path.stat().st_size - MAX_BYTES))
                lines = stream.read().split(b"\n")
        except OSError:
            continue
        for line in lines:
            try:
                record = json.loads(line) if line else None
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("k"), str):
                found.append(record)
    return sorted(found, key=lambda record: integer(record.get("t")) or 0)


def host_fact(
    records: Sequence[Record], rank_of_pid: Mapping[int, int | None], result: Record
) -> HostFact | None:
    """The machine's side; None when nothing was recorded."""
    hosts = [record for record in records if record["k"] == "host"]
    codes = _exit_codes(records, rank_of_pid, result)
    kill, scope = _kill(records, rank_of_pid, codes)
    if not hosts:
        return HostFact(exit_codes=codes, kill=kill, kill_scope=scope) if codes or kill else None
    shm = _least_shm(hosts)
    limit, kills = _cgroup(hosts)
    return HostFact(
        memory_total=integer(hosts[-1].get("mem_total_bytes")),
        memory_available=_least(integer(record.get("mem_available_bytes")) for record in hosts),
        cgroup_limit=limit,
        cgroup_oom_kills=kills,
        shm_total=shm[1],
        shm_free=shm[0],
        worker_bytes=_workers(hosts, rank_of_pid),
        exit_codes=codes,
        kill=kill,
        kill_scope=scope,
    )


#: A bare SIGKILL counts as one for host memory when the machine had less than this share of it left.
SCARCE_SHARE = 0.03


def _kill(
    records: Sequence[Record], rank_of_pid: Mapping[int, int | None], codes: Sequence[tuple[int | None, int]]
) -> tuple[Fact | None, str]:
    """(what shows that a process of the job was killed for host memory, "cgroup" or "machine")."""
    sound = [dict(record) for record in records if _is_sound(record)]
    watched = {integer(row.get("pid")) for record in sound if record["k"] == "host" for row in _rows(record)}
    ended = {integer(record.get("pid")) for record in sound if record["k"] == "process_end"}
    ours = {pid for pid in {*rank_of_pid, *watched, *ended} if pid is not None}
    killed = next((code for _, code in codes if code in KILLED_CODES), None)
    found = outside.host_oom_kill(sound, ours, killed or 0)
    if found is not None:
        of_machine = found.values.get("scope") not in ("cgroup", None)
        return Fact(found.text, found.source), "machine" if of_machine else "cgroup"
    hosts = [record for record in sound if record["k"] == "host"]
    left = _least(integer(record.get("mem_available_bytes")) for record in hosts)
    total = integer(hosts[-1].get("mem_total_bytes")) if hosts else None
    if killed is not None and left is not None and total and left < SCARCE_SHARE * total:
        text = f"a process was killed with SIGKILL while {format_bytes(left)} of {format_bytes(total)} of host memory "
        return Fact(text + "were left", "exit status, host memory", left), "machine"
    return None, ""


def _is_sound(record: Record) -> bool:
    """Whether the numbers that are compared are numbers: the files come from elsewhere."""
    group = record.get("cgroup")
    numbers = [record.get("t"), record.get("anon_rss_bytes", 0), record.get("shmem_rss_bytes", 0)]
    if isinstance(group, dict):
        numbers.append(group.get("oom_kills", 0))
    return all(integer(value) is not None for value in numbers)


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _rows(record: Record) -> list[Record]:
    rows = record.get("processes")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _least_shm(hosts: Sequence[Record]) -> tuple[int | None, int | None]:
    """(free, total) of /dev/shm at its fullest, as the job's processes see it."""
    seen = [
        (free, total)
        for record in hosts
        for row in (record, *_rows(record))
        if (total := integer(row.get("shm_total_bytes")))
        and (free := integer(row.get("shm_free_bytes"))) is not None
    ]
    return min(seen, key=lambda pair: pair[0] / pair[1], default=(None, None))


def _cgroup(hosts: Sequence[Record]) -> tuple[int | None, int | None]:
    """(limit, kills while the job ran) of the job's cgroup."""
    groups = [record["cgroup"] for record in hosts if isinstance(record.get("cgroup"), dict)]
    if not groups:
        return None, None
    first, last = groups[0], groups[-1]
    same = first.get("path") == last.get("path")
    rise = (integer(last.get("oom_kills")) or 0) - (integer(first.get("oom_kills")) or 0)
    return integer(last.get("limit_bytes")), max(0, rise) if same else None


def _workers(hosts: Sequence[Record], rank_of_pid: Mapping[int, int | None]) -> Any:
    """Trend of the summed private memory of watched processes that are no ranks; None without such processes."""
    sums = []
    for record in hosts:
        rows = [row for row in _rows(record) if integer(row.get("pid")) not in rank_of_pid]
        own = [integer(row.get("private_bytes")) for row in rows]
        known = [each for each in own if each is not None]
        if known and len(known) == len(own):
            sums.append(sum(known))
    return judge(range(len(sums)), sums) if sums else None


def _exit_codes(
    records: Sequence[Record], rank_of_pid: Mapping[int, int | None], result: Record
) -> tuple[tuple[int | None, int], ...]:
    """(rank, exit code) of processes that did not end well; signals are negative."""
    found: list[tuple[int | None, int]] = []
    for record in records:
        code = integer(record.get("status")) if record["k"] == "process_end" else None
        if code:
            pid = integer(record.get("pid"))
            found.append((rank_of_pid.get(pid) if pid is not None else None, code))
    signal, code = integer(result.get("signal")), integer(result.get("exit_code"))
    if signal:
        found.append((integer(result.get("first_failing_rank")), -signal))
    elif code:
        found.append((integer(result.get("first_failing_rank")), code))
    return tuple(dict.fromkeys(found))


def process_facts(
    records: Sequence[Record], rank_of_pid: Mapping[int, int | None], ordinals: Mapping[str, int]
) -> tuple[ProcessFact, ...]:
    """The most that each process held of each GPU while the job ran.

    Args:
        records: of the host files.
        rank_of_pid: the job's own processes.
        ordinals: GPU UUID -> CUDA ordinal inside the job, where a rank uses that GPU.
    """
    most: dict[tuple[str, int], ProcessFact] = {}
    for record in records:
        uuid, index = record.get("uuid"), integer(record.get("gpu"))
        if record["k"] != "gpu" or not isinstance(uuid, str) or index is None:
            continue
        for row in _rows(record):
            pid, used = integer(row.get("pid")), integer(row.get("used_bytes"))
            if pid is None or used is None:
                continue
            known = most.get((uuid, pid))
            if known is None or used > known.bytes:
                rank = rank_of_pid.get(pid)
                name = str(row.get("name") or "")
                most[uuid, pid] = ProcessFact(ordinals.get(uuid, index), pid, used, name, rank)
    own = set(rank_of_pid)
    kept = [fact for fact in most.values() if fact.rank is not None or fact.pid not in own]
    return tuple(sorted(kept, key=lambda fact: (fact.gpu, -fact.bytes)))


def outcomes(folder: Path) -> tuple[FixOutcome, ...]:
    """What the fixes of this attempt saved, against what was predicted before it started."""
    info = read_json(folder / layout.ATTEMPT_FILE) or {}
    fixes = [str(each.get("id") if isinstance(each, dict) else each) for each in _list(info.get("fixes"))]
    if not fixes or not folder.name.isdigit():
        return ()
    before = folder.parent / f"{int(folder.name) - 1:0{len(folder.name)}d}"
    was, now = _peak(before), _peak(folder)
    predicted = _predicted(read_json(before / layout.FIXES_FILE) or {}, set(fixes))
    if was is None or now is None or predicted is None:
        return ()
    # The earlier attempt failed below what it needed, so its own peak understates the saving on both sides alike.
    need = max(was, integer((read_json(before / layout.FIXES_FILE) or {}).get("peak_reserved_bytes")) or 0)
    return (FixOutcome("+".join(fixes), need - predicted, need - now),)


def packed_need_bytes(folder: Path) -> int | None:
    """What the job needs with expandable segments, from this attempt's own predictions; None before there are any."""
    found = read_json(folder / layout.FIXES_FILE) or {}
    if not str(found.get("basis")).startswith("simulated device"):
        return None
    return _predicted({"fixes": found.get("fixes")}, {"expandable"})


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _peak(folder: Path) -> int | None:
    ranks = _list((read_json(folder / layout.RESULT_FILE) or {}).get("ranks"))
    peaks = [integer(r.get("peak_reserved_bytes")) for r in ranks if isinstance(r, dict)]
    return max((peak for peak in peaks if peak is not None), default=None)


def _predicted(found: Record, fixes: set[str]) -> int | None:
    for plan in _list(found.get("plans")):
        if isinstance(plan, dict) and set(_list(plan.get("fixes"))) == fixes:
            return _reserved(plan.get("predicted"))
    for fix in _list(found.get("fixes")):
        if isinstance(fix, dict) and {fix.get("id")} == fixes:
            return _reserved(fix.get("predicted"))
    return None


def _reserved(predicted: Any) -> int | None:
    return integer(predicted.get("peak_reserved_bytes")) if isinstance(predicted, dict) else None


def pids(files: Iterable[Sequence[Record]], facts: Iterable[RankFact]) -> dict[int, int | None]:
    """Process id -> rank, of the job's own processes."""
    found: dict[int, int | None] = {}
    for records, fact in zip(files, facts, strict=True):
        hello = next((record for record in records if record.get("k") == "hello"), {})
        pid = integer(hello.get("pid"))
        if pid is not None:
            found[pid] = fact.rank if fact.rank is not None else 0
    return found


def ordinals(files: Iterable[Sequence[Record]]) -> dict[str, int]:
    """GPU UUID -> CUDA ordinal, as the ranks report them."""
    found: dict[str, int] = {}
    for records in files:
        for record in records:
            uuid, device = record.get("gpu_uuid"), integer(record.get("device"))
            if record.get("k") == "rank" and isinstance(uuid, str) and device is not None:
                found[uuid] = device
    return found
