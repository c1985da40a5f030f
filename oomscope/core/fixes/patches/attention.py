"""Attention that keeps no matrix of weights: one fused call in place of the products written out.

Written out, every layer keeps several matrices of sequence × sequence for backward. The fused kernels of
`torch.nn.functional.scaled_dot_product_attention` keep one number a row (Dao et al., FlashAttention, 2022).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst import metadata

from oomscope.core.fixes.patches.attention_scores import Layers, Scores, product, read
from oomscope.core.fixes.patches.text import (
    Patched,
    add_import,
    calls_in,
    code_of,
    dotted,
    keyword,
    last_name,
    parse,
    target_names,
    with_keyword,
)
from oomscope.errors import PatchDoesNotApply

FUSED = "scaled_dot_product_attention"
_LONGEST_LINE = 100
_NOTE_MASK = "where the mask is causal, is_causal=True in its place is faster and needs no mask at all"


class _Layers(cst.CSTVisitor):
    """Which attributes of `self` are dropouts, softmaxes and attention layers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[str]] = {"Dropout": set(), "Softmax": set(), "MultiheadAttention": set()}
        self.tensors: set[str] = set()

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        if not isinstance(node.value, cst.Call):
            return
        kind = last_name(node.value.func)
        if kind == "Softmax" and code_of(node.value).replace(" ", "").partition("(")[2] not in (
            "dim=-1)",
            "-1)",
        ):
            return
        makes_tensor = kind == "Parameter" or "torch." in code_of(node.value)
        for target in node.targets:
            if not dotted(target.target).startswith("self."):
                continue
            if kind in self.found:
                self.found[kind].add(last_name(target.target))
            elif makes_tensor:
                self.tensors.add(last_name(target.target))

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        if last_name(node.func) in ("register_buffer", "register_parameter") and node.args:
            self.tensors.add(code_of(node.args[0].value).strip("\"'"))

    def layers(self) -> Layers:
        return Layers(
            frozenset(self.found["Dropout"]),
            frozenset(self.found["Softmax"]),
            frozenset(self.found["MultiheadAttention"]),
            frozenset(self.tensors),
        )


@dataclass(frozen=True, slots=True)
class _Chain:
    """Scores under construction in one block: what is known so far, the statements and the names that hold them."""

    scores: Scores
    statements: tuple[int, ...]
    names: frozenset[str]


