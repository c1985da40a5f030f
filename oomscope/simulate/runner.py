"""Runs a script on the simulated device without a session: for tests and for debugging.

`python -m oomscope.simulate --card a100-40g --steps 2 script.py args…` prints the two records to stderr, or
appends them to `--records FILE`. The exit status is the script's own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import sys
from typing import Any


class StepsDone(BaseException):
    """Ends the script after the wanted number of optimizer steps; not an error."""


def main(arguments: list[str] | None = None) -> None:
    """Start the device and run the script as `__main__`."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.world_size > 1:
        os.environ.setdefault("WORLD_SIZE", str(options.world_size))
        os.environ.setdefault("RANK", str(options.rank))
    import torch  # the device starts right after it

    session = _start(options)
    if options.history:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=options.history)
    if options.snapshot:
        _dump_when_full(options.snapshot)
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    try:
        runpy.run_path(options.script, run_name="__main__")
    except StepsDone:
        pass
    finally:
        session.end()
    if options.snapshot and not os.path.exists(options.snapshot):
        torch.cuda.memory._dump_snapshot(options.snapshot)


def _start(options: argparse.Namespace) -> Any:
    """Start the device of this process; also called in processes that the script starts."""
    from . import start

    config = {
        "device": options.card,
        "world_size": options.world_size,
        "rank": options.rank,
        "attempt_dir": options.exchange,
        "ranks": list(range(options.world_size)) if options.exchange else None,
        "starter": functools.partial(_start_in_child, options),
    }
    session = start(config, _emitter(options))
    if options.steps:
        _limit_steps(options.steps)
    return session


def _start_in_child(options: argparse.Namespace) -> None:
    from multiprocessing.util import Finalize

    session = _start(options)
    Finalize(None, session.end, exitpriority=-1000)  # multiprocessing leaves without atexit handlers


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m oomscope.simulate", allow_abbrev=False)
    parser.add_argument("--card", default="a100-80g", help="a card's name or a size such as 24GiB")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many optimizer steps")
    parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", 0)))
    parser.add_argument("--exchange", metavar="FOLDER", help="every rank runs, and objects go through it")
    parser.add_argument(
        "--history", type=int, default=0, metavar="N", help="keep the last N allocator events"
    )
    parser.add_argument("--snapshot", metavar="FILE", help="write a snapshot, at an OOM or else at the end")
    parser.add_argument("--records", metavar="FILE", help="append the records there instead of to stderr")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def _emitter(options: argparse.Namespace) -> Any:
    def emit(record: dict[str, Any]) -> None:
        line = json.dumps(record) + "\n"
        if options.records:
            with open(options.records, "a", encoding="utf-8") as file:
                file.write(line)
        else:
            sys.stderr.write(line)

    return emit


def _limit_steps(steps: int) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    done = [0]

    def count(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        done[0] += 1
        if done[0] >= steps:
            raise StepsDone

    register_optimizer_step_post_hook(count)


def _dump_when_full(path: str) -> None:
    import torch

    torch._C._cuda_attach_out_of_memory_observer(lambda *_: torch.cuda.memory._dump_snapshot(path))


if __name__ == "__main__":
    main()
