"""The live bytes of a script on the CPU as torch's own profiler counts them; prints one JSON object.

truth.py FIX,… script.py arguments
"""

import json
import runpy
import sys

import torch
from torch.profiler import ProfilerActivity, profile

from oomscope.agent.apply import apply


def peak(prof) -> int:
    """Highest sum of all allocations and frees in the order in which they happened."""
    found = []
    queue = list(prof.profiler.kineto_results.experimental_event_tree())
    while queue:
        event = queue.pop()
        queue += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    level = highest = 0
    for _, size in sorted(found, key=lambda pair: pair[0]):
        level += size
        highest = max(highest, level)
    return highest


def main() -> None:
    fixes, script = sys.argv[1], sys.argv[2]
    sys.argv = sys.argv[2:]
    torch.set_num_threads(1)
    records = []
    runtime = apply({"fixes": [{"id": each} for each in fixes.split(",") if each]}, records.append)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        runpy.run_path(script, run_name="__main__")
    runtime.undo()
    states = {r["id"]: r["state"] for r in records if r["k"] == "fix"}
    sys.stdout.write(json.dumps({"peak": peak(prof), "states": states}) + "\n")


if __name__ == "__main__":
    main()
