"""Write a DeepSpeed configuration with another ZeRO stage, made from an existing one, to standard output."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from oomscope.units import format_bytes
from oomscope_deepspeed import OFFLOADS, bytes_at_rest, next_configuration


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 when the configuration cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m oomscope_deepspeed", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--offload", action="append", default=[], choices=OFFLOADS)
    parser.add_argument(
        "--parameters", type=float, help="of the model: print what a GPU holds at rest to stderr"
    )
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        config = json.loads(options.config.read_text(encoding="utf-8"))
        made = next_configuration(config, options.stage, tuple(options.offload))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{options.config}: {error}\n")
        return 2
    if options.parameters:
        held = bytes_at_rest(int(options.parameters), options.ranks, options.stage, tuple(options.offload))
        sys.stderr.write(f"at rest on each GPU: {format_bytes(held)}\n")
    sys.stdout.write(json.dumps(made, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
