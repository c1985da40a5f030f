"""A simulated run keeps its hands off the checkpoints of real runs, and leaves none of its own."""

from __future__ import annotations

import errno
import os
import tempfile
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


RENAMER = """
import errno, os, sys, torch
folder, other = sys.argv[1:]
os.chdir(folder)
x = torch.ones(3, device="cuda")
for rename in (os.replace, os.rename):
    torch.save(x, "ckpt.tmp")
    rename("ckpt.tmp", "ckpt.pt")
    assert not os.path.exists("ckpt.tmp")
    assert torch.load("ckpt.pt").shape == (3,)
torch.save(x, "old.tmp")
os.replace("old.tmp", "new.pt")
assert torch.load("new.pt").shape == (3,)
torch.save(x, "far.tmp")
try:
    os.replace("far.tmp", os.path.join(other, "far.pt"))
except OSError as error:
    print("far=" + str(error.errno))
"""


def test_a_file_is_renamed_over_one_that_lies_on_another_file_system(
    simulate_text: Any, tmp_path: Path
) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no file system of its own here")
    with tempfile.TemporaryDirectory(dir=shared) as name:
        folder = Path(name)
        for each in ("ckpt.pt", "old.tmp"):
            torch.save({"real": torch.ones(3)}, folder / each)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        run = simulate_text(RENAMER, str(folder), str(tmp_path), env={"TMPDIR": str(tmp_path)})
        assert run.exit_code == 0, run.stderr
        assert run.value("far") == errno.EXDEV  # as in a run on a card
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


MAKER = """
import os, sys, pathlib, torch
os.makedirs(sys.argv[1])
(torch.ones(8, 8, device="cuda", requires_grad=True) * 2).sum().backward()
"""


@pytest.mark.parametrize("made_before", [True, False])
def test_a_folder_that_the_failed_run_made_is_not_in_the_way(
    made_before: bool, simulate_text: Any, tmp_path: Path
) -> None:
    session, output = tmp_path / "session", tmp_path / "output"
    session.mkdir()
    (session / "session.json").write_text("{}")
    output.mkdir()
    if made_before:
        os.utime(output, (1e9, 1e9))
    run = simulate_text(MAKER, str(output), env={"OOMSCOPE_SESSION": str(session)})
    assert run.exit_code == (1 if made_before else 0), run.stderr
    assert ("FileExistsError" in run.stderr) is made_before
