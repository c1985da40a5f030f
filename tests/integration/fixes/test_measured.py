"""A run on a real GPU calibrates the predictions: records as a GPU job leaves them, through `oomscope fix --json`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from oomscope.cli.fix import fix
from oomscope.store.session import Session

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
#: How much more the "GPU" of these tests held than the simulation knows of.
FACTOR = 1.04


def as_on_a_gpu(records, factor):
    """Records of a simulated rank as a real GPU would have left them: other peaks, nothing about what filled it."""
    for record in records:
        kind = record["k"]
        if kind in ("simulated", "peak"):
            continue
        if kind == "rank":
            record = {**record, "simulated": False, "gpu_name": "Some GPU nobody simulates"}
        if kind in ("step", "reading"):
            scaled = {
                key: int(value * factor)
                for key, value in record.items()
                if key.endswith(("allocated_bytes", "reserved_bytes")) and isinstance(value, int)
            }
            record = {**record, **scaled}
        yield record


@pytest.fixture(scope="module")
def simulated_job(tmp_path_factory, start_job):
    folder = tmp_path_factory.mktemp("measured")
    script = folder / "gpt.py"
    script.write_text((HERE / "gpt.py").read_text())
    job = start_job(folder, [str(script), "--batch-size", "32", "--iterations", "3"], "4GiB")
    assert job.result.exit_code == 0
    return job


def measured(job, home, factor):
    """A session with one attempt that ran on a GPU, and the object that `oomscope fix` prints for it."""
    command = job.spec.command
    session = Session.create(home, name="gpt", command=command, cwd=job.spec.cwd)
    attempt = session.new_attempt()
    attempt.write_info({"command": list(command), "cwd": str(job.spec.cwd), "device": None, "fixes": []})
    for source in sorted(job.attempt.procs.glob("*.jsonl")):
        records = map(json.loads, source.read_text().splitlines())
        lines = [json.dumps(each) for each in as_on_a_gpu(records, factor)]
        (attempt.procs / source.name).write_text("\n".join(lines) + "\n")
    done = CliRunner().invoke(fix, [str(session.path), "--predict", "--only", "ckpt,expandable", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def ckpt(found):
    return next(each for each in found["fixes"] if each["id"] == "ckpt")["predicted"]


def test_predictions_are_scaled_by_what_the_gpu_measured(simulated_job, tmp_path):
    plain, scaled = (
        measured(simulated_job, tmp_path / "a", 1.0),
        measured(simulated_job, tmp_path / "b", FACTOR),
    )
    assert plain["basis"].startswith("simulated device")
    assert "calibrated" not in plain["basis"]
    assert f"calibrated by the measured peaks (× {FACTOR:.3f})" in scaled["basis"]
    for before, after in ((plain, scaled), (ckpt(plain), ckpt(scaled))):
        assert after["peak_reserved_bytes"] == pytest.approx(FACTOR * before["peak_reserved_bytes"], rel=1e-3)
    assert ckpt(scaled)["high_bytes"] > ckpt(plain)["high_bytes"]
    assert "calibrated" in ckpt(scaled)["basis"]


def test_a_measurement_that_cannot_be_the_same_job_calibrates_nothing(simulated_job, tmp_path):
    found = measured(simulated_job, tmp_path, 2.0)
    assert "calibrated" not in found["basis"]
    assert "measured 2.00 times the peak of its simulation" in found["note"]
