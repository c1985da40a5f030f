"""Reads attention that is written out: softmax(q @ kᵀ · scale + mask), followed over the statements that build it."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst

from oomscope.core.fixes.patches.text import code_of, dotted, keyword, last_name, names_used

#: A masked score must be so low that its weight is zero in every precision (half: exp(-1e4) underflows).
_LOWEST = -1e4
_INFINITIES = re.compile(r"-?(float\(['\"][+-]?inf(inity)?['\"]\)|(math|torch|np)\.inf)", re.IGNORECASE)
#: Calls on a tensor of scores that change its dtype or layout, not its meaning: the fused kernel does without.
_CASTS = frozenset({"float", "half", "bfloat16", "to", "type_as", "contiguous"})
_LAST_TWO = frozenset({(-2, -1), (-1, -2), (2, 3), (3, 2)})
#: Expressions that need no parentheses in front of a dot or behind an operator.
_ATOMS = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.Integer, cst.Float)


@dataclass(frozen=True, slots=True)
class Layers:
    """Attributes of the file's modules that matter here, by the class they are made of."""

    dropouts: frozenset[str] = frozenset()
    softmaxes: frozenset[str] = frozenset()
    """`nn.Softmax` over the last dimension."""
    attentions: frozenset[str] = frozenset()
    """`nn.MultiheadAttention`."""
    tensors: frozenset[str] = frozenset()
    """Parameters, buffers and other tensors: none of them can be the fused kernel's scale, which is a number."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What is known of a tensor of attention scores, or of weights once the softmax is taken. Texts are Python."""

    query: str
    key: str
    scale: str | None = None
    mask: str | None = None
    dropout: str | None = None
    weights: bool = False
    names: frozenset[str] = frozenset()
    """Names that these texts use."""

    def arguments(self, value: str) -> list[str]:
        """Arguments of the fused call."""
        arguments = [self.query, self.key, value]
        if self.mask is not None:
            arguments.append(f"attn_mask={self.mask}")
        if self.dropout is not None:
            arguments.append(f"dropout_p={self.dropout}")
        return [*arguments, f"scale={self.scale or '1.0'}"]

    def when(self, test: str, before: Scores) -> Scores | None:
        """These scores if `test is not None`, else `before`: only a mask may depend on it."""
        if before.mask is not None or dataclasses.replace(self, mask=None, names=before.names) != before:
            return None
        return dataclasses.replace(self, mask=f"None if {test} is None else {self.mask}")


def read(node: cst.BaseExpression, known: Mapping[str, Scores], layers: Layers) -> Scores | None:
    """The scores that `node` computes, given those that names hold; None when it computes something else."""
    if isinstance(node, cst.Name):
        return known.get(node.value)
    if isinstance(node, cst.BinaryOperation):
        return _read_operation(node, known, layers)
    if isinstance(node, cst.Call):
        return _read_call(node, known, layers)
    return None


