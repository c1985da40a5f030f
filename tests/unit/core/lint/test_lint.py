import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomscope.core.lint import features, lint

LOOP = """
model = net()
total, losses, logs = 0, [], {}
for step, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.backward()
    LINE
"""


def rules(source: str) -> list[str]:
    return [finding.rule for finding in lint(textwrap.dedent(source))]


def in_loop(line: str) -> list[str]:
    return rules(LOOP.replace("LINE", line))


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("losses.append(loss)", "graph-append"),
        ("losses.append(loss * 2)", "graph-append"),
        ("losses.append((step, loss))", "graph-append"),
        ("losses.extend([loss])", "graph-append"),
        ("meter.update(loss)", "graph-append"),
        ("logs[step] = loss", "graph-append"),
        ("total += loss", "graph-sum"),
        ("total = total + loss", "graph-sum"),
        ("total += loss * x.size(0)", "graph-sum"),
        ("other.backward(retain_graph=True)", "retain-graph"),
        ("writer.add_scalar('loss', loss, step)", "logged-graph"),
        ("losses.append(x.detach())", "container-append"),
        ("optimizer.zero_grad(set_to_none=False)", "zero-grad"),
        ("torch.cuda.empty_cache()", "empty-cache-loop"),
        ("torch.backends.cudnn.benchmark = True", "cudnn-benchmark"),
        ("torch.cuda.set_per_process_memory_fraction(0.5)", "memory-fraction"),
        ("state = torch.load('x.pt')", "load-device"),
        ("model = nn.DataParallel(model)", "data-parallel"),
        ("model = DDP(model)", "ddp-buckets"),
        ("cfg = FullStateDictConfig(rank0_only=True)", "full-state-dict"),
        ("cfg = StateDictOptions(full_state_dict=True)", "full-state-dict"),
    ],
)
def test_pitfalls(line, rule):
    found = [f for f in lint(LOOP.replace("LINE", line)) if f.rule == rule]
    assert len(found) == 1
    assert found[0].line == 7
    assert found[0].source == line
    assert found[0].text


@pytest.mark.parametrize(
    "line",
    [
        "losses.append(loss.item())",
        "losses.append(loss.detach())  ",
        "losses.append(float(loss))",
        "losses.append(loss.detach().cpu())",
        "losses.append(loss.data.cpu())",
        "total += loss.item()",
        "total = total + loss.detach()",
        "total += float(loss)",
        "logs[step] = loss.item()",
        "loss += penalty",
        "writer.add_scalar('loss', loss.item(), step)",
        "y.append(step)",
        "optimizer.zero_grad(set_to_none=True)",
        "other.backward(retain_graph=False)",
        "state = torch.load('x.pt', map_location='cpu')",
        "model = DDP(model, gradient_as_bucket_view=True)",
        "cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)",
        "torch.backends.cudnn.benchmark = False",
    ],
)
def test_the_right_way_is_silent(line):
    assert [r for r in in_loop(line) if r != "container-append"] == []


def test_detached_on_the_cpu_is_fine():
    assert in_loop("losses.append(loss.detach().cpu())") == []


def test_evaluation_without_no_grad():
    bad = """
    def evaluate(model, loader):
        model.eval()
        for x in loader:
            out = model(x)
    """
    assert rules(bad) == ["eval-no-grad"]
    assert rules(bad.replace("        for x", "        torch.set_grad_enabled(False)\n        for x")) == []
    decorated = "import torch\n@torch.no_grad()\n" + textwrap.dedent(bad).strip()
    assert rules(decorated) == []
    called = bad + "\n    with torch.no_grad():\n        evaluate(m, l)\n"
    assert rules(called) == []
    assert "eval-no-grad" in rules(bad + "\n    evaluate(m, l)\n")


def test_outputs_of_evaluation_stay_on_the_device():
    source = """
    @torch.no_grad()
    def evaluate(model, loader):
        outputs = []
        for x in loader:
            out = model(x)
            outputs.append(out)
        return torch.cat(outputs)
    """
    assert rules(source) == ["container-append"]
    assert rules(source.replace("append(out)", "append(out.cpu())")) == []


def test_a_recurrent_state_without_detach():
    source = """
    for x in loader:
        out, hidden = rnn(x, hidden)
        loss = f(out)
        loss.backward()
    """
    assert rules(source) == ["hidden-state"]
    assert rules(source.replace("loss = f(out)", "hidden = hidden.detach()\n        loss = f(out)")) == []
    assert rules("with torch.no_grad():\n    for x in y:\n        out, state = rnn(x, state)") == []


