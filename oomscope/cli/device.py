"""`--device sim:CARD` and `--ranks 0,7`, as `run` and `fit` take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomscope.errors import UsageError

if TYPE_CHECKING:
    from oomscope.simulate.cards import Card


def simulated_card(device: str) -> Card:
    """The card that `--device` names.

    Raises:
        UsageError: not a simulated one, or an unknown card: the nearest is named and all are listed.
    """
    from oomscope.simulate import cards

    if not device.startswith("sim:"):
        raise UsageError(
            f"--device {device}: only simulated cards can be named", hint="--device sim:a100-40g"
        )
    try:
        return cards.resolve(device)
    except ValueError as error:
        raise UsageError(str(error)) from error


def rank_numbers(text: str | None) -> tuple[int, ...] | None:
    """The numbers of `--ranks`; None when it was not given.

    Raises:
        UsageError: not numbers.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--ranks {text}: not numbers", hint="for example --ranks 0,7") from None
