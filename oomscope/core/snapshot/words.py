"""Words of the command line that name moments and rankings; apart, because `--help` is shown without numpy."""

from __future__ import annotations

FORMS = "auto, peak, end, oom, step:N or event:N"
"""Names of moments; see `moments.moment`."""

RANKINGS = ("stack", "line", "module", "size")
"""What live memory can be ranked by."""
