"""`oomscope fix` on the files of a user: nothing is lost, whatever state they are in."""

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from oomscope.cli.fix import fix
from oomscope.errors import FixError, InputError, PatchDoesNotApply
from oomscope.launch.patches import apply_in_place, make_patches, replace_file, script_of, stage, undo
from oomscope.launch.plan_file import read_plan, write_plan
from oomscope.store.files import write_json
from oomscope.store.session import Session

MODEL = """\
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
TRAIN = """\
# the user's own comment
import torch
from model import Net

model = Net()
losses = []
for x in data:
    loss = model(x).sum()
    loss.backward()
    losses.append(loss)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a script and its model, and a session of a failed run of it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "model.py").write_text(MODEL)
    (folder / "data.txt").write_text("1 2 3")
    os.chmod(folder / "train.py", 0o755)
    old = 1_700_000_000
    for name in ("train.py", "model.py"):
        os.utime(folder / name, (old, old))
    monkeypatch.setenv("OOMSCOPE_HOME", str(tmp_path / "home"))
    session = Session.create(tmp_path / "home", name="train", command=["python", "train.py"], cwd=folder)
    attempt = session.new_attempt()
    attempt.write_info({"command": ["python", "train.py"], "cwd": str(folder), "fixes": []})
    entry = {"applicable": True, "plan": {"env": {}, "runtime": {}, "argv": []}}
    fixes = [{"id": name, **entry} for name in ("leak-detach", "ckpt", "expandable")]
    write_json(attempt.path / "fixes.json", {"schema": "oomscope.fixes/1", "fixes": fixes, "plans": []})
    return folder, session, attempt


def run(*words):
    return CliRunner().invoke(fix, [str(word) for word in words])


def git(folder, *words):
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)


def commit(folder):
    git(folder, "init", "-q")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")


def test_a_patch_of_two_files_is_written_as_a_diff_that_git_takes(project, tmp_path):
    folder, session, _ = project
    commit(folder)
    out = tmp_path / "fix.diff"
    result = run(session.path, "--apply", "leak-detach,ckpt", "--write-patch", out)
    assert result.exit_code == 0, result.output
    assert git(folder, "apply", "--check", str(out)).returncode == 0
    assert git(folder, "apply", str(out)).returncode == 0
    assert "losses.append(loss.detach())" in (folder / "train.py").read_text()
    assert "checkpoint(block, x, use_reentrant=False)" in (folder / "model.py").read_text()
    assert git(folder, "apply", "-R", str(out)).returncode == 0
    assert (folder / "train.py").read_text() == TRAIN


def test_files_are_changed_only_after_a_yes_and_restored_by_undo(project):
    folder, session, attempt = project
    refused = CliRunner().invoke(fix, [str(session.path), "--apply", "leak-detach"], input="n\n")
    assert refused.exit_code != 0
    assert (folder / "train.py").read_text() == TRAIN

    changed_ns = (folder / "train.py").stat().st_mtime_ns
    assert run(session.path, "--apply", "leak-detach", "--yes").exit_code == 0
    assert "loss.detach()" in (folder / "train.py").read_text()
    assert (folder / "train.py").stat().st_mode & 0o777 == 0o755
    kept = list((attempt.path / "fixes").rglob("*train.py"))
    assert [path.read_text() for path in kept] == [TRAIN]

    assert run(session.path, "--undo").exit_code == 0
    assert (folder / "train.py").read_text() == TRAIN
    assert (folder / "train.py").stat().st_mtime_ns == changed_ns, (
        "else it counts as changed since the failed run"
    )
    again = run(session.path, "--undo")
    assert isinstance(again.exception, PatchDoesNotApply)


def test_undo_refuses_a_file_that_was_edited_afterwards(project):
    folder, session, _ = project
    run(session.path, "--apply", "leak-detach", "--yes")
    edited = (folder / "train.py").read_text() + "# more work\n"
    (folder / "train.py").write_text(edited)
    with pytest.raises(PatchDoesNotApply, match="changed after the patch"):
        undo(session)
    assert (folder / "train.py").read_text() == edited


