"""The probes on real torch, in this process; every patch is taken out again."""

import gc
import io
import pickle
import weakref

import pytest
import torch

from oomscope.agent import guard
from oomscope.agent.patching import AfterImport, Patches
from oomscope.agent.phases import ModuleProbe, block_groups, model_record
from oomscope.agent.probes import Progress, StepProbe
from oomscope.agent.readings import DeviceMemory, HostMemory
from oomscope.agent.saving import CheckpointProbe
from oomscope.agent.stop import StopTraining


class Job:
    """Probes armed in this process."""

    def __init__(self, *, stop_after=None, detail=False):
        self.records, self.first, self.patches = [], [], Patches()
        self.progress = Progress()
        device = DeviceMemory(torch)
        self.steps = StepProbe(
            torch,
            self.progress,
            device,
            HostMemory(),
            self.records.append,
            on_first_use=lambda: self.first.append(1),
            on_step=lambda done: None,
            stop_after=stop_after,
            simulated=False,
        )
        self.steps.install(self.patches)
        self.modules = None
        if detail:
            self.modules = ModuleProbe(
                torch,
                self.progress,
                self.steps,
                device,
                self.records.append,
                on_first_use=lambda: self.first.append(1),
                every_phase=True,
            )
            self.modules.install(self.patches, AfterImport())
            self.steps.modules = self.modules

    def of(self, kind):
        return [record for record in self.records if record["k"] == kind]


