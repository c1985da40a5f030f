"""The snapshot screen's part of the action table."""

from __future__ import annotations

from oomscope.tui.actions import Action

#: Everything a key does on the snapshot screen; give it to `actions.make_bindings` for the screen's BINDINGS.
SNAPSHOT_ACTIONS: tuple[Action, ...] = ()
