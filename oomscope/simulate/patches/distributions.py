"""Distributions check their parameters and samples; values that are not known are taken for valid ones."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def install(mode: Any) -> None:
    """Let a check fail only where all that it looked at is known."""
    distribution = torch.distributions.Distribution
    plain_init, plain_validate = distribution.__init__, distribution._validate_sample

    def unknown(values: Any) -> bool:
        fakes = [each for each in values if isinstance(each, FakeTensor)]
        return any(mode.values.get(each) is None or mode.values.is_assumed(each) for each in fakes)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            plain_init(self, *args, **kwargs)
        except ValueError as problem:  # by then all attributes are set
            if "to satisfy the constraint" not in str(problem) or not unknown(vars(self).values()):
                raise

    def validate(self: Any, value: Any) -> None:
        try:
            plain_validate(self, value)
        except ValueError as problem:
            if "to be within the support" not in str(problem) or not unknown((value, *vars(self).values())):
                raise

    distribution.__init__, distribution._validate_sample = init, validate
