"""How good is the diagnosis on public reports whose causes were established? Prints figures and the confusion table.

    python benchmarks/diagnosis.py [--details] [CASES_FOLDER]

Only what a person in front of the failure has is given to the rules: the stated facts and the numbers of the message,
and in a second table also the description and the time. The established cause serves for comparison alone.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from oomscope.core.diagnosis import Diagnosis, Evidence, diagnose
from oomscope.core.diagnosis.arithmetic import analyse
from oomscope.core.diagnosis.log import scan_text
from oomscope.core.diagnosis.message import OomMessage
from oomscope.core.diagnosis.model import CONFIDENT, LIKELY
from oomscope.core.diagnosis.words import from_when, from_words
from oomscope.units import GIB

ROOT = Path(__file__).resolve().parents[1]
FIELDS = {
    "tried": "tried_bytes", "total": "capacity_bytes", "alloc": "allocated_bytes", "free": "free_bytes",
    "reserved": "reserved_bytes", "unalloc": "reserved_unallocated_bytes",
}  # fmt: skip


def message_of(fields: dict[str, float], text: str) -> OomMessage | None:
    """The numbers of a report as a message; None when it has none."""
    found = [m for m in scan_text(text).messages if m.is_oom or m.kind.endswith("maybe_oom")]
    if fields.get("tried") is None:
        return found[0] if found else None
    values: dict[str, Any] = {
        FIELDS[name]: round(value * GIB) for name, value in fields.items() if name in FIELDS
    }
    numbers = OomMessage("cuda_oom", backend="cuda", **values)
    if found and found[0].backend == "cuda":
        return replace(numbers, is_warning=found[0].is_warning, text=found[0].text, frames=found[0].frames)
    return numbers


def evidence_of(row: dict[str, Any], *, everything: bool) -> Evidence:
    """What a person has: facts and numbers, and with `everything` the description and the time as well."""
    text = "" if row["facts"] in ("-", None) else str(row["facts"])
    signals = list(from_words(text))
    if everything:
        signals += [*from_words(str(row["symptom"])), *from_when(str(row.get("when")))]
        text = f"{text}\n{row['symptom']}"
    message = message_of(row.get("oom_fields") or {}, text)
    return Evidence(
        sources=("report",),
        messages=(message,) if message else (),
        message=message,
        arithmetic=analyse(message) if message else None,
        signals=tuple(signals),
    )


def _says_nothing(row: dict[str, Any]) -> bool:
    """The report states neither facts nor numbers."""
    return row["facts"] in ("-", None) and not row.get("oom_fields")


def verdict_of(diagnosis: Diagnosis) -> tuple[str, float]:
    best = diagnosis.verdict
    if best is None or best.finding.confidence < LIKELY:
        return "unknown", 0.0
    return best.rule.cause, best.finding.confidence


def judge(rows: list[dict[str, Any]], *, everything: bool, details: bool) -> Counter[str]:
    """Counts of right, wrong, confidently wrong and unknown; prints the confusion table."""
    counts: Counter[str] = Counter()
    confusion: Counter[tuple[str, str]] = Counter()
    for row in rows:
        cause, confidence = verdict_of(diagnose(evidence_of(row, everything=everything)))
        right = cause in (row["root_cause_class"], row.get("secondary_class"))
        exact = cause == row["root_cause_class"]
        kind = "unknown" if cause == "unknown" else "right" if exact else "secondary" if right else "wrong"
        counts[kind] += 1
        counts["confidently wrong"] += kind == "wrong" and confidence >= CONFIDENT
        if kind != "right":
            confusion[row["root_cause_class"], cause] += 1
        if details and kind != "right":
            print(f"  {row['id']} {kind:9} {row['root_cause_class']} -> {cause} {confidence:.2f}")
            print(f"      {row['symptom']} | {row['facts']} | {row.get('when')} | {row.get('oom_fields')}")
    for (expected, got), count in sorted(
        confusion.items(), key=lambda item: (item[0][1] == "unknown", item[0])
    ):
        print(f"  {expected:24} -> {got:24} {count}")
    return counts


LINE = "2026-01-02 03:04:05,678 INFO trainer: step 1234 loss 2.3456 lr 1e-4 mem 12.3 GiB tokens/s 12345 grad 1.234\n"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
    "of which 256.00 MiB is free. Including non-PyTorch memory, this process has 23.50 GiB memory in use. Of the "
    "allocated memory 22.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.\n"
)


def time_of_explain(megabytes: int = 10) -> float:
    """Seconds of processor time of `oomscope explain` on a log with one error near its end, the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        path.write_text(LINE * (megabytes * 10**6 // len(LINE)) + OOM + LINE * 100, encoding="utf-8")
        best = float("inf")
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [sys.executable, "-m", "oomscope", "explain", str(path)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def main() -> int:
    print(
        f"explain a log of 10 MB: {time_of_explain() * 1000:.0f} ms of processor time (best of 5, limit 300)"
    )
    arguments = [a for a in sys.argv[1:] if not a.startswith("--")]
    folder = Path(
        arguments[0] if arguments else os.environ.get("OOMSCOPE_CASES") or ROOT.parent / "shared" / "cases"
    )
    path = folder / "reports.jsonl"
    if not path.is_file():
        print(f"no collection at {path}; set OOMSCOPE_CASES", file=sys.stderr)
        return 0
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    others = [row for row in rows if not row["repro"]]
    for name, chosen in (("without a runnable example", others), ("all", rows)):
        for everything in (False, True):
            what = "facts, numbers, description, time" if everything else "facts and numbers only"
            print(f"\n{len(chosen)} reports ({name}), {what}")
            counts = judge(chosen, everything=everything, details="--details" in sys.argv)
            silent = 0 if everything else sum(_says_nothing(row) for row in chosen)
            told = (
                f", {counts['right'] / (len(chosen) - silent):.0%} of those that state any" if silent else ""
            )
            print(
                f"  right {counts['right']} ({counts['right'] / len(chosen):.0%}{told}), "
                f"secondary cause {counts['secondary']}, unknown {counts['unknown']}, "
                f"wrong {counts['wrong']} (confidently {counts['confidently wrong']})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
