"""Finds the repeated blocks of a model: what can be checkpointed or sharded one by one."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class BlockGroup(NamedTuple):
    """Blocks of one class that stand side by side."""

    class_name: str
    path: str
    """Dotted path of the container, or of the parent of the siblings."""
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    parameters: int


def find_block_groups(root: nn.Module) -> list[BlockGroup]:
    """Groups of at least two non-leaf blocks of one class in a container, or three siblings outside one.

    Leaf layers are left out (checkpointing one alone saves nothing), and so is a group inside another group's
    block. The group with most parameters comes first.
    """
    groups = _in_containers(root)
    covered = {name for group in groups for name in group.names}
    groups += _siblings(root, covered)
    outermost = [group for group in groups if not _is_nested(group, groups)]
    return sorted(outermost, key=lambda group: -group.parameters)


def _in_containers(root: nn.Module) -> list[BlockGroup]:
    found = []
    for name, container in root.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        by_class: dict[type, list[tuple[str, nn.Module]]] = {}
        for child_name, child in container.named_children():
            if any(True for _ in child.children()):
                path = f"{name}.{child_name}" if name else child_name
                by_class.setdefault(type(child), []).append((path, child))
        found += [_group(cls, name, items) for cls, items in by_class.items() if len(items) >= 2]
    return found


def _siblings(root: nn.Module, covered: Any) -> list[BlockGroup]:
    by_key: dict[tuple[type, str], list[tuple[str, nn.Module]]] = {}
    for name, module in root.named_modules():
        is_block = module is not root and any(True for _ in module.children())
        if is_block and not isinstance(module, _CONTAINERS) and name not in covered:
            by_key.setdefault((type(module), name.rpartition(".")[0]), []).append((name, module))
    return [_group(cls, parent, items) for (cls, parent), items in by_key.items() if len(items) >= 3]


def _group(cls: type, path: str, items: list[tuple[str, nn.Module]]) -> BlockGroup:
    count = sum(parameter.numel() for _, block in items for parameter in block.parameters())
    names = tuple(name for name, _ in items)
    return BlockGroup(cls.__qualname__, path, names, tuple(block for _, block in items), count)


def _is_nested(group: BlockGroup, groups: list[BlockGroup]) -> bool:
    first = group.names[0]
    return any(
        first.startswith(outer + ".") for other in groups if other is not group for outer in other.names
    )
