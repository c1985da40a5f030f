"""Lines that add to a named container or sum: where what is held comes from."""

from __future__ import annotations

import ast

from oomscope.core.lint.script import Finding, Script, dotted

_ADD = frozenset(
    {"append", "appendleft", "extend", "extendleft", "add", "insert", "update", "setdefault", "put", "push"}
)


def additions(source: str, path: str) -> list[Finding]:
    """Lines of `source` that add to what `path` names ("losses", "self.cache", "stats['loss']"), those in loops first.

    Of a path only the last name counts, because the same object bears other names elsewhere. [] for text that is not
    Python.
    """
    name = path.partition("[")[0].rsplit(".", 1)[-1].rsplit(": ", 1)[-1]
    if not name.isidentifier():
        return []
    try:
        script = Script(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = [node for node in script.nodes if _adds(node, name)]
    found.sort(key=lambda node: (not script.in_loop(node), getattr(node, "lineno", 0)))
    return [script.finding("adds-to", node, f"adds to {name}") for node in found]


def _adds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADD:
        return _last(node.func.value) == name
    if isinstance(node, ast.AugAssign):
        return _last(node.target) == name
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _last(target.value) == name:
                return True
            again = any(
                _last(each) == name
                for each in ast.walk(node.value)
                if isinstance(each, (ast.Name, ast.Attribute))
            )
            if _last(target) == name and again:
                return True
    return False


def _last(node: ast.AST) -> str:
    """`cache` of `self.cache`, `cache["x"]` and `cache`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return dotted(node).rsplit(".", 1)[-1]
