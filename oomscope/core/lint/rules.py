"""Memory and distributed pitfalls that stand in the source. Each rule is a generator over one `Script`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from oomscope.core.lint.script import Finding, Script, dotted, is_constant, keyword

Rule = Callable[[Script], Iterator[Finding]]

#: Calls that cut a tensor off its graph, or off the device.
_CUTS = frozenset({"item", "detach", "tolist", "numpy", "float", "int", "data"})
_LEAVES_DEVICE = frozenset({"item", "tolist", "numpy", "cpu", "float", "int"})
_MODEL_CALL = re.compile(r"\b(?:self\.)?(?:\w*model|net|network|module|encoder|decoder)\(")
_EVAL_NAME = re.compile(
    r"(?:^|_)(?:eval|evaluate|validate|validation|val|test|infer\w*|predict)(?:_|$)", re.IGNORECASE
)


def _method_calls(script: Script, *names: str) -> Iterator[tuple[ast.Call, str]]:
    for call, name in zip(script.calls, script.names, strict=True):
        if name.rsplit(".", 1)[-1] in names and isinstance(call.func, ast.Attribute):
            yield call, name


def _chain(node: ast.expr) -> set[str]:
    """Attributes and calls along `x.detach().cpu()`: {"detach", "cpu"}."""
    found: set[str] = set()
    while True:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                found.add(node.func.id)
                if len(node.args) != 1:
                    return found
                node = node.args[0]
            else:
                node = node.func
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
            node = node.value
        else:
            return found


def _base(node: ast.expr) -> str:
    """The name under `loss.detach().cpu()`, `loss * 2`, `(loss,)`: the tensor that is meant."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Attribute) and node.attr in _CUTS:
            node = node.value
        elif isinstance(node, ast.BinOp):
            left = _base(node.left)
            return left or _base(node.right)
        else:
            return dotted(node)


