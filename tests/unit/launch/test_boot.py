import json
import os

import pytest

from oomscope.errors import SetupError
from oomscope.launch.boot import job_environment, write_boot


def test_a_boot_folder_holds_all_that_the_job_needs(tmp_path):
    config = {"rundir": str(tmp_path / "run" / "sockets"), "device": None, "protocol": 1}
    boot = write_boot(tmp_path / "attempt", config)
    assert sorted(each.name for each in boot.iterdir()) == [
        "_oomscope_job.py",
        "agent.json",
        "sitecustomize.py",
    ]
    assert json.loads((boot / "agent.json").read_text()) == config
    assert os.stat(config["rundir"]).st_mode & 0o077 == 0


def test_a_folder_for_sockets_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "sockets").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError):
        write_boot(tmp_path / "attempt", {"rundir": str(tmp_path / "run" / "sockets")})


def test_the_users_own_path_stays_behind_ours(tmp_path):
    before = {"PYTHONPATH": "/mine:/other", "OOMSCOPE_OWNER": "left over", "X": "1"}
    environment = job_environment(
        before, tmp_path / "boot", session=tmp_path, attempt_dir=tmp_path / "attempts" / "001"
    )
    assert environment["PYTHONPATH"] == f"{tmp_path / 'boot'}:/mine:/other"
    assert environment["OOMSCOPE_ATTEMPT"].endswith("attempts/001")
    assert "OOMSCOPE_OWNER" not in environment
    assert environment["X"] == "1"
    assert before["PYTHONPATH"] == "/mine:/other"
