"""The rules of advice, over all rules and every mixture of settings: what must never be offered never is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomscope.core.diagnosis import Evidence, diagnose
from oomscope.core.diagnosis.advice import ALLOCATOR_FIXES, AUTOCAST_FIXES, SHARDING_FIXES, choose_fixes
from oomscope.core.diagnosis.evidence import FixOutcome, ModelFact, OomFact, RankFact, Settings, Signal
from oomscope.core.diagnosis.model import Finding
from oomscope.core.diagnosis.rules import BUILT_IN
from oomscope.core.fixes import CATALOGUE
from oomscope.core.lint.features import features
from oomscope.units import GIB

#: Line of a script, and the fixes that it makes pointless.
ON = {
    "model.gradient_checkpointing_enable()": {"ckpt", "ckpt-selective"},
    "optimizer = AdamW(model.parameters(), fused=True)": {"optim-fused"},
    "optimizer = bnb.optim.AdamW8bit(model.parameters())": {"optim-8bit"},
    "p.register_post_accumulate_grad_hook(step)": {"optim-in-bwd"},
    "model = DDP(model, gradient_as_bucket_view=True)": {"bucket-view"},
    "loss = F.linear_cross_entropy(h, w, y)": {"fused-ce"},
    "y = F.scaled_dot_product_attention(q, k, v)": {"sdpa"},
    "with torch.autograd.graph.save_on_cpu():": {"offload-activations"},
    "with torch.autocast('cuda', dtype=torch.bfloat16):": set(AUTOCAST_FIXES),
    "os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'": {"expandable"},
    "fully_shard(model)": set(SHARDING_FIXES),
}
FIXES = sorted({fix for rule in BUILT_IN for fix in rule.fixes})

gib = st.integers(0, 40).map(lambda n: n * GIB)
maybe = st.one_of(st.none(), st.booleans())
evidences = st.builds(
    Evidence,
    oom=st.builds(
        OomFact, step=st.integers(0, 9), phase=st.sampled_from(["forward", "backward", "optimizer", "eval", None]),
        requested_bytes=gib, device_free_bytes=gib, allocated_bytes=gib, reserved_bytes=gib, capacity_bytes=gib,
    ),
    ranks=st.integers(0, 3).map(lambda n: tuple(RankFact(rank=each) for each in range(n))),
    model=st.one_of(
        st.none(),
        st.builds(
            ModelFact, parameters_bytes=gib, gradients_bytes=gib, optimizer_bytes=gib, autocast=maybe,
            optimizer=st.sampled_from(["AdamW", "AdamW8bit", None]),
        ),
    ),
    settings=st.one_of(st.none(), st.builds(Settings, expandable=maybe, max_split=maybe, gc_threshold=maybe)),
    outcomes=st.lists(st.sampled_from(FIXES).map(lambda fix: FixOutcome(fix, GIB, GIB)), max_size=2).map(tuple),
    signals=st.lists(st.sampled_from(sorted(ON)), max_size=4).map(
        lambda lines: tuple(Signal(f.name, f.text, "source code") for line in lines for f in features(line))
    ),
)  # fmt: skip


def forbidden(e: Evidence) -> set[str]:
    """Fixes that make no sense beside what is known, by the rules of advice and nothing else."""
    no = {fix for outcome in e.outcomes for fix in outcome.fix.split("+")}
    names = {signal.name for signal in e.signals}
    for line, fixes in ON.items():
        if {feature.name for feature in features(line)} & names:
            no |= fixes
    if e.settings is not None:
        no |= {"expandable", "max-split"} if e.settings.expandable else set()
        no |= {"max-split"} if e.settings.max_split else set()
        no |= {"gc-threshold"} if e.settings.gc_threshold else set()
    if e.model is not None:
        no |= set(AUTOCAST_FIXES) if e.model.autocast else set()
        no |= {"optim-8bit"} if "8bit" in (e.model.optimizer or "") else set()
    if e.shortfall is not None and e.shortfall > 0:
        no |= ALLOCATOR_FIXES
    static = e.model.static_bytes if e.model is not None else None
    if static is not None and e.allocated and static <= 0.5 * e.allocated:
        no |= SHARDING_FIXES
    if len(e.ranks) == 1:
        no |= SHARDING_FIXES
    return no


@given(evidences)
@settings(max_examples=200, deadline=None)
def test_no_rule_offers_what_is_on_or_cannot_help(evidence):
    no = forbidden(evidence)
    for rule in BUILT_IN:
        assert not set(choose_fixes(evidence, rule, Finding(0.9, "because"))) & no, rule.id
    for verdict in diagnose(evidence).verdicts:
        assert not set(verdict.fixes) & no, verdict.rule.id


@pytest.mark.parametrize("line", ON)
def test_the_source_shows_that_it_is_on(line):
    assert features(line), line


def test_every_fix_that_a_rule_names_is_in_the_catalogue_and_bit_identical_ones_come_first():
    risk = {fix.id: fix.risk for fix in CATALOGUE}
    for rule in BUILT_IN:
        assert set(rule.fixes) <= set(risk), rule.id
        kept = [str(getattr(risk[fix], "value", risk[fix])) in ("none", "exact") for fix in rule.fixes]
        rounding = [n for n, same in enumerate(kept) if not same]
        if rule.id == "oom.capacity_activations":
            assert kept[0]
            assert rounding[0] >= 2
