# ruff: noqa: E501  # texts and tables
import pytest

from oomscope.core.diagnosis import Evidence
from oomscope.core.diagnosis.bugs import bugs, is_affected, known_bug, parse_bugs, version_key
from oomscope.core.diagnosis.evidence import Signal
from oomscope.core.diagnosis.message import Frame, is_user_file
from oomscope.core.diagnosis.signals import from_frames
from oomscope.core.diagnosis.words import from_when, from_words


def names(*frames: Frame) -> set[str]:
    return {signal.name for signal in from_frames(frames, "traceback")}


@pytest.mark.parametrize(
    ("frame", "name"),
    [
        (Frame("/u/train.py", 3, "main", "loss.backward()"), "phase:backward"),
        (Frame("/u/train.py", 3, "main", "optimizer.step()"), "phase:optimizer"),
        (Frame("/x/torch/optim/adamw.py", 3, "_init_group"), "op:init_state"),
        (Frame("/x/torch/optim/adamw.py", 3, "_multi_tensor_adamw"), "op:foreach"),
        (Frame("/u/train.py", 3, "main", "trainer.save_model(path)"), "phase:save"),
        (Frame("/u/train.py", 3, "main", "model.load_state_dict(torch.load(path))"), "phase:resume"),
        (Frame("/u/train.py", 3, "evaluate", "out = model(x)"), "phase:eval"),
        (Frame("/u/train.py", 3, "main", "model = FSDP(model)"), "phase:init"),
        (Frame("/u/model.py", 3, "forward", "return F.cross_entropy(a, b)"), "op:loss"),
        (Frame("/x/torch/nn/modules/conv.py", 3, "_conv_forward"), "op:conv"),
        (Frame("/x/torch/nn/parallel/scatter_gather.py", 3, "gather"), "uses:dataparallel"),
        (Frame("/x/torch/distributed/fsdp/_runtime_utils.py", 3, "_unshard"), "uses:fsdp"),
    ],
)
def test_what_a_stack_shows(frame, name):
    assert name in names(frame)


@pytest.mark.parametrize(
    "text",
    [
        "No available memory for the cache blocks. Try increasing gpu_memory_utilization",
        "consider increasing the number of workers",
    ],
)
def test_what_is_advised_was_not_observed(text):
    assert "says:growing" not in {signal.name for signal in from_words(text, "words")}


def test_a_save_inside_an_evaluation_is_a_save():
    found = names(Frame("t.py", 1, "evaluate"), Frame("t.py", 2, "save_checkpoint", "torch.save(state, p)"))
    assert "phase:save" in found
    assert "phase:eval" not in found
    assert names() == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory grows by 20 MB per iteration until OOM", {"says:growing", "says:rate"}),
        ("it rises in the first steps, then stays", {"says:plateau"}),
        ("fails when resuming from a checkpoint", {"phase:resume"}),
        ("dies while saving under FSDP", {"phase:save", "uses:fsdp"}),
        ("gradient checkpointing saves nothing", {"uses:checkpointing", "says:no_effect"}),
        ("validation loop keeps all outputs on the GPU", {"phase:eval", "says:keeps_outputs"}),
        ("AMP uses slightly more memory than fp32", {"uses:autocast", "says:no_effect"}),
        ("all ranks allocate on GPU 0", {"says:on_gpu0", "uses:ranks"}),
        ("we use nn.DataParallel on 4 GPUs", {"uses:dataparallel", "uses:ranks"}),
        ("workers read a list of strings", {"uses:workers", "says:python_objects"}),
        ("each rank takes 1.4 GB each", {"says:more_than_context"}),
        ("the first iteration passes, the second iteration fails", {"says:second"}),
        ("memory is not freed after the exception is caught", {"says:retry"}),
        ("fixed by adding detach()", {"says:keeps_graph"}),
        ("predictions are stored on the GPU", {"says:keeps_outputs"}),
        ("checkpointing gives no memory reduction", {"says:no_effect", "uses:checkpointing"}),
        ("limit_all_gathers helps", {"says:record_stream"}),
        ("an identical request succeeds on retry", {"says:spurious"}),
        ("a zombie process on the card", {"says:invisible_process"}),
        ("workers die with a bus error", {"says:shm", "uses:workers"}),
    ],
)
def test_words(text, expected):
    assert expected <= {signal.name for signal in from_words(text)}


