"""Style and glyph of each memory category, the same in every view of a snapshot."""

from __future__ import annotations

from oomscope.core.snapshot.categories import Category

STYLES: dict[Category, str] = {
    Category.PARAMETERS: "baseline",
    Category.GRADIENTS: "allocated",
    Category.OPTIMIZER_STATE: "ok",
    Category.ACTIVATIONS: "inactive",
    Category.TEMPORARIES: "predicted",
    Category.COLLECTIVES: "error",
    Category.WORKSPACES: "warn",
    Category.BEFORE_HISTORY: "other",
    Category.UNKNOWN: "free",
}
"""Names of styles in `themes`."""

GLYPHS: dict[Category, str] = {
    Category.PARAMETERS: "█",
    Category.GRADIENTS: "▓",
    Category.OPTIMIZER_STATE: "▚",
    Category.ACTIVATIONS: "░",
    Category.TEMPORARIES: "╱",
    Category.COLLECTIVES: "╳",
    Category.WORKSPACES: "≡",
    Category.BEFORE_HISTORY: "∙",
    Category.UNKNOWN: "?",
}
"""Whole-cell patterns for a screen without colours."""

SHORT: dict[Category, str] = {
    Category.PARAMETERS: "params",
    Category.GRADIENTS: "grads",
    Category.OPTIMIZER_STATE: "optim",
    Category.ACTIVATIONS: "activ",
    Category.TEMPORARIES: "temp",
    Category.COLLECTIVES: "coll",
    Category.WORKSPACES: "workspc",
    Category.BEFORE_HISTORY: "before",
    Category.UNKNOWN: "unknown",
}
"""At most seven letters, for tables."""
