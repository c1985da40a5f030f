"""Why a process may not be looked into, on systems that this machine is not."""

from __future__ import annotations

import builtins
import os

import pytest

from oomscope.collect.procfs import Process, Stat
from oomscope.launch import preflight


def process(uid=1000, state="S", tracer="0", command=("python", "train.py")):
    return Process(
        Stat(4242, 1, "python", state, 7, 0, 1, 1 << 20),
        uid,
        command,
        {},
        4242,
        "",
        "",
        {"TracerPid": tracer},
    )


@pytest.fixture
def system(monkeypatch):
    """system(who we are, …): /proc/4242/mem may not be opened."""
    real_open = builtins.open

    def make(found, *, us=1000, capability=False, yama=None, environ_owner=1000):
        def refuse(path, *args, **kwargs):
            if path == "/proc/4242/mem":
                raise PermissionError(13, "Permission denied")
            return real_open(path, *args, **kwargs)

        monkeypatch.setattr(builtins, "open", refuse)
        monkeypatch.setattr(os, "geteuid", lambda: us)
        monkeypatch.setattr(preflight, "read_process", lambda pid: found)
        monkeypatch.setattr(preflight, "yama_scope", lambda: yama)
        monkeypatch.setattr(preflight, "_owner_of", lambda path: environ_owner)
        bits = f"{(1 << 19) if capability else 0:x}"
        monkeypatch.setattr(preflight, "_status_of_self", lambda: {"CapEff": bits})
        return preflight.check(4242)

    return make


def test_yama(system):
    verdict = system(process(), yama=1)
    assert verdict.code == "yama"
    assert "kernel.yama.ptrace_scope = 1" in verdict.why
    assert "sudo" in verdict.remedy
    assert "oomscope run" in verdict.remedy


def test_another_user(system):
    verdict = system(process(uid=7))
    assert (verdict.code, "belongs to uid 7, we are uid 1000" in verdict.why) == ("other_user", True)
    assert verdict.remedy.startswith("run oomscope as that user: sudo -u '#7'")


def test_root_without_the_capability(system):
    verdict = system(process(), us=0)
    assert verdict.code == "no_capability"
    assert "--cap-add SYS_PTRACE" in verdict.remedy


def test_a_process_that_protects_itself(system):
    verdict = system(process(), environ_owner=0)
    assert verdict.code == "not_dumpable"
    assert "setuid" in verdict.why


def test_a_security_module_that_gives_no_reason(system):
    verdict = system(process(), capability=True)
    assert verdict.code == "forbidden"
    assert "SYS_PTRACE" in verdict.remedy


@pytest.mark.parametrize(("state", "code"), [("Z", "zombie"), ("T", "stopped")])
def test_states(system, state, code):
    assert system(process(state=state)).code == code


def test_no_such_process(system):
    assert system(None).code == "gone"
