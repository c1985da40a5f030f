# ruff: noqa: T201, BLE001
"""Runs every function named check_… of a script, and prints one line for each."""

import sys
import traceback
import warnings


def run_all(namespace):
    warnings.simplefilter("ignore")
    for name, function in list(namespace.items()):
        if not name.startswith("check_"):
            continue
        try:
            function()
        except BaseException as problem:
            traceback.print_exc()
            text = f"{type(problem).__name__}: {problem}".replace("\n", " ")
            print(f"check {name}: {text[:500]}", flush=True)
        else:
            print(f"check {name}: ok", flush=True)
    sys.stdout.flush()
