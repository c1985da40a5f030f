"""Which of the user's own files a script imports: those in its folder, nothing that is installed."""

from __future__ import annotations

import ast
from pathlib import Path

#: No more files are looked at: a training repository's own modules, not a library.
MAX_FILES = 50
_MAX_BYTES = 1 << 20


def local_modules(script: Path) -> list[Path]:
    """Files below the script's folder that it imports, directly or through each other, in the order they are found."""
    base = script.resolve().parent
    found: list[Path] = []
    seen = {script.resolve()}
    queue = [script.resolve()]
    while queue and len(found) < MAX_FILES:
        path = queue.pop(0)
        for module in _imports(path, base):
            if module not in seen:
                seen.add(module)
                found.append(module)
                queue.append(module)
    return found[:MAX_FILES]


def _imports(path: Path, base: Path) -> list[Path]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return []
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[tuple[Path, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(base, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            root = base if not node.level else path.parents[node.level - 1]
            module = node.module or ""
            names.append((root, module))
            names += [(root, f"{module}.{alias.name}".strip(".")) for alias in node.names]
    resolved = [_file(root, name) for root, name in names]
    return [each for each in resolved if each is not None and base in each.parents]


def _file(root: Path, name: str) -> Path | None:
    if not name:
        return None
    place = root.joinpath(*name.split("."))
    for candidate in (place.with_suffix(".py"), place / "__init__.py"):
        if candidate.is_file():
            return candidate.resolve()
    return None
