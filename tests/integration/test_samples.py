"""Every sample with a defect: the cause is named, and a rerun with the recommended fix ends inside its prediction."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomscope.launch.proof import prove

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "samples"
TUTORIAL = ROOT / "docs" / "tutorial.md"

#: Sample -> card, rule, fixes of the rerun, and the line that the verdict points at (None: it points at none).
DEFECTS: dict[str, tuple[str, str, list[str], str | None]] = {
    "loss_list_leak": ("sim:a100-40g", "oom.graph_accumulation", ["leak-detach"], "losses.append(loss)"),
    "adam_first_step": ("sim:20GiB", "oom.optimizer_state_lazy", ["optim-in-bwd"], None),
    "eval_without_no_grad": (
        "sim:20GiB", "oom.eval_no_nograd", ["eval-no-grad"], "def evaluate(model, batches) -> float:",
    ),
    "big_vocab_logits": ("sim:14GiB", "oom.giant_transient", ["fused-ce"], "return self.head(self.ln_f(x))"),
    "resume_duplicate": (
        "sim:13.6GiB", "oom.load_duplicate", ["load-cpu"], "checkpoint = torch.load(path)",
    ),
    "spike_batch": ("sim:12GiB", "oom.longest_batch", ["ckpt-selective"], None),
    "ddp_gpt": (
        "sim:14GiB", "oom.ddp_buckets", ["bucket-view"],
        "model = DistributedDataParallel(model, device_ids=device_ids)",
    ),
}  # fmt: skip

#: Options of `oomscope run` that a sample needs besides the card.
OPTIONS = {"ddp_gpt": ["--nproc-per-node", "4"]}


def run(home: Path, *args: str) -> dict[str, Any]:
    """The `oomscope.run/1` object of one run."""
    done = subprocess.run(
        [sys.executable, "-m", "oomscope", "run", "--auto", "--json", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "OOMSCOPE_HOME": str(home), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        timeout=570,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["exit_code"] == done.returncode, done.stderr[-2000:]
    return summary


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_sample_is_named_and_mended(name: str, tmp_path: Path) -> None:
    card, rule, fixes, line = DEFECTS[name]
    summary = run(tmp_path, "--device", card, *OPTIONS.get(name, []), f"samples/{name}.py")
    first, second = summary["attempts"]
    assert first["oom"] is True
    assert first["verdict"]["rule"] == rule
    if line is not None:
        where = first["verdict"]["where"]
        assert Path(where["file"]).read_text().splitlines()[where["line"] - 1].strip() == line

    (predicted,) = [each for each in first["predictions"] if each["fixes"] == fixes]
    assert predicted["fits"] is True
    assert second["fixes"] == fixes
    assert second["oom"] is False
    assert summary["exit_code"] == 0
    assert second["proof"]["accepted"] is True
    assert second["proof"]["peak"]["reached_by"] == "simulated"
    peaks = [rank["peak_reserved_bytes"] for rank in second["ranks"]]
    assert predicted["low_bytes"] <= max(peaks) <= predicted["high_bytes"]
    assert all(rank["peak_reserved_bytes"] <= rank["capacity_bytes"] for rank in second["ranks"])


#: Sample -> the fix of its rerun, for fixes that act without a GPU (expandable segments are its allocator's).
ON_CPU = {"activations_too_big": ["ckpt"], **{name: fixes for name, (_, _, fixes, _) in DEFECTS.items()}}
#: A size at which a sample trains on the CPU in seconds; the vocabulary is wide enough for fused-ce.
SMALL = [
    "--device=cpu", "--layers=2", "--width=64", "--heads=2", "--vocab=8192", "--seq-len=32", "--batch-size=4",
    "--iterations=4",
]  # fmt: skip


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ON_CPU))
def test_the_fix_keeps_the_numbers(name: str, tmp_path: Path) -> None:
    """Trained on the CPU with and without the fix of the rerun: the losses are equal."""
    fixes = ON_CPU[name]
    plan = tmp_path / "plan.toml"
    plan.write_text(f'schema = "oomscope.plan/1"\nfixes = {json.dumps(fixes)}\n')
    script = [*(["--nproc-per-node", "2"] if name in OPTIONS else []), f"samples/{name}.py", *SMALL]
    folders = [tmp_path / "plain", tmp_path / "fixed"]
    run(folders[0], *script)
    summary = run(folders[1], "--plan", str(plan), *script)
    assert summary["attempts"][0]["fixes"] == fixes
    proof = prove(*(next(folder.glob("sessions/*/attempts/001")) for folder in folders))
    # The fused loss adds in another order; everything else is the same arithmetic.
    assert proof["loss"] in (("equal", "within") if fixes == ["fused-ce"] else ("equal",)), proof[
        "loss_detail"
    ]
    assert proof["steps"]["before"] == proof["steps"]["after"] >= 4
    assert set(proof["fixes"].values()) <= {"applied"}
    assert proof["accepted"] is True


@pytest.mark.parametrize("name", DEFECTS)
def test_the_docstring_and_the_tutorial_say_what_a_sample_shows(name: str) -> None:
    card, rule, fixes, _ = DEFECTS[name]
    docstring = (SAMPLES / f"{name}.py").read_text().split('"""')[1]
    assert re.search(rf"Card: {re.escape(card)}\.", docstring)
    assert f"Rule: {rule}" in docstring
    (row,) = [each for each in TUTORIAL.read_text().splitlines() if f"[{name}.py]" in each]
    for word in (card, rule, *fixes):
        assert word in row
    assert fixes[0] in docstring or "a source patch" in docstring


def test_every_sample_stands_in_the_tutorial() -> None:
    scripts = {path.name for path in SAMPLES.glob("*.py")} - {"gpt_model.py"}
    assert scripts == set(re.findall(r"\[(\w+\.py)\]\(\.\./samples/", TUTORIAL.read_text()))
