"""A simulated run keeps its hands off the checkpoints of real runs, and leaves none of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

SCRIPT = """
import os, shutil, sys, torch
os.chdir(sys.argv[1])
model = torch.nn.Linear(8, 8).cuda()
os.makedirs("new", exist_ok=True)
for step in range(2):
    torch.save(model.state_dict(), "last.tmp")
    os.replace("last.tmp", "last.pt")
    shutil.copyfile("last.pt", "best.pt")
    torch.save(model.state_dict(), f"new/step{step}.pt")
os.rename("new", "kept")
for name in ("last.pt", "best.pt", "kept/step0.pt", "kept/step1.pt"):
    model.load_state_dict(torch.load(name))
torch.save(model.state_dict(), os.path.abspath("old.pt"))
print("weight=" + str(int(torch.load("old.pt", map_location="cpu")["weight"].numel())))
(model(torch.ones(2, 8, device="cuda"))).sum().backward()
"""


def test_files_of_real_runs_stay_and_new_ones_go(simulate_text: Any, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    for name in ("last.pt", "best.pt", "old.pt"):
        torch.save({"real": torch.ones(3)}, folder / name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run = simulate_text(SCRIPT, str(folder))
    assert run.exit_code == 0, run.stderr
    assert run.value("weight") == 64
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert list((folder / "kept").iterdir()) == []
