"""`python -m oomscope.simulate`."""

from __future__ import annotations

from .runner import main

main()
