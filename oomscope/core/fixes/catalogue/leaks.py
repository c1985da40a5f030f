"""Fixes of memory that the script keeps without need: source patches, and advice where no patch is safe."""

from __future__ import annotations

from oomscope.core.fixes.model import Applicable, Fix, How, JobFacts, Plan, Risk, no, yes

_GROWTH = (
    "oom.graph_accumulation",
    "oom.eval_graph",
    "oom.retained_outputs",
    "oom.growth",
    "oom.python_list_leak",
)


def _is_growth(facts: JobFacts) -> bool:
    return any(rule in _GROWTH or "accumulation" in rule or "leak" in rule for rule in facts.rules)


def _detach(facts: JobFacts) -> Applicable:
    if not _is_growth(facts):
        return no("nothing grows from step to step")
    if facts.where is None:
        return no("the line that keeps the tensors is not known")
    return yes(f"{facts.where[0]}:{facts.where[1]} keeps a tensor with its graph")


LEAK_DETACH = Fix(
    id="leak-detach",
    title="Keep the number, not the graph (.detach() where the loss is kept)",
    effort_s=120,
    risk=Risk.EXACT,
    how=(How.SOURCE,),
    test=_detach,
    make=lambda facts: Plan(patch="leak-detach", steps=("a kept loss is detached from its graph first",)),
    verify="the low of each step stays level; losses are equal",
    undo="git apply -R, or oomscope fix --undo",
)


def _logger(facts: JobFacts) -> Applicable:
    if _is_growth(facts):
        return yes(
            "hand numbers to loggers (loss.item()), and delete large intermediates before the next step"
        )
    return no("nothing grows from step to step")


KEPT_TENSORS = Fix(
    id="kept-tensors",
    title="Tensors handed to loggers, and intermediates that live into the next step",
    effort_s=300,
    risk=Risk.EXACT,
    how=(),
    test=_logger,
    make=lambda facts: Plan(
        steps=(
            "log loss.item(), not loss; `del` outputs before the next forward; keep no outputs in attributes",
        )
    ),
    verify="the low of each step stays level",
    runs=False,
    advice=True,
)


def _padding(facts: JobFacts) -> Applicable:
    if facts.batch_varies:
        return yes("batches differ in size from step to step")
    return no("all batches have the same size" if facts.observed else "the batches are not known")


PADDING = Fix(
    id="sampler-padding",
    title="Batches of similar length: bucketing sampler, or padding to few lengths",
    effort_s=1800,
    risk=Risk.SEMANTIC,
    how=(),
    test=_padding,
    make=lambda facts: Plan(
        steps=(
            "sort or bucket samples by length and cap the longest; pad to multiples of 64, so that the allocator "
            "can use its blocks again",
        )
    ),
    verify="the highest step is known before the run",
    runs=False,
    advice=True,
)


def _loaded(facts: JobFacts) -> Applicable:
    if any(rule in ("oom.load_duplicate", "oom.load_on_cuda0") for rule in facts.rules):
        return yes("the tensors of a checkpoint are on the card beside the model they are copied into")
    return no("no checkpoint is on the card beside the model")


LOAD_CPU = Fix(
    id="load-cpu",
    title='Load the checkpoint into host memory (map_location="cpu")',
    effort_s=60,
    risk=Risk.EXACT,
    how=(How.SOURCE,),
    test=_loaded,
    make=lambda facts: Plan(
        patch="load-cpu",
        steps=('torch.load(…, map_location="cpu") where the result goes into load_state_dict()',),
    ),
    verify="losses are equal",
    undo="git apply -R, or oomscope fix --undo",
)

FIXES = (LEAK_DETACH, LOAD_CPU, KEPT_TENSORS, PADDING)
