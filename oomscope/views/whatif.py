"""The oomscope.whatif/1 object as rows: what the recorded run would have needed under other allocator settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomscope.protocol import layout
from oomscope.views import wording
from oomscope.views.coerce import flag, integer, items, objects, text, texts


@dataclass(frozen=True)
class Range:
    """A size in bytes, from the kindest to the harshest address model."""

    low: int
    high: int

    def gib(self) -> str:
        """One number when the models agree."""
        low, high = wording.gib(self.low, 2), wording.gib(self.high, 2)
        return low if low == high else f"{low}–{high}"


@dataclass(frozen=True)
class Setting:
    """One allocator configuration. Sizes in bytes."""

    conf: str
    """As one would set it; empty: the defaults."""
    peak: Range | None
    need: Range | None
    """The smallest device on which everything fits; None when it was not searched."""
    retries: int
    fits: bool | None
    is_recorded: bool
    is_recommended: bool

    @property
    def name(self) -> str:
        return self.conf or "defaults"


@dataclass(frozen=True)
class WhatIf:
    """The answer for one device of a snapshot. Sizes in bytes."""

    is_trusted: bool
    """The model reproduced the recorded history exactly; without that nothing is predicted."""
    reason: str
    live_peak_bytes: int | None
    """No setting can need less than this."""
    capacity_bytes: int | None
    settings: tuple[Setting, ...]
    recommended: str | None
    notes: tuple[str, ...]

    def advice(self) -> str:
        """The recommendation, or why there is none, in a sentence."""
        if not self.is_trusted:
            return self.reason or "the model does not reproduce this history, so nothing is predicted"
        if self.recommended is not None:
            return f"with PYTORCH_CUDA_ALLOC_CONF={self.recommended} all that was recorded would have fitted"
        if self.capacity_bytes is not None and (self.live_peak_bytes or 0) > self.capacity_bytes:
            over = wording.size((self.live_peak_bytes or 0) - self.capacity_bytes)
            return f"live blocks alone exceed the card by {over}: this is no matter of settings"
        recorded = next((each for each in self.settings if each.is_recorded), None)
        if recorded is not None and recorded.fits:
            return "it fits as recorded"
        if any(each.fits is None for each in self.settings):
            return "too close to call: it depends on where the driver places segments"
        return "no setting makes it fit"


def read(answer: Mapping[str, Any], device: int | None = None) -> WhatIf | None:
    """The view of one device (default: the first) of an answer; None when there is none."""
    devices = objects(answer, "devices")
    found = next((each for each in devices if device is None or integer(each, "device") == device), None)
    if found is None:
        return None
    recorded, recommended = text(found, "recorded"), found.get("recommended")
    known = isinstance(found.get("recorded"), str)
    return WhatIf(
        is_trusted=bool(flag(answer, "trusted")) and not text(found, "reason"),
        reason=text(found, "reason"),
        live_peak_bytes=integer(found, "live_peak_bytes"),
        capacity_bytes=integer(found, "capacity_bytes"),
        settings=tuple(
            Setting(
                conf=text(each, "conf"),
                peak=_range(each, "peak_reserved_bytes"),
                need=_range(each, "min_capacity_bytes"),
                retries=integer(each, "retries") or 0,
                fits=flag(each, "fits"),
                is_recorded=known and text(each, "conf") == recorded,
                is_recommended=isinstance(recommended, str) and text(each, "conf") == recommended,
            )
            for each in objects(found, "configs")
        ),
        recommended=text(found, "recommended") if isinstance(recommended, str) else None,
        notes=texts(found, "notes"),
    )


def _range(source: Mapping[str, Any], key: str) -> Range | None:
    values = [value for value in items(source, key) if isinstance(value, int) and not isinstance(value, bool)]
    return Range(values[0], values[-1]) if values else None


def snapshot_of(session: Path, attempt: int, rank: int | None) -> Path | None:
    """The snapshot to replay: of `rank` (None: any), one of an out-of-memory error before others, the newest."""
    folder = session / layout.ATTEMPTS_DIR / f"{attempt:03d}" / layout.SNAPSHOTS_DIR
    pattern = "*.pickle*" if rank is None else f"r{rank:05d}-*.pickle*"
    found = [path for path in folder.glob(pattern) if not path.name.endswith(".json")]
    return max(found, key=lambda path: ("-oom." in path.name, path.name), default=None)
