"""Bytes to text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.units import format_bytes, format_change, gib, parse_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (5 << 20, "5.00 MiB"),
        (3 << 29, "1.50 GiB"),
        (-(1 << 30), "-1.00 GiB"),
        (1 << 41, "2.00 TiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_a_change_has_its_sign() -> None:
    assert format_change(1 << 30) == "+1.00 GiB"
    assert format_change(-(3 << 30)) == "−3.00 GiB"
    assert format_change(0) == "±0 B"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 << 30),
        ("24 g", 24 << 30),
        ("80GB", 80 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("4096", 4096),
        (".5k", 512),
    ],
)
def test_parse_size(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-3GiB", "1e9", "0x10", "nan"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_formatting_keeps_the_value_within_its_digits(count: int) -> None:
    assert parse_size(format_bytes(count, 6)) == pytest.approx(count, rel=1e-6, abs=1)


def test_gib() -> None:
    assert gib(1 << 30) == 1.0
