"""Which card to simulate for a job that ran on a real one, and whether that is possible at all."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from oomscope.errors import OomscopeError
from oomscope.launch.selftest import check_simulator
from oomscope.simulate.cards import CARDS, Card, resolve


def card_of_job(records: Sequence[Mapping[str, Any]], command: Sequence[str]) -> tuple[Card | None, str]:
    """The card that a rank named in its records, when the job's interpreter can simulate one.

    Returns:
        The card, and an empty text; or None, and why there is none.
    """
    rank = next((record for record in reversed(records) if record.get("k") == "rank"), None)
    name, capacity = (rank or {}).get("gpu_name"), (rank or {}).get("capacity_bytes")
    if not capacity:
        return None, "the job used no GPU"
    try:
        check_simulator(_interpreter(command))
    except OomscopeError as error:
        return None, error.message
    return next((card for card in _cards() if card.product == name), None) or resolve(str(int(capacity))), ""


def _cards() -> Sequence[Card]:
    return tuple(CARDS.values()) if isinstance(CARDS, Mapping) else tuple(CARDS)


def _interpreter(command: Sequence[str]) -> str:
    first = command[0] if command else ""
    return first if "python" in first.rpartition("/")[2] else sys.executable