def test_a_file_that_changed_since_the_run_is_refused(project):
    folder, session, attempt = project
    patches = make_patches(["leak-detach"], folder / "train.py", folder, {})
    (folder / "train.py").write_text(TRAIN + "# edited\n")
    with pytest.raises(PatchDoesNotApply, match="changed since the patch was made"):
        apply_in_place(session, attempt, patches, None)
    patches = make_patches(["leak-detach"], folder / "train.py", folder, {})
    with pytest.raises(PatchDoesNotApply, match="changed since the failed run"):
        apply_in_place(session, attempt, patches, 1_800_000_000 * 10**9 - 10**17)
    assert (folder / "train.py").read_text() == TRAIN + "# edited\n"


def test_uncommitted_changes_are_refused(project):
    folder, session, attempt = project
    commit(folder)
    (folder / "train.py").write_text(TRAIN + "# dirty\n")
    patches = make_patches(["leak-detach"], folder / "train.py", folder, {})
    with pytest.raises(PatchDoesNotApply, match="not committed"):
        apply_in_place(session, attempt, patches, None)


def test_a_trial_runs_on_a_copy_beside_links_to_the_rest(project, tmp_path):
    folder, _, _ = project
    patches = make_patches(["ckpt"], folder / "train.py", folder, {})
    script = stage(patches, folder / "train.py", tmp_path / "copy")
    assert script.read_text() == TRAIN
    assert not script.is_symlink()
    assert "checkpoint(" in (tmp_path / "copy" / "model.py").read_text()
    assert (tmp_path / "copy" / "data.txt").is_symlink()
    assert (folder / "model.py").read_text() == MODEL


def test_a_failed_write_leaves_the_old_file(project, monkeypatch):
    folder, _, _ = project

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(folder / "train.py", b"half")
    assert (folder / "train.py").read_text() == TRAIN
    assert sorted(path.name for path in folder.iterdir()) == ["data.txt", "model.py", "train.py"]


def test_a_plan_file_is_read_back(project, tmp_path):
    _, session, _ = project
    plan = tmp_path / "oomscope.toml"
    assert run(session.path, "--apply", "expandable,ckpt", "--plan", plan).exit_code == 0
    assert read_plan(plan).fixes == ("expandable", "ckpt")
    plan.write_text('schema = "oomscope.plan/1"\nfixes = ["nothing"]\n')
    with pytest.raises(FixError, match="no fix is called"):
        read_plan(plan)


def test_a_plan_holds_no_option_of_one_script(tmp_path):
    plan = tmp_path / "oomscope.toml"
    with pytest.raises(FixError, match="a plan cannot hold it"):
        write_plan(plan, ("ckpt", "knob-accumulate"))
    assert not plan.exists()
    plan.write_text('schema = "oomscope.plan/1"\nfixes = ["smaller-batch"]\n')
    with pytest.raises(FixError, match="a plan cannot hold it"):
        read_plan(plan)


def test_the_script_of_a_command_is_found_through_launchers(project):
    folder, _, _ = project
    command = ("python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "--lr", "1")
    assert script_of(command, folder) == folder / "train.py"
    assert script_of(("python", "-c", "pass"), folder) is None


def test_a_patch_that_finds_nothing_names_the_files_it_looked_at(project):
    folder, _, _ = project
    with pytest.raises(PatchDoesNotApply) as caught:
        make_patches(["zero1"], folder / "train.py", folder, {})
    assert "train.py, model.py" in caught.value.hint


def test_latin_1_and_windows_line_ends_survive(tmp_path):
    script = tmp_path / "old.py"
    content = "# -*- coding: latin-1 -*-\r\n# café\r\nopt.zero_grad(set_to_none=False)\r\n".encode("latin-1")
    script.write_bytes(content)
    patches = make_patches(["zero-none"], script, tmp_path, {})
    assert patches.files[0].after == content.replace(b"set_to_none=False", b"")
    assert Path(patches.files[0].path) == script


@pytest.mark.parametrize("option", ["--write-patch", "--plan"])
def test_a_file_that_cannot_be_written_is_said(project, option):
    _, session, _ = project
    words = [str(session.path), "--apply", "ckpt", option, "/nowhere/at/all"]
    with pytest.raises(InputError, match="cannot write /nowhere/at/all"):
        CliRunner().invoke(fix, words, catch_exceptions=False)


def test_an_unknown_fix_is_not_passed_over(project):
    _, session, _ = project
    with pytest.raises(FixError, match="ckp") as caught:
        CliRunner().invoke(fix, [str(session.path), "--predict", "--only", "ckp"], catch_exceptions=False)
    assert "ckpt" in caught.value.hint
