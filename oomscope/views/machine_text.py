"""The machine as lines of text, and the pieces of a line that the screen shows too."""

from __future__ import annotations

from typing import Any

from oomscope.collect.base import Record
from oomscope.units import GIB, format_bytes
from oomscope.views.machine import GpuRow, MachineView, ProcessRow
from oomscope.views.wording import short_gpu


def bar(row: GpuRow, width: int) -> list[tuple[str, str]]:
    """Memory of a GPU by owner in `width` cells: (text, memory class) from left to right.

    Glyphs carry the meaning without colour: █ torch allocated, ▒ torch cached, ▓ other memory of training jobs (all of
    it where no agent tells), ░ other processes and what nobody accounts for, · free.
    """
    total = row.total_bytes
    if not total or row.used_bytes is None:
        return [(" " * width, "free")]
    known = row.allocated_bytes + row.cached_bytes + row.other_cuda_bytes
    parts = (
        ("█", "allocated", row.allocated_bytes),
        ("▒", "inactive", row.cached_bytes),
        ("▓", "baseline", row.other_cuda_bytes),
        ("░", "other", max(0, row.used_bytes - known)),
    )
    out, done, edge = [], 0, 0
    for glyph, name, size in parts:
        done += size
        # Round the edges, not the parts: the bar must end where the used memory ends.
        end = min(width, round(done / total * width))
        if size and end == edge and edge < width:
            end = edge + 1  # something is there
        out.append((glyph * (end - edge), name))
        edge = end
    out.append(("·" * (width - edge), "free"))
    return [(text, name) for text, name in out if text]


def value(number: Any, unit: str = "", scale: float = 1.0) -> str:
    """A reading as text; "-" when the hardware does not answer."""
    return "-" if number is None else f"{number / scale:.0f}{unit}"


def power_text(record: Record) -> str:
    if record.get("power_mw") is None:
        return "-"
    limit = record.get("power_limit_mw")
    return f"{record['power_mw'] / 1000:.0f}" + (f"/{limit / 1000:.0f}" if limit else "")


#: Reasons of the driver for a lower clock, in words. Source: nvml.h, nvmlClocksEventReason*.
_REASONS = {
    "idle": "idle",
    "app_clocks": "clocks set by the user",
    "sw_power_cap": "power cap",
    "hw_slowdown": "slowed by hardware",
    "sync_boost": "sync boost",
    "sw_thermal": "hot",
    "hw_thermal": "too hot",
    "hw_power_brake": "power brake",
    "display_clocks": "display clocks",
}


def slower(record: Record) -> str:
    """Why the clock is lowered, in words; "" when it is not."""
    return ", ".join(_REASONS.get(reason, reason) for reason in record.get("throttle") or ())


def gpu_name(row: GpuRow) -> str:
    """The model; an instance of MIG as its profile, below its GPU."""
    name = short_gpu(row.name)
    if row.record.get("gpu_instance") is None:
        return name
    return "└ " + name.partition(" MIG ")[2] if " MIG " in name else f"└ {name}"


def command_of(process: ProcessRow) -> str:
    """The command line without the folder of its program, which is the longest and least telling part of it."""
    if process.command.startswith("["):  # a name of the kernel's, not a path
        return process.command
    program, blank, rest = process.command.partition(" ")
    return program.rpartition("/")[2] + blank + rest


def who(process: ProcessRow) -> str:
    """Job and rank, as in "train.py r3"; "-" for a process of no training job."""
    if process.job is None:
        return "-"
    number = "?" if process.rank is None else process.rank
    return f"{process.job} r{number}" + (" worker" if process.is_worker else "")


def machine_lines(view: MachineView) -> list[str]:
    """The machine for people, 100 columns."""
    head = f"{view.host}" + (f" · driver {view.driver}" if view.driver else "")
    available, total = view.memory.get("mem_available_bytes"), view.memory.get("mem_total_bytes")
    if total:
        head += f" · host memory {format_bytes(total - (available or 0), 1)} of {format_bytes(total, 1)}"
    lines = [head, ""]
    if view.gpus:
        lines.append(
            f"{'gpu':<5}{'name':<22}{'util':>5}{'memory GiB':>14}  {'':<24}{'°C':>4}{'W':>9}{'MHz':>6}  state"
        )
        lines += [_gpu_line(row) for row in view.gpus]
        lines.append(f"{'':46}█ allocated ▒ cached ▓ rest of jobs ░ others · free")
        lines.append("")
    processes = [(row, process) for row in view.gpus for process in row.processes]
    if processes:
        lines.append(
            f"{'gpu':<5}{'pid':>8} {'user':<10}{'job':<20}{'memory':>11}{'allocated':>11}{'cached':>11}  command"
        )
        lines += [_process_line(row, process) for row, process in processes]
        lines.append("")
    lines += [f"! {note}" for note in view.notes]
    return lines


def _gpu_line(row: GpuRow) -> str:
    record = row.record
    used = "-" if row.used_bytes is None else f"{row.used_bytes / GIB:.1f}"
    state = row.state if not row.stale else "stale"
    if row.state == "ok":
        state = slower(record) or state
    return (
        f"{row.label:<5}{gpu_name(row)[:21]:<22}{value(record.get('utilization_pct'), '%'):>5}"
        f"{used + '/' + format(row.total_bytes / GIB, '.1f'):>14}  {''.join(text for text, _ in bar(row, 24)):<24}"
        f"{value(record.get('temperature_c')):>4}{power_text(record):>9}{value(record.get('sm_clock_mhz')):>6}  {state}"
    )


def _process_line(row: GpuRow, process: ProcessRow) -> str:
    def size(count: int | None) -> str:
        return "-" if count is None else format_bytes(count, 1)

    cached = None
    if process.reserved_bytes is not None and process.allocated_bytes is not None:
        cached = process.reserved_bytes - process.allocated_bytes
    mark = "" if process.visible else "*"
    return (
        f"{row.label:<5}{str(process.pid) + mark:>8} "
        f"{process.user[:9]:<10}{who(process)[:19]:<20}{size(process.used_bytes):>11}"
        f"{size(process.allocated_bytes):>11}{size(cached):>11}  {command_of(process)[:60]}"
    )
