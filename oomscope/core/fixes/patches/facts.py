"""Which names in a script are losses, models and optimizers."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from oomscope.core.fixes.patches.text import dotted, names_used, target_names

#: Calls that take the loss in place of `loss.backward()`.
_BACKWARD_CALLS = ("backward", "manual_backward")


class ScriptFacts(cst.CSTVisitor):
    """Fills in as it visits a module."""

    def __init__(self) -> None:
        self.losses: set[str] = set()
        self.models: set[str] = set()
        self.optimizers: set[str] = set()

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        function = node.func
        if isinstance(function, cst.Attribute) and function.attr.value in _BACKWARD_CALLS:
            arguments = [arg.value for arg in node.args if arg.keyword is None]
            # accelerator.backward(loss) and fabric.backward(loss); loss.backward() and scaler.scale(loss).backward()
            holder = arguments[0] if arguments else function.value
            self.losses |= _plain_names(holder)
        for arg in node.args:
            if m.matches(arg.value, m.Call(func=m.Attribute(value=m.Name(), attr=m.Name("parameters")))):
                self.models |= {name for name in names_used(arg.value) if name != "parameters"}

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        if isinstance(node.value, cst.Call) and ".optim." in f".{dotted(node.value.func)}":
            self.optimizers |= {name for target in node.targets for name in target_names(target.target)}


def _plain_names(node: cst.BaseExpression) -> set[str]:
    """Names of an expression that can be the loss itself: not those of attributes and functions."""
    if isinstance(node, cst.Name):
        return {node.value}
    if isinstance(node, cst.Call):
        return {name for arg in node.args for name in _plain_names(arg.value)}
    if isinstance(node, cst.BinaryOperation):
        return _plain_names(node.left) | _plain_names(node.right)
    return set()


def facts_of(module: cst.Module) -> ScriptFacts:
    found = ScriptFacts()
    module.visit(found)
    return found


def backward_of(statement: cst.CSTNode) -> cst.BaseExpression | None:
    """The tensor whose `.backward(…)` the statement is, or None."""
    if m.matches(
        statement,
        m.SimpleStatementLine(body=[m.Expr(value=m.Call(func=m.Attribute(attr=m.Name("backward"))))]),
    ):
        call = statement.body[0].value  # type: ignore[attr-defined]
        return call.func.value  # type: ignore[no-any-return]
    return None
