"""How numbers and states are worded, the same on every screen and in plain text.

Device numbers of a simulated card are *simulated*; numbers of a real process are *measured*; what a fix would
give is *predicted*. Sizes are binary and written with one or two decimals of a GiB.
"""

from __future__ import annotations

from oomscope.units import GIB, MIB, format_bytes

SIMULATED = "simulated"
MEASURED = "measured"


def kind_of_number(simulated: bool) -> str:
    """The word for a number that a run reached."""
    return SIMULATED if simulated else MEASURED


def gib(count: float | None, digits: int = 1) -> str:
    """`count` bytes as a bare number of GiB, "–" when unknown; for columns whose heading names the unit."""
    return "–" if count is None else f"{count / GIB:.{digits}f}"


def size(count: float | None) -> str:
    """`count` bytes with its unit, "unknown" for None."""
    return "unknown" if count is None else format_bytes(count)


def change(count: int, digits: int = 2) -> str:
    """A difference in bytes as a bare number of GiB with its sign, "0" when it is less than the digits show."""
    shown = f"{count / GIB:+.{digits}f}"
    return "0" if float(shown) == 0 else shown.replace("-", "−")


def short_size(count: float | None) -> str:
    """`count` bytes with its unit and no more digits than it has: "768 MiB", "4.61 GiB"."""
    number, _, unit = size(count).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}".rstrip()


def per_step(change: float | None) -> str:
    """A change in bytes per step as GiB with a sign, "–" when unknown; MiB when that says more."""
    if change is None:
        return "–"
    if abs(change) < 512:
        return "0"
    if abs(change) < 0.05 * GIB:
        return f"{change / MIB:+.1f}M".replace("-", "−")
    return f"{change / GIB:+.2f}".replace("-", "−")


def short_gpu(name: str) -> str:
    """The name without the maker and the kind of memory: "NVIDIA H100 80GB HBM3" becomes "H100 80GB"."""
    for part in ("NVIDIA ", "GeForce ", "Tesla ", " HBM3", " HBM2e"):
        name = name.replace(part, "")
    return name


def below(path: str, folder: str) -> str:
    """`path` relative to `folder` when it lies in it: shorter, and as exact for whoever runs the job from there."""
    prefix = folder.rstrip("/") + "/"
    return path[len(prefix) :] if folder and path.startswith(prefix) else path


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def plural(count: int, one: str, many: str = "") -> str:
    """`count` with the right form of the noun: "1 rank", "8 ranks"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def effort(seconds: float | None) -> str:
    """A duration of work as people say it: "30 s", "5 min", "2 h"."""
    if seconds is None:
        return "–"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def factor(value: float | None) -> str:
    """A time factor as a change: 1.3 is "+30 % time", 0.9 "−10 % time"."""
    if value is None:
        return "–"
    change = round((value - 1) * 100)
    if change == 0:
        return "same"
    return f"{change:+d} %".replace("-", "−")


def confidence_word(value: float | None) -> str:
    """high, medium or low; thresholds as in the docs of the rules."""
    if value is None:
        return "unknown"
    return "high" if value >= 0.85 else "medium" if value >= 0.6 else "low"