@pytest.fixture
def arm():
    jobs = []

    def make(**options):
        jobs.append(Job(**options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.patches.undo()
    assert not guard.OFF
    guard.OFF.clear()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_patches_leave_no_trace(arm):
    before = (torch.autograd.backward, torch.optim.Optimizer.__init__, torch.nn.Module.__call__)
    job = arm(detail=True)
    assert torch.autograd.backward is not before[0]
    job.patches.undo()
    assert (torch.autograd.backward, torch.optim.Optimizer.__init__, torch.nn.Module.__call__) == before


def test_what_somebody_patched_over_us_stays():
    class Owner:
        value = 1

    patches = Patches()
    patches.attribute(Owner, "value", 2)
    Owner.value = 3
    patches.undo()
    assert Owner.value == 3
    patches.attribute(Owner, "other", 2)
    patches.undo()
    assert not hasattr(Owner, "other")


def test_the_fastest_optimizer_counts(arm):
    job = arm()
    slow, fast = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    slow_optimizer, fast_optimizer = sgd(slow), sgd(fast)
    for iteration in range(4):
        fast(torch.ones(1, 2)).sum().backward()
        fast_optimizer.step()
        if iteration % 2:
            slow(torch.ones(1, 2)).sum().backward()
            slow_optimizer.step()
    assert [record["step"] for record in job.of("step")] == [0, 1, 2, 3]


def test_training_goes_on_with_another_optimizer(arm):
    job = arm()
    model = torch.nn.Linear(2, 1)
    for _ in range(2):
        optimizer = sgd(model)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        del optimizer
        gc.collect()
    assert [record["step"] for record in job.of("step")] == [0, 1, 2, 3, 4, 5]


def test_a_training_process_is_noticed_when_its_optimizer_is_built(arm):
    job = arm()
    model = torch.nn.Linear(2, 1)
    assert not job.first
    sgd(model)
    assert job.first


def test_losses_and_micro_steps(arm):
    job = arm()
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = sgd(model)
    for _ in range(3):
        (model(torch.ones(1, 2)).sum() / 2).backward()
    optimizer.step()
    optimizer.step()
    first, second = job.of("step")
    assert (first["micro_steps"], first["loss"]) == (3, 3.0)
    assert (second["micro_steps"], second["loss"]) == (0, None)
    assert first["rss_bytes"] > 0


def test_a_closure_runs_backward_inside_the_step(arm):
    job = arm()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    (step,) = job.of("step")
    assert step["micro_steps"] >= 1
    assert job.progress.phase == "other"


def test_a_scaled_loss_is_recorded_unscaled(arm):
    job = arm()
    model = torch.nn.Linear(2, 1)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = model(torch.ones(1, 2)).pow(2).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    (step,) = job.of("step")
    assert step["loss"] == loss.item()


def test_the_job_is_ended_by_an_exit_that_training_loops_do_not_catch(arm):
    job = arm(stop_after=2)
    model = torch.nn.Linear(2, 1)
    optimizer = sgd(model)

    def loop():
        while True:
            try:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            except Exception:  # noqa: BLE001  # as careless loops do
                pytest.fail("swallowed")

    with pytest.raises(StopTraining) as caught:
        loop()
    assert caught.value.code == 0
    assert len(job.of("step")) == 2


def test_phases_follow_the_script(arm):
    job = arm(detail=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    optimizer = sgd(model)
    for batch in torch.utils.data.DataLoader(torch.ones(2, 2)):
        loss = model(batch).sum()
        assert job.progress.phase == "forward", "the loss is forward work"
        loss.backward()
        optimizer.step()
        model.eval()
        model(batch)
        model.train()
    phases = [record["phase"] for record in job.of("phase")]
    assert phases[:9] == [
        "data",
        "other",
        "forward",
        "backward",
        "other",
        "optimizer",
        "other",
        "eval",
        "other",
    ]
    assert [record["input_numel"] for record in job.of("step")] == [2, 2]


def test_an_exception_in_the_model_leaves_the_stack_clean(arm):
    job = arm(detail=True)
    model = torch.nn.Linear(2, 1)
    sgd(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert job.modules.stack == []
    with pytest.raises(RuntimeError):
        torch.ones(1).sum().backward()
    assert job.progress.in_backward == 0


def test_nothing_of_the_script_is_kept_alive(arm):
    job = arm(detail=True)
    model = torch.nn.Linear(2, 1)
    optimizer = sgd(model)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step()
    alive = [weakref.ref(each) for each in (model, optimizer, loss, model.weight)]
    del model, optimizer, loss
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4
    assert job.modules.root is None
    assert model_record(torch, job.modules, list(job.steps.optimizers)) is None


def test_recomputation_is_not_another_call_of_the_model(arm):
    from torch.utils.checkpoint import checkpoint

    job = arm(detail=True)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Model()
    optimizer = sgd(model)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    (step,) = job.of("step")
    assert step["input_numel"] == 6
    assert step["micro_steps"] == 1


def test_checkpoints_have_a_phase_and_a_path(arm, tmp_path):
    job = arm(detail=True)
    CheckpointProbe(job.progress, job.records.append).install(torch, job.patches, AfterImport())
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({}, io.BytesIO())
    torch.load(tmp_path / "a.pt")
    (record,) = job.of("checkpoint")
    assert record["path"] == str(tmp_path / "a.pt")
    assert record["bytes"] == (tmp_path / "a.pt").stat().st_size
    assert [record["phase"] for record in job.of("phase")] == [
        "save",
        "other",
        "save",
        "other",
        "resume",
        "other",
    ]
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save, "a pool can still be given it"
    with pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "b.pt")
    assert job.progress.phase == "other"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.act = torch.nn.ReLU()

    def forward(self, x):
        return self.act(self.fc(x))


def test_the_model_is_described(arm):
    job = arm(detail=True)
    model = torch.nn.ModuleDict(
        {"blocks": torch.nn.ModuleList(Block() for _ in range(3)), "norm": torch.nn.BatchNorm1d(4)}
    )

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            for block in self.parts["blocks"]:
                x = block(x)
            return self.parts["norm"](x)

    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.MSELoss()(net(torch.ones(2, 4)), torch.zeros(2, 4))
    loss.backward()
    optimizer.step()
    record = model_record(torch, job.modules, [optimizer])
    assert record["root_class"] == "Net", "the loss module was called last, but is not the model"
    assert record["block_groups"] == [{"class": "Block", "count": 3, "path": "parts.blocks"}]
    assert record["parameters_bytes"] == 4 * (3 * 20 + 8)
    assert record["optimizer_bytes"] > 2 * record["parameters_bytes"]
    assert record["autocast"] is True
    assert record["has_batchnorm"] is True
    assert record["ddp"] is False


def test_plain_layers_in_a_row_are_no_block_group():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert block_groups(model) == []


def test_a_step_that_breaks_off_has_phase_peaks_too(arm, monkeypatch):
    job = arm(detail=True)
    peaks = iter([100, 700])
    monkeypatch.setattr(job.modules._device, "split", lambda: next(peaks))
    job.progress.enter("forward")  # ends "other", whose peak was 100
    job.modules.break_off(3)
    assert {record["phase"]: record["peak_allocated_bytes"] for record in job.of("phase_peak")} == {
        "other": 100,
        "forward": 700,
    }
    assert {record["step"] for record in job.of("phase_peak")} == {3}
