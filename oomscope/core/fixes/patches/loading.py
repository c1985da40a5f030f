"""Loads a checkpoint into host memory: load_state_dict() copies it to where the model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst import metadata

from oomscope.core.fixes.patches.text import (
    Patched,
    calls_in,
    code_of,
    dotted,
    keyword,
    last_name,
    names_used,
    parse,
    target_names,
    with_keyword,
)
from oomscope.errors import PatchDoesNotApply

_LOAD = "torch.load"
_CPU = frozenset({"cpu", "torch.device(cpu)"})


class _Restored(cst.CSTVisitor):
    """Which `torch.load` calls feed `load_state_dict`, directly or by a name."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: list[cst.Call] = []
        self.names: set[str] = set()
        self.assigned: list[tuple[str, cst.Call]] = []

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        if last_name(node.func) != "load_state_dict" and not m.matches(
            node.func, m.Attribute(attr=m.Name("load_state_dict"))
        ):
            return
        for arg in node.args:
            self.direct += [call for call in calls_in(arg) if dotted(call.func) == _LOAD]
            self.names |= names_used(arg.value)

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        for target in node.targets:
            for name in target_names(target.target):
                self.assigned += [(name, call) for call in calls_in(node.value) if dotted(call.func) == _LOAD]

    def calls(self) -> list[cst.Call]:
        return [*self.direct, *(call for name, call in self.assigned if name in self.names)]


class _ToHost(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (metadata.PositionProvider,)

    def __init__(self, wanted: list[cst.Call]) -> None:
        super().__init__()
        self.wanted = wanted
        self.changes: list[str] = []

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if not any(original_node is call for call in self.wanted) or _place(original_node) in _CPU:
            return updated_node
        line = self.get_metadata(metadata.PositionProvider, original_node).start.line
        self.changes.append(f"line {line}: the checkpoint is read into host memory")
        if len(updated_node.args) > 1 and updated_node.args[1].keyword is None:
            args = list(updated_node.args)
            args[1] = args[1].with_changes(value=cst.SimpleString('"cpu"'))
            return updated_node.with_changes(args=args)
        return with_keyword(updated_node, "map_location", '"cpu"')


def _place(call: cst.Call) -> str:
    """The `map_location` of a call without its quotes, empty when there is none."""
    given = keyword(call, "map_location")
    if given is None and len(call.args) > 1 and call.args[1].keyword is None:
        given = call.args[1]
    return "" if given is None else code_of(given.value).replace('"', "").replace("'", "")


def to_host(source: str, options: Mapping[str, Any]) -> Patched:
    """`map_location="cpu"` for each `torch.load` whose result goes into `load_state_dict`.

    Tensors that are used where they are loaded would stay on the CPU, so other loads are left alone.

    Raises:
        PatchDoesNotApply: no such load is in the file, or all of them read into host memory already.
    """
    wrapper = metadata.MetadataWrapper(parse(source))
    found = _Restored()
    wrapper.module.visit(found)
    transform = _ToHost(found.calls())
    changed = wrapper.visit(transform)
    if not transform.changes:
        why = (
            "already map_location='cpu'" if found.calls() else "none whose result goes into load_state_dict()"
        )
        raise PatchDoesNotApply(f"no torch.load() to change in this file: {why}")
    return Patched(changed.code, tuple(transform.changes))
