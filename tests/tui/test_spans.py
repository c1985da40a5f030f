"""Pieces of a line count cells, not characters: wide, combining and right-to-left text keep the columns straight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from oomscope.tui.ascii import to_ascii
from oomscope.tui.widgets.spans import clip, clip_left, fit, fit_left, wrap

TEXTS = ("train.py", "訓練スクリプト.py", "モデル🚀の重み", "שלום/עולם.py", "a" * 90, "")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [1, 2, 7, 8, 20])
def test_columns_have_exactly_their_width(text: str, width: int) -> None:
    assert cell_len(fit(text, width)) == width
    assert cell_len(fit_left(text, width)) == width
    assert cell_len(clip(text, width)) <= width
    assert cell_len(clip_left(text, width)) <= width


def test_cut_from_the_left_keeps_the_end() -> None:
    assert clip_left("/home/ada/訓練スクリプト.py", 12) == "…クリプト.py"
    assert clip_left("/home/ada/train.py", 9) == "…train.py"


@given(st.text(alphabet="ab 訓練🚀é-/", max_size=80), st.integers(4, 30))
def test_wrapped_text_loses_nothing_and_fits(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


@given(st.text(alphabet="aé訓🚀█▲→ש\u0301", max_size=40))
def test_ascii_takes_as_many_cells(text: str) -> None:
    shown = to_ascii(text)
    assert shown.isascii()
    assert len(shown) == sum(cell_len(character) for character in text)