def test_nccl_without_set_device():
    source = "dist.init_process_group('nccl')\nmodel.to('cuda')\n"
    assert rules(source) == ["no-set-device"]
    assert rules("torch.cuda.set_device(local_rank)\n" + source) == []
    assert rules(source.replace("nccl", "gloo")) == []


def test_no_sync_matters_under_sharding_only():
    assert "no-sync" in rules("model = FSDP(m)\nwith model.no_sync():\n    pass")
    assert rules("model = DDP(m, gradient_as_bucket_view=True)\nwith model.no_sync():\n    pass") == []


def test_recovery_inside_the_except_block():
    bad = """
    try:
        train_step(batch)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        train_step(half(batch))
    """
    assert rules(bad) == ["caught-oom"]
    good = """
    failed = False
    try:
        train_step(batch)
    except torch.cuda.OutOfMemoryError:
        failed = True
    """
    assert rules(good) == []


def test_losses_of_accelerate_and_scalers():
    source = """
    for x in y:
        loss = model(x)
        accelerator.backward(loss)
        losses.append(loss)
        scaled = 1
        scaler.scale(err).backward()
        total += err
    """
    assert rules(source) == ["graph-append", "graph-sum"]


def test_one_backward_after_the_loop_keeps_all_graphs():
    source = "total = 0\nfor x in y:\n    loss = f(x)\n    total += loss\ntotal.backward()\n"
    assert rules(source) == ["graph-sum"]
    assert rules(source.replace("\ntotal.backward()", "\n    total.backward()")) == []


def test_a_caught_error_that_is_kept():
    source = "try:\n    f()\nexcept RuntimeError as error:\n    KEEP\n"
    for keep in ("self.error = error", "errors.append(error)"):
        assert rules(source.replace("KEEP", keep)) == ["exception-kept"]
    assert rules("def g():\n    " + source.replace("\n", "\n    ").replace("KEEP", "return error")) == [
        "exception-kept"
    ]
    assert rules(source.replace("KEEP", "print(error)")) == []
    assert rules(source.replace("KEEP", "self.text = str(error)")) == []
    assert rules(source.replace("RuntimeError", "KeyError").replace("KEEP", "self.error = error")) == []


def test_an_object_that_refers_to_itself():
    assert rules("class A:\n    def __init__(self):\n        self.me = self\n") == ["self-cycle"]
    assert rules("class A:\n    def __init__(self, other):\n        self.me = other\n") == []


def test_outside_a_loop_it_is_harmless():
    assert rules("loss = f()\nloss.backward()\nlosses.append(loss)\n") == []


def test_in_a_function_it_may_be_called_in_a_loop():
    assert rules("def step(x):\n    loss = f(x)\n    loss.backward()\n    losses.append(loss)\n") == [
        "graph-append"
    ]


def test_what_is_not_python_has_no_findings():
    assert lint("int main() { return 0; }") == []
    assert lint("x = 'a\x00b'") == []
    assert lint("-" * 5 + "(" * 5000 + ")" * 5000) == []


@given(st.text(max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_text_is_read(text):
    lint(text)
    features(text)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("model = FSDP(model)", "uses:fsdp"),
        ("import deepspeed", "uses:deepspeed"),
        ("model = DDP(model)", "uses:ddp"),
        ("model = nn.DataParallel(model)", "uses:dataparallel"),
        ("with torch.autocast('cuda'):", "uses:autocast"),
        ("y = torch.utils.checkpoint.checkpoint(f, x)", "on:checkpointing"),
        ("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'", "on:expandable"),
        ("model = torch.compile(model, mode='reduce-overhead')", "uses:cuda_graph"),
        ("with torch.cuda.use_mem_pool(pool):", "uses:mem_pool"),
        ("DataLoader(d, num_workers=4)", "uses:workers"),
    ],
)
def test_features(line, name):
    found = {f.name: f for f in features("import torch\n" + line)}
    assert name in found
    assert found[name].line == 2


def test_speaking_of_a_setting_is_not_setting_it():
    assert features('"""Try expandable_segments:True."""') == []


@pytest.mark.parametrize(
    "line",
    [
        "losses.append({'loss': loss})",
        "losses.append(1 + loss)",
        "losses.append([loss, step])",
    ],
)
def test_losses_inside_something_else(line):
    assert in_loop(line) == ["graph-append"]


@pytest.mark.parametrize(
    "line", ["total = total - loss", "names.append(f(x, y))", "losses.append(torch.stack(a, b))"]
)
def test_what_only_looks_alike(line):
    assert in_loop(line) == []


def test_nccl_named_elsewhere():
    assert rules("backend = 'nccl'\nfoo.init_process_group(backend)\n") == ["no-set-device"]
