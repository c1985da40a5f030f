"""A session that has ended is taken up by a supervisor of its own: predictions, a decision, a rerun with its proof."""

import time

import pytest

from oomscope.errors import UsageError
from oomscope.launch.supervised import predict_ended
from oomscope.protocol import layout
from oomscope.store import control
from oomscope.store.files import read_json
from oomscope.store.session import ENDED

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

SCRIPT = """
import torch
from torch import nn

blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6))).cuda()
optimizer = torch.optim.AdamW(blocks.parameters())
for _ in range(3):
    loss = blocks(torch.randn(2048, 256, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def wait_for(session, *states, seconds=240):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if session.current_state() in states:
            return session.current_state()
        time.sleep(0.2)
    raise AssertionError(f"still {session.current_state()}: {session.supervisor_records()[-3:]}")


def test_an_ended_run_that_did_not_fail_is_predicted_and_rerun(tmp_path, start_job):
    script = tmp_path / "fine.py"
    script.write_text(SCRIPT)
    job = start_job(tmp_path, [str(script)], "2GiB")
    assert job.result.exit_code == 0
    job.session.set_state("done", attempt=1)
    predict_ended(job.session)
    with pytest.raises(UsageError, match="still supervised"):
        predict_ended(job.session)
    assert wait_for(job.session, "waiting", *ENDED) == "waiting"
    fixes = job.session.attempts()[0].fixes()
    assert fixes["fits"] is True
    entry = next(each for each in fixes["fixes"] if each["id"] == "ckpt")
    assert entry["saving_bytes"] > 0

    asked = control.send(job.session, "predict")
    control.send(job.session, "rerun", fixes=("ckpt",))
    assert wait_for(job.session, *ENDED) == "done"
    answers = {each["id"]: each["text"] for each in job.session.supervisor_records() if each["k"] == "answer"}
    assert answers[asked.id] == "the fixes are predicted already"
    second = job.session.attempts()[-1]
    assert second.info()["fixes"] == ["ckpt"]
    proof = read_json(second.path / layout.PROOF_FILE)
    assert proof["accepted"] is True
    assert proof["peak"]["inside"] is True
