"""What counts as proof: equal, within the tolerance of the risk class, or a reason against."""

from oomscope.core.fixes import get
from oomscope.core.fixes.proof import AttemptNumbers, Fingerprint, prove

PREDICTED = {"peak_reserved_bytes": 100, "low_bytes": 95, "high_bytes": 105}


def attempt(losses=(2.0, 1.5, 1.0), **more):
    values = {
        "steps": len(losses),
        "exit_code": 0,
        "peak_reserved_bytes": 101,
        "durations_ns": [10] * len(losses),
    }
    return AttemptNumbers(losses=losses, **{**values, **more})


def test_equal_numbers_inside_the_interval_are_accepted():
    proof = prove(attempt(oom=True, exit_code=1), attempt((2.0, 1.5, 1.0, 0.9)), [get("ckpt")], PREDICTED)
    assert proof["loss"] == "equal"
    assert proof["peak"]["inside"] is True
    assert proof["peak"]["reached_by"] == "measured"
    assert proof["accepted"] is True


def test_rounding_is_within_and_a_large_difference_is_not():
    before = attempt()
    near = prove(before, attempt((2.001, 1.501, 1.001)), [get("amp-bf16")], PREDICTED)
    assert (near["loss"], near["accepted"]) == ("within", True)
    far = prove(before, attempt((2.2, 1.6, 1.1)), [get("amp-bf16")], PREDICTED)
    assert (far["loss"], far["accepted"]) == ("differs", False)
    assert "loss differs" in far["why_not_accepted"]


def test_the_same_rounding_is_too_much_for_an_exact_fix():
    proof = prove(attempt(), attempt((2.001, 1.501, 1.001)), [get("ckpt")], PREDICTED)
    assert proof["loss"] == "differs"


def test_buffers_and_learning_rates_count():
    marks = {0: Fingerprint((0.1,), 5.0, 1.0), 1: Fingerprint((0.05,), 6.0, 1.0)}
    before = attempt(fingerprints=marks)
    assert prove(before, attempt(fingerprints=marks), [get("ckpt")], None)["buffers"] == "equal"
    twice = {step: Fingerprint(mark.learning_rates, mark.buffers * 1.3) for step, mark in marks.items()}
    proof = prove(before, attempt(fingerprints=twice), [get("ckpt")], None)
    assert proof["loss"] == "equal"
    assert proof["buffers"] == "differs"
    assert proof["accepted"] is False
    other = {0: Fingerprint((0.1,)), 1: Fingerprint((0.1,))}
    assert prove(before, attempt(fingerprints=other), [get("ckpt")], None)["learning_rate"] == "differs"


def test_a_simulated_device_proves_sizes_only():
    proof = prove(attempt(simulated=True), attempt((9.0,), simulated=True, steps=3), [get("ckpt")], PREDICTED)
    assert proof["loss"] == "not comparable"
    assert proof["peak"]["reached_by"] == "simulated"
    assert proof["throughput_ratio"] is None


def test_a_semantic_fix_is_not_comparable():
    assert (
        prove(attempt(), attempt((3.0, 2.0, 1.9)), [get("smaller-batch")], None)["loss"] == "not comparable"
    )


def test_running_out_of_memory_again_or_failing_is_never_accepted():
    again = prove(attempt(), attempt(oom=True, exit_code=1), [get("ckpt")], PREDICTED)
    assert "ran out of memory again" in again["why_not_accepted"]
    failed = prove(attempt(), attempt(exit_code=3), [get("ckpt")], PREDICTED)
    assert "exit code 3" in failed["why_not_accepted"]
    refused = prove(attempt(), attempt(fixes={"ckpt": "refused"}), [get("ckpt")], PREDICTED)
    assert "ckpt was refused" in refused["why_not_accepted"]


def test_fewer_steps_than_before_are_an_objection():
    assert prove(attempt(), attempt((2.0,)), [get("ckpt")], None)["accepted"] is False


def test_nan_differs():
    assert prove(attempt(), attempt((float("nan"), 1.5, 1.0)), [get("ckpt")], None)["loss"] == "differs"


def test_throughput_compares_median_steps_after_the_warm_up():
    before = attempt((1.0,) * 6, durations_ns=[900, 900, 10, 10, 10, 10])
    after = attempt((1.0,) * 6, durations_ns=[5, 5, 20, 20, 20, 20])
    assert prove(before, after, [get("ckpt")], None)["throughput_ratio"] == 0.5
