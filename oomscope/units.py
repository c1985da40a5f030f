"""Bytes to text and back; the only place that divides by 1024.

Everything shown is binary ("GiB", as in torch's messages and nvidia-smi); everything stored is an integer of bytes.
"""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))

# Decimal units are accepted on input only: data sheets of cards use "GB".
_FACTORS = {
    "": 1, "b": 1, "byte": 1, "bytes": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*$")


def format_bytes(count: float, digits: int = 2) -> str:
    """`count` bytes as "61.23 GiB"; below 1 KiB as "512 B". Negative values keep their sign."""
    magnitude = abs(count)
    for name, factor in _UNITS:
        if magnitude >= factor:
            return f"{count / factor:.{digits}f} {name}"
    return f"{int(count)} B"


def format_change(count: float, digits: int = 2) -> str:
    """A difference in bytes with an explicit sign: "+0.12 GiB", "−3.40 GiB", "±0 B"."""
    if count == 0:
        return "±0 B"
    sign = "+" if count > 0 else "−"
    return sign + format_bytes(abs(count), digits)


def gib(count: float) -> float:
    """`count` bytes in GiB, for display and axes only."""
    return count / GIB


def parse_size(text: str) -> int:
    """Bytes of "24GiB", "24 GB", "512m" or "1073741824".

    "GiB", "G" and "g" are binary, "GB" is decimal, as on data sheets.

    Raises:
        ValueError: not a size.
    """
    match = _SIZE.match(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not a size: {text!r} (write 24GiB, 512MiB or a number of bytes)")
    return round(float(match.group(1)) * factor)