def product(node: cst.BaseExpression) -> tuple[cst.BaseExpression, cst.BaseExpression, bool] | None:
    """Both sides of a matrix product, and whether it takes exactly three dimensions."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.MatrixMultiply):
        return node.left, node.right, False
    if not isinstance(node, cst.Call) or any(arg.keyword or arg.star for arg in node.args):
        return None
    name, values = last_name(node.func), [arg.value for arg in node.args]
    if dotted(node.func) in ("torch.matmul", "torch.bmm") and len(values) == 2:
        return values[0], values[1], name == "bmm"
    if (
        isinstance(node.func, cst.Attribute)
        and node.func.attr.value in ("matmul", "bmm")
        and len(values) == 1
    ):
        return node.func.value, values[0], node.func.attr.value == "bmm"
    return None


def _read_operation(node: cst.BinaryOperation, known: Mapping[str, Scores], layers: Layers) -> Scores | None:
    if isinstance(node.operator, cst.MatrixMultiply):
        return _read_product(node)
    left, right = read(node.left, known, layers), read(node.right, known, layers)
    if isinstance(node.operator, cst.Divide) and left:
        return _scaled(left, f"1.0 / {_operand(node.right)}", node.right, layers)
    if isinstance(node.operator, cst.Multiply) and (left or right):
        other = node.right if left else node.left
        return _scaled(left or right, code_of(_bare(other)), other, layers)
    if isinstance(node.operator, cst.Add) and (left or right):
        return _added(left or right, node.right if left else node.left)
    return None


def _read_product(node: cst.BaseExpression) -> Scores | None:
    sides = product(node)
    key = _transposed(sides[1], three=sides[2]) if sides else None
    if sides is None or key is None:
        return None
    query = _bare(sides[0])
    names = names_used(query) | names_used(key)
    return Scores(code_of(query), code_of(_bare(key)), names=frozenset(names))


def _transposed(node: cst.BaseExpression, *, three: bool) -> cst.BaseExpression | None:
    """`k` of an expression that swaps the last two dimensions of `k`."""
    if isinstance(node, cst.Attribute) and node.attr.value == "mT":
        return node.value
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return None
    method, values = node.func.attr.value, [arg.value for arg in node.args]
    target = node.func.value
    if dotted(node.func) == "torch.transpose" and values:
        method, target, values = "transpose", values[0], values[1:]
    numbers = tuple(_number(value) for value in values)
    if method in ("transpose", "swapaxes", "swapdims"):
        return (
            target
            if numbers in _LAST_TWO or (three and sorted(map(abs, _known(numbers))) == [1, 2])
            else None
        )
    if method == "permute":
        return target if numbers == (0, 1, 3, 2) or (three and numbers == (0, 2, 1)) else None
    return None


def _read_call(node: cst.Call, known: Mapping[str, Scores], layers: Layers) -> Scores | None:
    if product(node):
        return _read_product(node)
    name = node.func.attr.value if isinstance(node.func, cst.Attribute) else last_name(node.func)
    owner = node.func.value if isinstance(node.func, cst.Attribute) else None
    arguments = list(node.args)
    subject = read(owner, known, layers) if owner is not None else None
    if subject is None:
        if not arguments:
            return None
        subject = read(arguments.pop(0).value, known, layers)
        if subject is None:
            return None
        if dotted(node.func).startswith("self."):
            return _through_layer(subject, node.func, name, layers)
    elif name in _CASTS:
        return subject
    if name == "softmax":
        return _softmax(subject, node, arguments)
    if name in ("masked_fill", "masked_fill_") and len(arguments) == 2:
        return _filled(subject, arguments[0].value, arguments[1].value)
    if name == "dropout" and subject.weights and subject.dropout is None:
        return _dropped(subject, node, arguments)
    return None


def _through_layer(scores: Scores, func: cst.BaseExpression, name: str, layers: Layers) -> Scores | None:
    if name in layers.softmaxes and not scores.weights:
        return dataclasses.replace(scores, weights=True)
    if name in layers.dropouts and scores.weights and scores.dropout is None:
        return dataclasses.replace(scores, dropout=f"{dotted(func)}.p if self.training else 0.0")
    return None


def _softmax(scores: Scores, node: cst.Call, arguments: list[cst.Arg]) -> Scores | None:
    given = keyword(node, "dim") or next((arg for arg in arguments if arg.keyword is None), None)
    if scores.weights or given is None or _number(given.value) != -1:
        return None
    return dataclasses.replace(scores, weights=True)


def _dropped(scores: Scores, node: cst.Call, arguments: list[cst.Arg]) -> Scores | None:
    plain = [arg.value for arg in arguments if arg.keyword is None]
    named = {arg.keyword.value: arg.value for arg in arguments if arg.keyword is not None}
    share = named.get("p", plain[0] if plain else cst.Float("0.5"))
    training = code_of(named.get("training", plain[1] if len(plain) > 1 else cst.Name("True")))
    text = code_of(share) if training == "True" else f"{code_of(share)} if {training} else 0.0"
    return _with_names(dataclasses.replace(scores, dropout=text), *named.values(), *plain)


def _scaled(scores: Scores | None, factor: str, node: cst.BaseExpression, layers: Layers) -> Scores | None:
    if scores is None or scores.weights or scores.mask is not None or scores.scale is not None:
        return None
    if names_used(node) & layers.tensors or ("torch." in factor and "torch.tensor(" not in factor):
        return None  # perhaps a learned scale
    if "torch." in factor or ".sqrt(" in factor:
        factor = f"float({factor})"  # a tensor of one element is no float
    return _with_names(dataclasses.replace(scores, scale=factor), node)


def _added(scores: Scores | None, mask: cst.BaseExpression) -> Scores | None:
    if scores is None or scores.weights or scores.mask is not None:
        return None
    query = scores.query if re.fullmatch(r"[\w.]+", scores.query) else f"({scores.query})"
    return _with_names(dataclasses.replace(scores, mask=f"{_operand(mask)}.to({query}.dtype)"), mask)


def _filled(scores: Scores, condition: cst.BaseExpression, value: cst.BaseExpression) -> Scores | None:
    if scores.weights or scores.mask is not None or not _is_lowest(value):
        return None
    return _with_names(dataclasses.replace(scores, mask=_inverted(condition)), condition)


def _is_lowest(node: cst.BaseExpression) -> bool:
    text = code_of(node)
    number = _number(node)
    if number is not None:
        return number <= _LOWEST
    infinite = _INFINITIES.fullmatch(text) is not None and text.count("-") == 1
    return infinite or re.fullmatch(r"torch\.finfo\(.*\)\.min", text) is not None


def _inverted(condition: cst.BaseExpression) -> str:
    """The mask of scores that take part, where `condition` is that of those that do not."""
    if isinstance(condition, cst.UnaryOperation) and isinstance(condition.operator, cst.BitInvert):
        return code_of(_bare(condition.expression))
    if isinstance(condition, cst.Comparison) and len(condition.comparisons) == 1:
        compared = condition.comparisons[0]
        if isinstance(compared.operator, cst.Equal) and code_of(compared.comparator) in ("0", "False"):
            return f"{code_of(condition.left)} != 0"
    return f"~{_operand(condition)}"


def _with_names(scores: Scores, *nodes: cst.BaseExpression) -> Scores:
    used = frozenset(name for node in nodes for name in names_used(node))
    return dataclasses.replace(scores, names=scores.names | used)


def _operand(node: cst.BaseExpression) -> str:
    bare = _bare(node)
    return code_of(bare) if isinstance(bare, _ATOMS) else f"({code_of(bare)})"


def _bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """`node` without parentheses around it."""
    return node.with_changes(lpar=(), rpar=())


def _number(node: cst.BaseExpression) -> float | int | None:
    try:
        value = ast.literal_eval(code_of(node))
    except (ValueError, SyntaxError):
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _known(numbers: tuple[float | int | None, ...]) -> list[float | int]:
    return [number for number in numbers if number is not None]
