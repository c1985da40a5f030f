"""The loss without waiting: on a pretended device whose copies arrive when the test says so."""

import types

import pytest

from oomscope.agent.loss import LossReader
from oomscope.agent.writer import PendingValue


class Dtype:
    def __init__(self, is_floating_point):
        self.is_floating_point = is_floating_point


FLOAT, INTEGER = Dtype(True), Dtype(False)


class Tensor:
    def __init__(self, value, device="cpu", numel=1, index=0, floating=True):
        self.value, self._numel = value, numel
        self.device = types.SimpleNamespace(type=device, index=index)
        self.dtype = FLOAT if floating else INTEGER

    def numel(self):
        return self._numel

    def item(self):
        assert self.device.type == "cpu", "reading a device tensor waits for the device"
        return self.value

    def detach(self):
        return self

    def reshape(self, shape):
        return self


class Slot:
    value = 0.0

    def copy_(self, tensor, non_blocking):
        assert non_blocking
        self.value = tensor.value

    def __float__(self):
        return self.value


class Torch:
    """A device on which nothing has happened until `arrived` is set."""

    Tensor = Tensor

    def __init__(self):
        self.arrived = self.capturing = False
        self.pinned = 0
        event = types.SimpleNamespace(record=lambda: None, query=self._query)
        self.cuda = types.SimpleNamespace(
            Event=lambda: event, current_device=lambda: 0, is_current_stream_capturing=lambda: self.capturing
        )

    def _query(self):
        assert not self.capturing, "an event must not be asked during a capture"
        return self.arrived

    def empty(self, count, dtype, device, pin_memory):
        assert pin_memory
        assert device == "cpu", "only host memory can be pinned, whatever the script's default device is"
        self.pinned += 1
        return [Slot() for _ in range(count)]


@pytest.fixture
def torch():
    return Torch()


def test_on_the_cpu_it_is_read_at_once_and_added_over_micro_steps(torch):
    reader = LossReader(torch, simulated=False)
    reader.saw_backward(Tensor(1.5))
    reader.saw_backward(Tensor(2.0))
    assert reader.finish_step() == 3.5
    assert reader.finish_step() is None


def test_on_a_device_it_arrives_later(torch):
    reader = LossReader(torch, simulated=False)
    reader.saw_backward(Tensor(1.5, "cuda"))
    first = reader.finish_step()
    assert isinstance(first, PendingValue)
    assert not first.ready
    torch.arrived = True
    reader.saw_backward(Tensor(2.5, "cuda"))
    second = reader.finish_step()
    assert (first.ready, first.value) == (True, 1.5)
    assert not second.ready
    reader.collect()
    assert second.value == 2.5
    assert torch.pinned == 1, "one buffer is made, and used again"


def test_nothing_is_asked_during_a_capture(torch):
    reader = LossReader(torch, simulated=False)
    reader.saw_backward(Tensor(1.0, "cuda"))
    pending = reader.finish_step()
    torch.capturing = torch.arrived = True
    reader.saw_backward(Tensor(2.0, "cuda"))
    assert reader.finish_step() is None
    assert not pending.ready


def test_a_device_that_never_answers_is_given_up(torch):
    reader = LossReader(torch, simulated=False)
    pending = []
    for _ in range(100):
        reader.saw_backward(Tensor(1.0, "cuda"))
        pending.append(reader.finish_step())
    assert pending[0].ready
    assert pending[0].value is None
    assert not pending[-1].ready


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor(1.0, numel=2),
        Tensor(1, floating=False),
        Tensor(1.0, "cuda", index=1),
        Tensor(1.0, "meta"),
        "text",
    ],
)
def test_what_is_not_one_number_here_has_no_loss(torch, tensor):
    reader = LossReader(torch, simulated=False)
    reader.saw_backward(tensor)
    assert reader.finish_step() is None


def test_a_simulated_device_has_no_losses(torch):
    reader = LossReader(torch, simulated=True)
    reader.saw_backward(Tensor(1.0, "cuda"))
    assert reader.finish_step() is None


def test_under_a_scaler_the_original_counts(torch):
    reader = LossReader(torch, simulated=False)
    original, scaled = Tensor(0.5), Tensor(32768.0)
    reader.saw_scaling(scaled, original)
    reader.saw_backward(scaled)
    assert reader.finish_step() == 0.5
    other = Tensor(7.0)
    reader.saw_scaling(scaled, original)
    reader.saw_backward(other)
    assert reader.finish_step() == 7.0
