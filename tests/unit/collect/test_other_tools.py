"""Proof that the fake NVIDIA library is like the real one: other people's tools run on it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def run(fake, *arguments):
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env=fake.environ() | {"TERM": "xterm", "COLUMNS": "160"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def need(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def test_gpustat(machine):
    need("gpustat")
    fake = machine(3)
    fake[0].used, fake[0].util, fake[0].temp = 70 << 30, 98, 71
    fake.processes(0, [{"pid": os.getpid(), "used_mib": 69000}])
    done = run(fake, "gpustat", "--json")
    assert done.returncode == 0, done.stderr
    gpus = json.loads(done.stdout)["gpus"]
    assert [gpu["index"] for gpu in gpus] == [0, 1, 2]
    assert gpus[0]["utilization.gpu"] == 98
    assert gpus[0]["temperature.gpu"] == 71
    assert gpus[0]["processes"][0]["gpu_memory_usage"] == 69000


@pytest.mark.parametrize("driver", [470, 535, 580])
def test_nvitop(machine, driver):
    need("nvitop")
    fake = machine(2, "V100" if driver == 470 else "H100", driver)
    fake[1].used = 7 << 30
    fake.processes(1, [{"pid": os.getpid(), "used_mib": 6000}])
    done = run(fake, "nvitop", "--once", "--no-unicode")
    assert done.returncode == 0, done.stderr
    assert ("V100" if driver == 470 else "H100") in done.stdout
    assert str(os.getpid()) in done.stdout
