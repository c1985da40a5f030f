# ruff: noqa: E501  (a table: one action a line)
"""The snapshot screen's part of the action table."""

from __future__ import annotations

from oomscope.tui.actions import Action

SNAPSHOT = "Snapshot"
ICICLE = "Icicle"

#: Keys of the icicle alone; they work while it has the keyboard.
ICICLE_ACTIONS: tuple[Action, ...] = (
    Action("icicle.parent", "up,k", "parent", "Caller", "Select the box above: the caller.", ICICLE),
    Action("icicle.child", "down,j", "child", "Callee", "Select the largest box below: what it calls.", ICICLE),
    Action("icicle.left", "left,h", "sibling(-1)", "Left box", "Select the box on the left.", ICICLE),
    Action("icicle.right", "right,l", "sibling(1)", "Right box", "Select the box on the right.", ICICLE),
    Action("icicle.zoom", "enter", "zoom", "Zoom", "Give the selected box the whole width; esc goes back.", ICICLE),
)  # fmt: skip

#: Everything a key does on the snapshot screen; give it to `actions.make_bindings` for the screen's BINDINGS.
_SCREEN_ACTIONS: tuple[Action, ...] = (
    Action("snapshot.view", "v", "view", "View", "The next view: icicle, allocations, segments, stack.", SNAPSHOT, 7),
    Action("snapshot.left", "left,h", "cursor(-1)", "Earlier", "Move the moment one column earlier.", SNAPSHOT),
    Action("snapshot.right", "right,l", "cursor(1)", "Later", "Move the moment one column later.", SNAPSHOT),
    Action("snapshot.far_left", "shift+left,H", "cursor(-10)", "Earlier ×10", "Ten columns earlier.", SNAPSHOT),
    Action("snapshot.far_right", "shift+right,L", "cursor(10)", "Later ×10", "Ten columns later.", SNAPSHOT),
    Action("snapshot.in", "plus", "zoom(2)", "Zoom in", "Half as many events around the moment.", SNAPSHOT),
    Action("snapshot.out", "minus", "zoom(-2)", "Zoom out", "Twice as many events around the moment.", SNAPSHOT),
    Action("snapshot.fit", "equals_sign", "fit", "Fit", "The whole history, or the marked range.", SNAPSHOT),
    Action("snapshot.peak", "p", "peak", "Peak", "Go to the moment at which most was live.", SNAPSHOT, 6),
    Action("snapshot.previous", "left_square_bracket", "event(-1)", "Previous", "Go to the step boundary or error before this moment.", SNAPSHOT),
    Action("snapshot.next", "right_square_bracket", "event(1)", "Next", "Go to the step boundary or error after this moment.", SNAPSHOT),
    Action("snapshot.mark", "m", "mark", "Mark", "Mark this moment; two marks make a range, and = shows just that.", SNAPSHOT, 3),
    Action("snapshot.to_mark", "apostrophe", "to_mark", "To mark", "Jump to the other mark.", SNAPSHOT),
    Action("snapshot.reserved", "r", "reserved", "Reserved", "Scale the chart to the reserved or to the live bytes.", SNAPSHOT),
    Action("snapshot.filter", "slash", "filter", "Filter", "Show only allocations whose code or category contains a text.", SNAPSHOT, 5),
    Action("snapshot.only", "f", "only", "Only this", "Show only allocations below the selected box or of the selected stack; again shows all.", SNAPSHOT),
    Action("snapshot.sort", "o", "sort", "Sort", "Order allocations by size, age, category, address or code.", SNAPSHOT, 4),
    Action("snapshot.reverse", "O", "reverse", "Reverse", "Turn the order round.", SNAPSHOT),
    Action("snapshot.fold", "x", "fold", "Fold", "Show siblings that differ only by an index as one, or each.", SNAPSHOT),
    Action("snapshot.group", "b", "group", "Group", "Begin the icicle with categories, modules or calls.", SNAPSHOT, 2),
    Action("snapshot.device", "d", "device", "Device", "The next device of this snapshot.", SNAPSHOT),
    Action("snapshot.stream", "W", "part", "Stream, pool", "All memory, or that of one stream or one pool after the other.", SNAPSHOT),
    Action("snapshot.whatif", "w", "whatif", "What if", "Replay the history under other allocator settings.", SNAPSHOT, 5),
    Action("snapshot.edit", "e", "edit", "Edit", "Open the selected source line in $EDITOR.", SNAPSHOT),
    Action("snapshot.previous_file", "comma", "file(-1)", "Previous rank", "The snapshot of the previous rank or file.", SNAPSHOT),
    Action("snapshot.next_file", "full_stop", "file(1)", "Next rank", "The snapshot of the next rank or file.", SNAPSHOT),
    Action("snapshot.back", "escape", "back", "Back", "Undo the last narrowing: zoom, filter, marks; then back to the diagnosis.", SNAPSHOT),
)  # fmt: skip

SNAPSHOT_ACTIONS: tuple[Action, ...] = (*_SCREEN_ACTIONS, *ICICLE_ACTIONS)
SCREEN_ACTIONS = _SCREEN_ACTIONS
