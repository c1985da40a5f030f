"""Which command-line options of the script change memory: read from its own argument parser as it runs."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from typing import Any

from .runtime import Runtime

#: kind -> pattern over an option's name; the first that matches counts, so the evaluation batch stands first.
_KINDS = (
    ("eval_batch_size", r"(eval|val|test)[-_](batch[-_]?size|bs)"),
    ("batch_size", r"(^|[-_.])(per[-_]device[-_])?(train[-_])?(micro[-_])?(batch[-_]?size|bs|bsz|batch)($|[-_.])"),
    ("accumulation", r"(grad(ient)?[-_])?accum(ulat\w*)?([-_](steps|iter\w*|batches))?"),
    ("amp", r"(^|[-_])(amp|bf16|fp16|half|mixed[-_]precision|precision|dtype)($|[-_])"),
    ("checkpointing", r"(grad(ient)?|activation)[-_]?checkpoint\w*"),
    ("sequence", r"(max[-_])?(seq(uence)?[-_]?len(gth)?|block[-_]size|max[-_]length|context[-_]len\w*)|^seq$"),
    ("image", r"(img|image|crop|input)[-_]?(size|res\w*)"),
    ("optimizer", r"(^|[-_])optim(izer)?($|[-_])"),
    ("workers", r"(num[-_])?workers"),
    ("sharding", r"fsdp|zero[-_]?stage|deepspeed"),
)  # fmt: skip


def classify(options: list[str], dest: str) -> str | None:
    """The kind of memory knob that an option is, or None."""
    names = [option.lstrip("-") for option in options] or [dest]
    for kind, pattern in _KINDS:
        if any(re.search(pattern, name, re.IGNORECASE) for name in names):
            return kind
    return None


def record(runtime: Runtime, sink: list[dict[str, Any]]) -> None:
    """Append each memory knob of the script's own command line to `sink` when it is parsed."""
    original = argparse.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        result = original(self, args, namespace)
        if args is None or list(args) == sys.argv[1:]:
            runtime.guarded("knobs", lambda: sink.extend(_knobs(self, result[0])))
        return result

    runtime.patches.attr(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def _knobs(parser: Any, namespace: Any) -> list[dict[str, Any]]:
    found = []
    for action in parser._actions:
        kind = classify(list(action.option_strings), action.dest)
        value = getattr(namespace, action.dest, None)
        if kind and action.option_strings and isinstance(value, (int, float, str, bool, type(None))):
            found.append(
                {
                    "kind": kind,
                    "options": list(action.option_strings),
                    "value": value,
                    "is_flag": action.nargs == 0,
                }
            )
    return found
