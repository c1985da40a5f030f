"""A parsed training script with what every rule asks.

Dotted names, parents, loops, and what the losses are called.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BACKWARD_OF_OTHERS = (
    "accelerator.backward",
    "scaler.scale",
    "manual_backward",
    "fabric.backward",
    "engine.backward",
)
Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True)
class Finding:
    """A pattern at a line. `rule` is stable; `text` is one sentence."""

    rule: str
    line: int
    function: str
    text: str
    source: str


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute; "()" stands for a call in between; "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    elif isinstance(node, ast.Call):
        parts.append("()")
    return ".".join(reversed(parts))


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


class Script:
    """The syntax tree of one file.

    Raises:
        SyntaxError: not Python (or a newer one).
        ValueError: the text holds a NUL character.
        RecursionError: nested too deeply to walk.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines()
        self.tree = ast.parse(source)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        for node in ast.walk(self.tree):
            self.nodes.append(node)
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.names = [dotted(call.func) for call in self.calls]
        self.losses = self._losses()

    def _losses(self) -> frozenset[str]:
        """Names on which backward() is called: their values carry a graph."""
        found = set()
        for call, name in zip(self.calls, self.names, strict=True):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
                found.add(dotted(call.func.value))
            if name.endswith(_BACKWARD_OF_OTHERS):
                found |= {dotted(argument) for argument in call.args}
        return frozenset(found - {"", "()"} - {each.rsplit(".", 1)[0] for each in _BACKWARD_OF_OTHERS})

    def has(self, pattern: str) -> bool:
        """Whether some call's dotted name matches."""
        return any(re.search(pattern, name) for name in self.names)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Parents, innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def in_loop(self, node: ast.AST) -> bool:
        """Inside a for or while of the same function."""
        for parent in self.above(node):
            if isinstance(parent, (ast.For, ast.While, ast.AsyncFor)):
                return True
            if isinstance(parent, Scope):
                return False
        return False

    def repeats(self, node: ast.AST) -> bool:
        """In a loop, or in a function or method, which somebody else may call in a loop."""
        return any(isinstance(p, (ast.For, ast.While, ast.AsyncFor, *Scope[:2])) for p in self.above(node))

    def function(self, node: ast.AST) -> str:
        """Name of the enclosing function."""
        for parent in self.above(node):
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return parent.name
        return "<module>"

    def without_grad(self, node: ast.AST) -> bool:
        """Under no_grad, inference_mode or set_grad_enabled, by a with statement or a decorator."""
        for parent in self.above(node):
            if isinstance(parent, (ast.With, ast.AsyncWith)):
                if any(_stops_grad(ast.unparse(item.context_expr)) for item in parent.items):
                    return True
            elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
                _stops_grad(ast.unparse(each)) for each in parent.decorator_list
            ):
                return True
        return False

    def text_at(self, line: int) -> str:
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""

    def finding(self, rule: str, node: ast.AST | None, text: str) -> Finding:
        line = getattr(node, "lineno", 0) if node is not None else 0
        return Finding(
            rule, line, self.function(node) if node is not None else "<module>", text, self.text_at(line)
        )


def _stops_grad(text: str) -> bool:
    return bool(re.search(r"no_grad|inference_mode|set_grad_enabled\(False", text))