def _carries_graph(script: Script, node: ast.expr) -> bool:
    """The value is a loss (something backward() was called on) with nothing that cuts its graph."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(_carries_graph(script, each) for each in node.elts)
    if isinstance(node, ast.Dict):
        return any(_carries_graph(script, each) for each in node.values if each is not None)
    if isinstance(node, ast.BinOp):
        return _carries_graph(script, node.left) or _carries_graph(script, node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CUTS:
        return False
    return _base(node) in script.losses and not (_chain(node) & _CUTS)


def graph_append(script: Script) -> Iterator[Finding]:
    """A loss with its graph goes into a list, a dictionary or a meter."""
    for call, _ in _method_calls(script, "append", "appendleft", "extend", "add", "update"):
        if call.args and _carries_graph(script, call.args[0]) and script.repeats(call):
            yield script.finding(
                "graph-append", call, f"{ast.unparse(call)} keeps the autograd graph of every step"
            )
    for node in script.nodes:
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Subscript)
            and _carries_graph(script, node.value)
            and script.repeats(node)
        ):
            yield script.finding("graph-append", node, f"{ast.unparse(node)} keeps the autograd graph")


def graph_sum(script: Script) -> Iterator[Finding]:
    """`total += loss`: the sum holds the graphs of all terms."""
    for node in script.nodes:
        target: str | None = None
        value: ast.expr | None = None
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            target, value = dotted(node.target), node.value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.BinOp):
            target = dotted(node.targets[0])
            value = node.value.right if dotted(node.value.left) == target else None
            if not isinstance(node.value.op, ast.Add):
                value = None
        if not target or value is None or not script.repeats(node):
            continue
        if target in script.losses:
            if _backward_comes_after_the_loop(script, node, target):
                text = f"{ast.unparse(node)} keeps the graphs of all iterations until one backward after the loop"
                yield script.finding("graph-sum", node, text)
        elif _carries_graph(script, value):
            yield script.finding(
                "graph-sum", node, f"{ast.unparse(node)} sums tensors together with their graphs"
            )


def _backward_comes_after_the_loop(script: Script, node: ast.AST, name: str) -> bool:
    """`total += loss` in a loop, and `total.backward()` outside of it."""
    loop = next((parent for parent in script.above(node) if isinstance(parent, (ast.For, ast.While))), None)
    calls = [call for call, _ in _method_calls(script, "backward") if dotted(call.func) == f"{name}.backward"]
    return loop is not None and bool(calls) and not any(loop in script.above(call) for call in calls)


def retain_graph(script: Script) -> Iterator[Finding]:
    """retain_graph or create_graph in backward keeps what backward would have freed."""
    for call, name in _method_calls(script, "backward", "grad"):
        for word in ("retain_graph", "create_graph"):
            if is_constant(keyword(call, word), True):
                where = "until the loss dies" if name.endswith("backward") else "until the gradients die"
                yield script.finding("retain-graph", call, f"{word}=True keeps all saved activations {where}")


def hidden_state(script: Script) -> Iterator[Finding]:
    """A recurrent state is fed into the next step without detach: the graph grows over all steps."""
    for loop in script.nodes:
        if not isinstance(loop, (ast.For, ast.While)):
            continue
        for node in ast.walk(loop):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            given = {
                dotted(argument) for argument in (*node.value.args, *(k.value for k in node.value.keywords))
            }
            made = {dotted(each) for target in node.targets for each in _targets(target)}
            again = {
                name for name in given & made if re.search(r"state|hidden|\bhx?\b|memory|cache|past", name)
            }
            cut = any(
                f"{name}.detach" in script.source or f"{name} = repackage" in script.source for name in again
            )
            if (
                again
                and not cut
                and not script.without_grad(node)
                and not re.search(r"\.to\(|\.cuda\(", ast.unparse(node))
            ):
                name = sorted(again)[0]
                yield script.finding(
                    "hidden-state", node, f"{name} goes into the next step with its graph (no detach)"
                )


def _targets(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, (ast.Tuple, ast.List)) else [node]


def container_append(script: Script) -> Iterator[Finding]:
    """Outputs are collected on the device, without their graph."""
    for call, _ in _method_calls(script, "append", "extend"):
        if not call.args or not script.in_loop(call):
            continue
        value = call.args[0]
        chain = _chain(value)
        detached = "detach" in chain or (script.without_grad(call) and _is_output(script, value))
        if detached and not chain & _LEAVES_DEVICE:
            yield script.finding(
                "container-append", call, f"{ast.unparse(call)} keeps results of every step on the device"
            )


def _is_output(script: Script, value: ast.expr) -> bool:
    """A name that is assigned from a call in the script: an output rather than a number or a text."""
    name = dotted(value)
    return bool(re.search(r"out|logit|pred|feat|embed|hidden|prob|score", name)) and "." not in name


def eval_no_grad(script: Script) -> Iterator[Finding]:
    """Evaluation runs the model and records gradients nobody wants."""
    for node in script.nodes:
        if (
            not isinstance(node, ast.FunctionDef)
            or not _EVAL_NAME.search(node.name)
            or node.name.startswith("test_")
        ):
            continue
        text = ast.unparse(node)
        runs = _MODEL_CALL.search(text) and ".eval()" in text
        if not runs or re.search(r"no_grad|inference_mode|set_grad_enabled|backward\(", text):
            continue
        callers = [
            call
            for call, name in zip(script.calls, script.names, strict=True)
            if name.rsplit(".", 1)[-1] == node.name
        ]
        if callers and all(script.without_grad(call) for call in callers):
            continue
        yield script.finding("eval-no-grad", node, f"{node.name}() runs the model without torch.no_grad()")


def load_device(script: Script) -> Iterator[Finding]:
    """torch.load without map_location puts tensors back where they were saved from: often cuda:0 for all ranks."""
    for call, name in zip(script.calls, script.names, strict=True):
        if name == "torch.load" and keyword(call, "map_location") is None and len(call.args) < 2:
            yield script.finding(
                "load-device",
                call,
                "torch.load without map_location returns tensors to the device they came from",
            )


def no_set_device(script: Script) -> Iterator[Finding]:
    """NCCL without set_device: every rank makes a context on GPU 0."""
    if not script.has(r"init_process_group$") or not re.search(r"['\"]nccl['\"]", script.source):
        return
    if re.search(r"set_device|device_id\s*=|CUDA_VISIBLE_DEVICES", script.source):
        return
    for call, name in zip(script.calls, script.names, strict=True):
        if name.endswith("init_process_group"):
            yield script.finding(
                "no-set-device",
                call,
                "no torch.cuda.set_device(local_rank): every rank makes a context on GPU 0",
            )
            return


def data_parallel(script: Script) -> Iterator[Finding]:
    """nn.DataParallel gathers outputs and losses on its first device."""
    for call, name in zip(script.calls, script.names, strict=True):
        if name in ("DataParallel", "nn.DataParallel", "torch.nn.DataParallel"):
            yield script.finding(
                "data-parallel", call, "nn.DataParallel gathers outputs and gradients on its first device"
            )


def zero_grad(script: Script) -> Iterator[Finding]:
    """Zeroed gradients stay allocated through the next forward; None ones do not."""
    for call, _ in _method_calls(script, "zero_grad"):
        if is_constant(keyword(call, "set_to_none"), False):
            yield script.finding(
                "zero-grad", call, "zero_grad(set_to_none=False) keeps gradients through the next forward"
            )


def empty_cache_loop(script: Script) -> Iterator[Finding]:
    """empty_cache() in a loop does not lower the peak of live tensors; it costs time."""
    for call, name in zip(script.calls, script.names, strict=True):
        if name.endswith("cuda.empty_cache") and script.in_loop(call):
            yield script.finding(
                "empty-cache-loop", call, "empty_cache() in a loop does not lower the peak of live tensors"
            )


def tensorboard(script: Script) -> Iterator[Finding]:
    """A loss tensor is handed to a logger, which may keep it."""
    for call, name in _method_calls(script, "add_scalar", "log", "log_metric"):
        values = [*call.args, *(each.value for each in call.keywords)]
        if any(_carries_graph(script, value) for value in values) and not name.startswith(
            ("math.", "np.", "torch.")
        ):
            yield script.finding(
                "logged-graph", call, f"{ast.unparse(call)[:80]} hands over a tensor with its graph"
            )


def full_state_dict(script: Script) -> Iterator[Finding]:
    """A full state dict gathers the unsharded model on each device unless it is offloaded to rank 0."""
    for call, name in zip(script.calls, script.names, strict=True):
        if name.endswith(("FullStateDictConfig", "StateDictOptions")):
            full = name.endswith("FullStateDictConfig") or is_constant(keyword(call, "full_state_dict"), True)
            offloads = is_constant(keyword(call, "offload_to_cpu"), True) or is_constant(
                keyword(call, "cpu_offload"), True
            )
            if full and not offloads:
                yield script.finding(
                    "full-state-dict", call, "the full state dict is gathered on the device (no CPU offload)"
                )


def no_sync(script: Script) -> Iterator[Finding]:
    """Sharded training keeps unsharded gradients where synchronisation is off."""
    sharded = script.has(r"FSDP$|FullyShardedDataParallel$|fully_shard$")
    for call, name in zip(script.calls, script.names, strict=True):
        if sharded and (name.endswith(".no_sync") or name.endswith(".set_requires_gradient_sync")):
            yield script.finding(
                "no-sync",
                call,
                "without gradient synchronisation, sharded training keeps unsharded gradients",
            )


def buckets(script: Script) -> Iterator[Finding]:
    """DDP without gradient_as_bucket_view holds the gradients twice."""
    for call, name in zip(script.calls, script.names, strict=True):
        is_ddp = re.search(r"(?:^|\.)(?:DistributedDataParallel|DDP)$", name)
        if is_ddp and not is_constant(keyword(call, "gradient_as_bucket_view"), True):
            yield script.finding(
                "ddp-buckets", call, "DDP without gradient_as_bucket_view=True holds all gradients twice"
            )


def cudnn_benchmark(script: Script) -> Iterator[Finding]:
    """cudnn.benchmark tries algorithms with large workspaces in the first iterations of each shape."""
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not is_constant(node.value, True):
            continue
        if any(dotted(each).endswith("cudnn.benchmark") for each in node.targets):
            text = "cudnn.benchmark=True tries algorithms with large workspaces"
            yield script.finding("cudnn-benchmark", node, text)


def memory_fraction(script: Script) -> Iterator[Finding]:
    """The script limits itself to a part of the device."""
    for call, name in zip(script.calls, script.names, strict=True):
        if name.endswith("set_per_process_memory_fraction"):
            yield script.finding(
                "memory-fraction", call, f"{ast.unparse(call)} limits torch to a part of the device"
            )


def caught_oom(script: Script) -> Iterator[Finding]:
    """The recovery runs inside the except block, where the exception still holds the frames and their tensors."""
    for node in script.nodes:
        if not isinstance(node, ast.ExceptHandler) or node.type is None:
            continue
        caught = ast.unparse(node.type)
        body = "\n".join(ast.unparse(each) for each in node.body)
        is_oom = "OutOfMemoryError" in caught or ("RuntimeError" in caught and "out of memory" in body)
        if is_oom and re.search(r"\b(?:train|step|run|forward|model|main|fit|generate)\w*\(", body):
            yield script.finding(
                "caught-oom",
                node,
                "the retry runs inside the except block, where the failed step's tensors still live",
            )


def exception_kept(script: Script) -> Iterator[Finding]:
    """A caught error is kept beyond its except block: its traceback keeps the frames and their tensors."""
    for node in script.nodes:
        if not isinstance(node, ast.ExceptHandler) or node.name is None or node.type is None:
            continue
        caught = ast.unparse(node.type)
        if not re.search(r"OutOfMemoryError|RuntimeError|\bException\b", caught):
            continue
        for inner in ast.walk(node):
            kept = (
                isinstance(inner, ast.Return) and inner.value is not None and dotted(inner.value) == node.name
            )
            kept |= isinstance(inner, ast.Assign) and dotted(inner.value) == node.name
            kept |= (
                isinstance(inner, ast.Call)
                and dotted(inner.func).endswith((".append", ".put"))
                and any(dotted(argument) == node.name for argument in inner.args)
            )
            if kept:
                text = "the caught error is kept, and with its traceback the tensors of the failed code"
                yield script.finding("exception-kept", inner, text)


def self_cycle(script: Script) -> Iterator[Finding]:
    """An object that holds a reference to itself is freed by the collector only."""
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Name):
            continue
        for target in node.targets:
            if isinstance(target, ast.Attribute) and dotted(target.value) == node.value.id:
                text = f"{ast.unparse(node)} makes the object refer to itself"
                yield script.finding("self-cycle", node, text)


RULES: tuple[Rule, ...] = (
    graph_append, graph_sum, retain_graph, hidden_state, container_append, eval_no_grad, load_device, no_set_device,
    data_parallel, zero_grad, empty_cache_loop, tensorboard, full_state_dict, no_sync, buckets, cudnn_benchmark,
    memory_fraction, caught_oom, exception_kept, self_cycle,
)  # fmt: skip