@pytest.mark.parametrize(
    ("text", "unexpected"),
    [
        ("activation checkpointing saves memory", {"phase:save", "phase:resume"}),
        ("DistributedDataParallel on 4 GPUs", {"uses:dataparallel"}),
        ("a randomly initialised model", {"says:on_gpu0"}),
    ],
)
def test_words_that_mislead(text, unexpected):
    assert not unexpected & {signal.name for signal in from_words(text)}


def test_words_are_weak_and_quote_what_was_said():
    signal = from_words("it happens while saving")[0]
    assert signal.strength < 1
    assert "saving" in signal.text


def test_when():
    assert [s.name for s in from_when("phase_eval")] == ["phase:eval"]
    assert from_when("unknown") == ()


def test_versions():
    assert version_key("2.10.0+cu128") == (2, 10, 0)
    assert version_key("nightly") == ()
    assert is_affected("2.10.0", ">=2.10,<2.12")
    assert is_affected("2.9.1", "==2.9.1")
    assert not is_affected("2.12", ">=2.10,<2.12")
    assert is_affected("2.9.1", "<=2.9.1")
    assert not is_affected("2.9.1", ">2.9.1")
    with pytest.raises(ValueError, match="bad version"):
        is_affected("2.9", "about 2.9")


def test_the_list_of_bugs_is_sound():
    entries = bugs()
    assert len({bug.id for bug in entries}) == len(entries)
    assert all(bug.link.startswith("https://") for bug in entries)
    assert all(bug.cause in ("framework_leak", "fix_ineffective") for bug in entries)


@pytest.mark.parametrize(
    "data",
    [
        {"schema": "x"},
        {"schema": "oomscope.bugs/1", "bugs": [{"id": "a"}]},
        {"schema": "oomscope.bugs/1", "bugs": [{**dict.fromkeys(("id", "package", "cause", "title", "advice", "link"), "x"),
                                                "when": [], "unversioned": False, "confidence": 0.5, "affected": "2.x"}]},
    ],
)  # fmt: skip
def test_a_broken_list_is_refused_by_name(data):
    with pytest.raises(ValueError, match="bug"):
        parse_bugs(data)


def test_a_known_bug_needs_its_version_and_its_signs():
    growing = (Signal("says:growing", "grows", "words"), Signal("uses:fsdp", "FSDP", "words"))
    assert known_bug(Evidence(signals=growing)) is None
    found = known_bug(Evidence(signals=growing, torch_version="2.10.1"))
    assert found is not None
    assert found.id == "dtensorspec-fused"
    assert known_bug(Evidence(signals=growing[:1], torch_version="2.10.1")) is None
    assert known_bug(Evidence()) is None
    compiled = (
        growing[0],
        Signal("uses:compile", "c", "words"),
        Signal("uses:varlen_attention", "v", "words"),
    )
    assert known_bug(Evidence(signals=compiled)) is not None


@pytest.mark.parametrize(
    ("file", "mine"),
    [
        ("/home/u/train.py", True),
        ("C:\\Users\\u\\train.py", True),
        ("Cell In[3]", True),
        ("<ipython-input-3-abc>", True),
        ("/x/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3.11/runpy.py", False),
        ("/opt/torch/nn/modules/module.py", False),
        ("??", False),
    ],
)
def test_whose_file(file, mine):
    assert is_user_file(file) is mine


def test_what_a_script_is_called_says_nothing():
    assert (
        names(Frame("/u/train_and_save.py", 3, "main", "y = f(x)"), Frame("/u/evaluate.py", 9, "<module>"))
        == set()
    )
    assert "phase:save" in names(Frame("/x/site-packages/lib/full_state_dict.py", 3, "f"))


def test_parameters_that_are_flattened_are_being_sharded():
    found = names(Frame("/u/zero.py", 3, "__init__", "self.flat = _flatten_dense_tensors(parts).cuda()"))
    assert {"op:shard", "phase:init"} <= found