class _Fuse(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (metadata.PositionProvider,)

    def __init__(self, layers: Layers, function: str) -> None:
        super().__init__()
        self.layers = layers
        self.function = function
        self.changes: list[str] = []
        self.reasons: list[str] = []
        self.masked = False
        self.calls_fused = False
        self._uses: list[Counter[str]] = []

    # -- functions and blocks

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        self._uses.append(_count(node.body))

    def leave_FunctionDef(  # noqa: N802
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        self._uses.pop()
        return updated_node

    def leave_IndentedBlock(  # noqa: N802
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        if not self._uses:
            return updated_node
        # Nothing of a block is rewritten twice: positions and names are those of the original.
        body = self._rewritten(original_node.body, list(updated_node.body))
        return updated_node.with_changes(body=body)

    def _rewritten(
        self, original: Sequence[cst.BaseStatement], updated: list[cst.BaseStatement]
    ) -> list[cst.BaseStatement]:
        chains: dict[str, _Chain] = {}
        dropped: set[int] = set()
        for index, statement in enumerate(original):
            known = {name: chain.scores for name, chain in chains.items()}
            step = _step(statement, known, self.layers)
            if step is not None:
                name, source, scores = step
                earlier = chains.pop(source) if source else _Chain(scores, (), frozenset())
                chains[name] = _Chain(scores, (*earlier.statements, index), earlier.names | {name})
                continue
            counted = _count(statement)
            used = {name: chains.pop(name) for name in list(chains) if counted[name]}
            done = self._finished(used, statement, original)
            if done is not None:
                updated[index], gone = done
                dropped |= set(gone)
            for name in [n for n, chain in chains.items() if chain.scores.names & _assigned(statement)]:
                del chains[name]  # its query, key or mask is another one from here on
        return _without(updated, dropped)

    def _finished(
        self,
        used: Mapping[str, _Chain],
        statement: cst.BaseStatement,
        original: Sequence[cst.BaseStatement],
    ) -> tuple[cst.BaseStatement, tuple[int, ...]] | None:
        """`statement` with the product of weights and values fused, and the statements that it replaces."""
        line = self._line(statement)
        final = _ProductOfWeights({name: chain.scores for name, chain in used.items()}, self.layers)
        if isinstance(
            statement, cst.SimpleStatementLine
        ):  # blocks inside a statement are looked at by themselves
            statement.visit(final)
        if final.scores is None or final.value is None or final.product is None or len(used) > 1:
            if any(chain.scores.weights for chain in used.values()):
                self.reasons.append(f"line {line} uses the attention weights for something else")
            return None
        name, chain = next(iter(used.items()), ("", _Chain(final.scores, (), frozenset())))
        here, bound = _count(statement), _assigned(statement)
        inside = sum((_count(original[i]) for i in chain.statements), here)
        for each in chain.names:
            read_here = here[each] - (each in bound)
            if read_here != (each == name) or (each not in bound and self._uses[-1][each] > inside[each]):
                self.reasons.append(f"{each} at line {line} is used elsewhere too: the weights are needed")
                return None
        call = self._call(final.scores, final.product, final.value, statement)
        changed = statement.deep_replace(final.product, call)
        assert isinstance(changed, cst.BaseStatement)
        self.masked = self.masked or final.scores.mask is not None
        self.calls_fused = True
        self.changes.append(f"line {line}: the attention weights are not kept ({FUSED})")
        comments = [each for i in chain.statements for each in _comments(original[i])]
        if comments and isinstance(changed, cst.SimpleStatementLine):
            changed = changed.with_changes(leading_lines=[*comments, *changed.leading_lines])
        return changed, chain.statements

    def _call(
        self,
        scores: Scores,
        product: cst.BaseExpression,
        value: cst.BaseExpression,
        statement: cst.BaseStatement,
    ) -> cst.BaseExpression:
        arguments = scores.arguments(code_of(value))
        text = f"{self.function}({', '.join(arguments)})"
        column = self.get_metadata(metadata.PositionProvider, statement).start.column
        rest = len(code_of(statement).strip()) - len(code_of(product))
        if column + rest + len(text) > _LONGEST_LINE:
            lines = [", ".join(arguments[:3]), *arguments[3:]]
            text = f"{self.function}(\n" + "".join(f"    {each},\n" for each in lines) + ")"
        return cst.parse_expression(text)

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(metadata.PositionProvider, node).start.line)

    # -- layers and models that can do without the weights themselves

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:  # noqa: N802
        """`y, _ = self.attention(…)`: weights that nobody reads."""
        call = updated_node.value
        if len(original_node.targets) != 1 or not isinstance(call, cst.Call):
            return updated_node
        names = target_names(original_node.targets[0].target)
        ignored = len(names) == 2 and (names[1] == "_" or (self._uses and self._uses[-1][names[1]] == 1))
        if ignored and self._can_skip(call):
            return updated_node.with_changes(value=self._skipping(original_node, call))
        return updated_node

    def leave_Subscript(  # noqa: N802
        self, original_node: cst.Subscript, updated_node: cst.Subscript
    ) -> cst.Subscript:
        """`self.attention(…)[0]`."""
        call = updated_node.value
        first = code_of(updated_node).endswith("[0]")
        if first and isinstance(call, cst.Call) and self._can_skip(call):
            return updated_node.with_changes(value=self._skipping(original_node, call))
        return updated_node

    def _can_skip(self, call: cst.Call) -> bool:
        is_layer = dotted(call.func).startswith("self.") and last_name(call.func) in self.layers.attentions
        plain = [arg for arg in call.args if arg.keyword is None]
        return is_layer and len(plain) <= 4 and keyword(call, "need_weights") is None

    def _skipping(self, place: cst.CSTNode, call: cst.Call) -> cst.Call:
        self.changes.append(f"line {self._line(place)}: weights that nobody reads are not computed")
        return with_keyword(call, "need_weights", "False")

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        given = keyword(updated_node, "attn_implementation")
        if given is None or code_of(given.value).strip("\"'") != "eager":
            return updated_node
        quote = code_of(given.value)[0]
        self.changes.append(f"line {self._line(original_node)}: the model's attention is fused")
        return with_keyword(updated_node, "attn_implementation", f"{quote}sdpa{quote}")


class _ProductOfWeights(cst.CSTVisitor):
    """The product `weights @ value` inside a statement."""

    def __init__(self, known: Mapping[str, Scores], layers: Layers) -> None:
        super().__init__()
        self.known = known
        self.scores: Scores | None = None
        """Those of the product itself: the softmax may be taken, or the dropout applied, inside it."""
        self.layers = layers
        self.product: cst.BaseExpression | None = None
        self.value: cst.BaseExpression | None = None

    def on_visit(self, node: cst.CSTNode) -> bool:
        if not isinstance(node, cst.BaseExpression):
            return self.product is None
        sides = product(node)
        scores = read(sides[0], self.known, self.layers) if sides else None
        if sides and scores is not None and scores.weights:
            self.product, self.value, self.scores = node, sides[1], scores
        return self.product is None


def fuse(source: str, options: Mapping[str, Any]) -> Patched:
    """Fused attention in three places.

    Where softmax(q @ kᵀ) @ v is written out, where a layer returns weights that nobody reads, and where a model
    is told to be eager.

    Args:
        source: the module with the attention.
        options: none.

    Raises:
        PatchDoesNotApply: it is there already, the weights are needed, or there is no such attention.
    """
    if FUSED in source:
        raise PatchDoesNotApply(f"the file calls {FUSED} already")
    wrapper = metadata.MetadataWrapper(parse(source))
    layers = _Layers()
    wrapper.module.visit(layers)
    function, needs_torch = _function(wrapper.module)
    transform = _Fuse(layers.layers(), function)
    changed = wrapper.visit(transform)
    if not transform.changes:
        why = (
            transform.reasons[0]
            if transform.reasons
            else "no softmax(q @ kᵀ) @ v in a form that is understood"
        )
        raise PatchDoesNotApply(f"no attention to fuse in this file: {why}")
    if transform.calls_fused and needs_torch:
        changed = add_import(changed, "torch")
    notes = (_NOTE_MASK,) if transform.masked else ()
    return Patched(changed.code, tuple(transform.changes), notes)


def _function(module: cst.Module) -> tuple[str, bool]:
    """The fused function by the name that the file has for torch.nn.functional, and whether torch is to be imported."""
    text = module.code
    for line in ("import torch.nn.functional as F", "from torch.nn import functional as F"):
        if line in text:
            return f"F.{FUSED}", False
    return f"torch.nn.functional.{FUSED}", True


def _step(
    statement: cst.BaseStatement, known: Mapping[str, Scores], layers: Layers
) -> tuple[str, str | None, Scores] | None:
    """A statement that only builds scores: the name they get, the name they had, and what they are now."""
    if isinstance(statement, cst.If):
        return _masked_if_given(statement, known, layers)
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    small = statement.body[0]
    target: cst.BaseExpression
    if isinstance(small, cst.Assign) and len(small.targets) == 1:
        target, value = small.targets[0].target, small.value
    elif isinstance(small, cst.AugAssign):
        operator = {
            cst.MultiplyAssign: cst.Multiply(), cst.DivideAssign: cst.Divide(), cst.AddAssign: cst.Add()
        }.get(type(small.operator))  # fmt: skip
        if operator is None:
            return None
        target, value = small.target, cst.BinaryOperation(small.target, operator, small.value)
    elif isinstance(small, cst.Expr) and m.matches(small.value, _IN_PLACE):
        assert isinstance(small.value, cst.Call)
        assert isinstance(small.value.func, cst.Attribute)
        target, value = small.value.func.value, small.value
    else:
        return None
    if not isinstance(target, cst.Name):
        return None
    scores = read(value, known, layers)
    if scores is None:
        return None
    used = _count(value)
    return target.value, next((name for name in known if used[name]), None), scores


_IN_PLACE = m.Call(func=m.Attribute(value=m.Name(), attr=m.Name("masked_fill_")))


def _masked_if_given(
    statement: cst.If, known: Mapping[str, Scores], layers: Layers
) -> tuple[str, str | None, Scores] | None:
    """`if mask is not None:` around the one statement that masks the scores."""
    test = statement.test
    given = m.Comparison(comparisons=[m.ComparisonTarget(m.IsNot(), m.Name("None"))])
    body = statement.body.body
    if statement.orelse is not None or not m.matches(test, given) or len(body) != 1:
        return None
    inner = body[0]
    if not isinstance(inner, cst.BaseStatement) or not isinstance(test, cst.Comparison):
        return None
    step = _step(inner, known, layers)
    if step is None or step[1] != step[0]:
        return None
    scores = step[2].when(code_of(test.left), known[step[0]])
    return None if scores is None else (step[0], step[1], scores)


def _count(node: cst.CSTNode) -> Counter[str]:
    """How often each name is read or bound, attributes of the same name left out."""
    attributes = Counter(
        found.attr.value for found in m.findall(node, m.Attribute()) if isinstance(found, cst.Attribute)
    )
    keywords = Counter(
        arg.keyword.value for call in calls_in(node) for arg in call.args if arg.keyword is not None
    )
    names = Counter(found.value for found in m.findall(node, m.Name()) if isinstance(found, cst.Name))
    return names - attributes - keywords


def _assigned(statement: cst.CSTNode) -> set[str]:
    """Names that a statement binds, at any depth."""
    found: set[str] = set()
    for node in m.findall(statement, m.Assign() | m.AugAssign() | m.AnnAssign() | m.For()):
        if isinstance(node, cst.Assign):
            for each in node.targets:
                found |= set(target_names(each.target))
        elif isinstance(node, (cst.AugAssign, cst.AnnAssign, cst.For)):
            found |= set(target_names(node.target))
    return found


def _comments(statement: cst.CSTNode) -> list[cst.EmptyLine]:
    """Comments above and behind a statement that goes."""
    if isinstance(statement, cst.If):
        return list(statement.leading_lines)
    if not isinstance(statement, cst.SimpleStatementLine):
        return []
    trailing = statement.trailing_whitespace.comment
    behind = [cst.EmptyLine(comment=trailing)] if trailing is not None else []
    return [line for line in statement.leading_lines if line.comment is not None] + behind


def _without(body: list[cst.BaseStatement], dropped: set[int]) -> list[cst.BaseStatement]:
    return [statement for index, statement in enumerate(body) if index not in dropped]
