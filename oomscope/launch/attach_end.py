"""How a job that we only attached to has ended: what its processes, the kernel and torchelastic left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oomscope.collect import outside
from oomscope.collect.base import Record
from oomscope.collect.recorder import read_host_records
from oomscope.launch.attachment import Attachment, name_of


def how_it_ended(attempt_dir: Path, ranks: Sequence[Attachment]) -> list[outside.Fact]:
    """Facts about the end from outside; also sets each rank's `exit_status`."""
    records: list[Record] = read_host_records(attempt_dir)
    statuses = outside.exit_statuses(records)
    pids = {each.rank.pid for each in ranks}
    facts = []
    for each in ranks:
        each.exit_status = statuses.get(each.rank.pid)
        if each.last_error is not None:
            text = f"{name_of(each)}: {each.last_error}"
            facts.append(outside.Fact("exception", text, "torchelastic error file"))
    killed = [status for pid, status in statuses.items() if pid in pids and status is not None and status < 0]
    if (kill := outside.host_oom_kill(records, pids, killed[0] if killed else None)) is not None:
        facts.append(kill)
    facts += [outside.exit_meaning(status) for status in dict.fromkeys(killed) if not facts]
    if (full := outside.shared_memory_full(records)) is not None:
        facts.append(full)
    return facts + outside.xids(records)


def exit_code(ranks: Sequence[Attachment]) -> int | None:
    """Of the first rank that failed, else 0; None when no status was read."""
    statuses = [each.exit_status for each in ranks if each.exit_status is not None]
    return next((status for status in statuses if status != 0), statuses[0] if statuses else None)
