import sys
import threading

import pytest

from oomscope.agent import exceptions, guard, recorder
from oomscope.agent.stop import StopTraining


@pytest.fixture(autouse=True)
def clean():
    before = set(guard.OFF)
    records = []
    guard.report_to(records.append)
    yield records
    guard.report_to(None)
    guard.OFF.clear()
    guard.OFF.update(before)


def test_an_error_is_recorded_once_and_switches_the_probe_off(clean):
    calls = []

    @guard.guarded("probe", default="nothing")
    def probe():
        calls.append(1)
        raise KeyError("inside")

    assert probe() == "nothing"
    assert probe() == "nothing"
    assert len(calls) == 1
    assert [record["probe"] for record in clean] == ["probe"]
    assert "KeyError" in clean[0]["error"]


def test_the_requested_end_passes_through():
    @guard.guarded("probe")
    def probe():
        raise StopTraining(3)

    with pytest.raises(SystemExit) as caught:
        probe()
    assert caught.value.code == 0
    assert "probe" not in guard.OFF


def test_a_report_that_fails_is_no_error():
    def broken(record):
        raise OSError

    guard.report_to(broken)

    @guard.guarded("other")
    def probe():
        raise ValueError

    probe()


@pytest.mark.parametrize(
    ("error", "is_oom"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (ValueError("bad"), False),
        (type("OutOfMemoryError", (RuntimeError,), {})("x"), True),
    ],
)
def test_memory_errors_are_told_from_others(error, is_oom):
    assert exceptions.is_out_of_memory(type(error), error) == is_oom


def test_the_agents_frames_are_taken_out_of_a_traceback():
    namespace = {}
    exec(compile("def outer(f):\n    return f()\n", "/boot/_oomscope_job/agent/x.py", "exec"), namespace)

    def user():
        raise ValueError("theirs")

    try:
        namespace["outer"](user)
    except ValueError as error:
        trace = exceptions.without_agent(error.__traceback__, "/boot/_oomscope_job")
    names = []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names == ["test_the_agents_frames_are_taken_out_of_a_traceback", "user"]


def test_an_exception_is_recorded_once_and_the_old_hook_still_runs(monkeypatch):
    shown, records, told = [], [], []
    monkeypatch.setattr(sys, "excepthook", lambda *args: shown.append(args))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    probe = exceptions.ExceptionProbe(
        records.append, own_folder="/boot", before=lambda: True, on_exception=lambda *args: told.append(args)
    )
    probe.install()
    try:
        raise ValueError("theirs")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        probe.at_exit()
    assert len(shown) == len(records) == len(told) == 1
    assert records[0]["message"] == "theirs"
    assert records[0]["traceback"][-1] == "ValueError: theirs"
    probe.remove()


@pytest.mark.parametrize(
    ("kind", "expected"), [(KeyboardInterrupt, [{"k": "term", "signal": "SIGINT"}]), (SystemExit, [])]
)
def test_the_users_own_end_is_no_exception_record(kind, expected):
    records = []
    probe = exceptions.ExceptionProbe(
        records.append, own_folder="/boot", before=lambda: True, on_exception=lambda *args: None
    )
    probe.saw(kind, kind(), None, main=True)
    assert records == expected


@pytest.mark.parametrize(
    ("files", "phase"),
    [
        (["/x/torch/optim/adamw.py", "/home/train.py"], "optimizer"),
        (["/x/torch/nn/functional.py", "/x/torch/nn/modules/module.py", "/home/train.py"], "forward"),
        (["/x/torch/autograd/graph.py", "/home/train.py"], "backward"),
        (["/x/torch/serialization.py"], "save"),
        (["/x/torch/autograd/function.py", "/home/train.py"], "other"),
        (["/x/torch/autograd/function.py", "/x/torch/nn/modules/module.py"], "forward"),
        (["/home/train.py"], "other"),
    ],
)
def test_the_phase_is_guessed_from_torchs_own_files(files, phase):
    assert recorder.guess_phase([(file, 1, "f") for file in files]) == phase


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([("/x/torch/nn/modules/module.py", "state_dict"), ("/home/train.py", "main")], "save"),
        ([("/x/torch/distributed/fsdp/_state_dict_utils.py", "_full_post_state_dict_hook")], "save"),
        ([("/x/torch/serialization.py", "load")], "resume"),
        ([("/x/transformers/modeling_utils.py", "from_pretrained"), ("/home/train.py", "main")], "load"),
    ],
)
def test_saving_and_loading_are_told_by_their_functions(frames, phase):
    assert recorder.guess_phase([(file, 1, function) for file, function in frames]) == phase


def test_moving_a_model_is_initialisation():
    frames = [("/x/torch/nn/modules/module.py", 1, "convert"), ("/home/train.py", 1, "<module>")]
    assert recorder.guess_phase(frames) == "init"


def test_an_error_that_was_raised_from_an_out_of_memory_error_is_one():
    cause = MemoryError()
    wrapped, followed = RuntimeError("step 3 failed"), RuntimeError("report failed")
    wrapped.__cause__ = cause
    followed.__context__ = cause
    assert exceptions.is_out_of_memory(RuntimeError, wrapped)
    assert not exceptions.is_out_of_memory(RuntimeError, followed)
    cause.__cause__ = wrapped  # a ring ends, too
    assert exceptions.is_out_of_memory(RuntimeError, wrapped)
