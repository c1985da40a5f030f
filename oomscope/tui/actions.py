# ruff: noqa: E501  (a table: one action a line)
"""One table of everything a key can do; bindings, footer, help, palette and docs/keys.md are made from it.

Each action has a stable id, so that a user's keymap can give it other keys, and a tooltip that the help
shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True)
class Action:
    """One thing that a key can do."""

    id: str
    """Stable name, `group.verb`; a user's keymap refers to it."""
    keys: str
    """Textual key names, comma-separated; the first one is the one shown."""
    action: str
    """Textual action string; looked up on the screen or widget whose bindings hold it."""
    label: str
    """One or two words for the footer."""
    tooltip: str
    """One sentence for the help and the docs."""
    group: str
    """Heading in the help: where the key works."""
    footer: int = 0
    """Priority in the footer; 0: not shown there."""
    changes_job: bool = False
    """Stops, starts or changes the job: absent with `--readonly`."""


EVERYWHERE = "Everywhere"
LISTS = "Lists"
TIMELINE = "Timeline"
LIVE = "Live"
OOM = "Out of memory"
FIXES = "Fixes"
COMPARE = "Compare"
SESSIONS = "Sessions"
LOG = "Log"
WHATIF = "What if"
DIALOG = "Dialogs"

_GLOBAL = (
    Action("go.live", "1", "app.go('live')", "Live", "All ranks as they run.", EVERYWHERE),
    Action("go.oom", "2", "app.go('oom')", "OOM", "Why memory ran out, with the evidence.", EVERYWHERE),
    Action("go.snapshot", "3", "app.go('snapshot')", "Snapshot", "What was in memory, block by block.", EVERYWHERE),
    Action("go.fixes", "4", "app.go('fixes')", "Fixes", "What would help, and by how much.", EVERYWHERE),
    Action("go.compare", "5", "app.go('compare')", "Compare", "Predicted beside reached, attempt by attempt.", EVERYWHERE),
    Action("go.sessions", "6", "app.go('sessions')", "Sessions", "All recorded sessions.", EVERYWHERE),
    Action("app.log", "ctrl+l", "app.log_view", "Log", "What the job printed, rank by rank.", EVERYWHERE, 2),
    Action("app.help", "question_mark,f1", "app.help", "Help", "The keys of this screen; type to search, enter runs one.", EVERYWHERE, 9),
    Action("app.palette", "ctrl+p,colon", "app.command_palette", "Palette", "Find a command by its name.", EVERYWHERE),
    Action("app.copy", "y", "app.copy", "Copy", "Copy the screen's answer as plain text.", EVERYWHERE, 1),
    Action("app.copy_command", "Y", "app.copy_command", "Copy command", "Copy the command line that prints this screen's answer.", EVERYWHERE),
    Action("app.previous_rank", "comma", "app.rank(-1)", "Previous rank", "Look at the previous rank.", EVERYWHERE),
    Action("app.next_rank", "full_stop", "app.rank(1)", "Next rank", "Look at the next rank.", EVERYWHERE),
    Action("app.next_pane", "tab", "app.focus_next", "Next pane", "Move the keyboard to the next pane.", EVERYWHERE),
    Action("app.jump", "ctrl+o", "app.jump", "Jump", "Put a letter on every pane; the letter moves the keyboard there.", EVERYWHERE),
    Action("app.theme", "ctrl+t", "app.next_theme", "Theme", "Dark, light, or no colours at all.", EVERYWHERE),
    Action("app.screenshot", "ctrl+s", "app.picture", "Screenshot", "Write this screen to an SVG file.", EVERYWHERE),
    Action("app.snapshot", "s", "app.dump('all')", "Snapshot now", "Ask every rank for a memory snapshot now.", EVERYWHERE, changes_job=True),
    Action("app.snapshot_rank", "S", "app.dump('rank')", "Snapshot this rank", "Ask the selected rank for a memory snapshot now.", EVERYWHERE, changes_job=True),
    Action("app.stop", "ctrl+k", "app.stop_job", "Stop job", "Stop the job; asks first.", EVERYWHERE, changes_job=True),
    Action("app.suspend", "ctrl+z", "app.suspend_process", "Shell", "Back to the shell for a while; fg returns. The job goes on.", EVERYWHERE),
    Action("app.leave", "q,ctrl+c,ctrl+q", "app.leave", "Quit", "Leave the viewer; the job goes on unless you say otherwise.", EVERYWHERE, 8),
)  # fmt: skip

_LISTS = (
    Action("list.up", "up,k", "move(-1)", "Up", "Previous line.", LISTS),
    Action("list.down", "down,j", "move(1)", "Down", "Next line.", LISTS),
    Action("list.page_up", "pageup,ctrl+b", "page(-1)", "Page up", "One page up.", LISTS),
    Action("list.page_down", "pagedown,ctrl+f", "page(1)", "Page down", "One page down.", LISTS),
    Action("list.first", "home,g", "edge(-1)", "First", "First line.", LISTS),
    Action("list.last", "end,G", "edge(1)", "Last", "Last line.", LISTS),
    Action("list.open", "enter", "open", "Open", "Open what the cursor is on.", LISTS),
)  # fmt: skip

_TIMELINE = (
    Action("time.left", "left,h", "cursor(-1)", "Earlier", "Move the time cursor to an earlier step.", TIMELINE),
    Action("time.right", "right,l", "cursor(1)", "Later", "Move the time cursor to a later step.", TIMELINE),
    Action("time.far_left", "shift+left,H", "cursor(-10)", "Earlier ×10", "Ten columns earlier.", TIMELINE),
    Action("time.far_right", "shift+right,L", "cursor(10)", "Later ×10", "Ten columns later.", TIMELINE),
    Action("time.in", "plus", "zoom(2)", "Zoom in", "Half as many steps around the cursor.", TIMELINE),
    Action("time.out", "minus", "zoom(-2)", "Zoom out", "Twice as many steps around the cursor.", TIMELINE),
    Action("time.fit", "equals_sign", "fit", "Fit", "All steps, following the newest.", TIMELINE),
    Action("time.window", "t", "window", "Window", "The last 50 steps, 500 steps, or all of them.", TIMELINE, 3),
    Action("time.peak", "p", "peak", "Peak", "Put the cursor on the highest step peak in view.", TIMELINE),
    Action("time.previous_event", "left_square_bracket", "event(-1)", "Previous event", "Put the cursor on the previous event.", TIMELINE),
    Action("time.next_event", "right_square_bracket", "event(1)", "Next event", "Put the cursor on the next event.", TIMELINE),
    Action("time.mark", "m", "mark", "Mark", "Mark this step; two marks give the change between them.", TIMELINE),
    Action("time.to_mark", "apostrophe", "to_mark", "To mark", "Jump to the mark.", TIMELINE),
    Action("time.low", "a", "layer('low')", "Low layer", "Show or hide what a step never goes below.", TIMELINE),
    Action("time.peak_layer", "f", "layer('peak')", "Peak layer", "Show or hide the peak of each step.", TIMELINE),
    Action("time.reserved", "r", "layer('reserved')", "Reserved layer", "Show or hide what the allocator keeps.", TIMELINE),
)  # fmt: skip

_SCREENS = (
    Action("live.pause", "space", "pause", "Pause", "Freeze the picture; the job goes on.", LIVE, 5),
    Action("live.view", "v", "view", "View", "The selected rank, all ranks side by side, peaks by phase, or the events.", LIVE, 4),
    Action("live.sort", "o", "sort", "Sort", "Order ranks by number, headroom, peak or growth; a letter chooses.", LIVE),
    Action("live.reverse", "O", "reverse", "Reverse", "Turn the order of the ranks round.", LIVE),
    Action("live.nodes", "b", "nodes", "By node", "One line per node with the peaks of its ranks, or one line per rank.", LIVE),
    Action("live.fold", "x", "fold", "Unfold", "Show or hide the ranks of the node under the cursor.", LIVE),
    Action("live.close", "escape", "back", "Back", "Put the time cursor away.", LIVE),
    Action("oom.why_not", "d", "why_not", "Why not", "Show or hide the causes that were ruled out.", OOM, 6),
    Action("oom.overrule", "space", "overrule", "Overrule", "Answer this question otherwise and walk the flowchart again.", OOM, 3),
    Action("oom.as_found", "u", "as_found", "As found", "Take your own answers back.", OOM),
    Action("oom.edit", "e", "edit", "Edit", "Open the source line in $EDITOR.", OOM, 4),
    Action("oom.whatif", "w", "whatif", "What if", "Replay the memory trace under other allocator settings.", OOM, 5),
    Action("oom.back", "escape", "back", "Back", "Back to Live.", OOM),
    Action("fixes.tick", "space", "tick", "Tick", "Choose this fix, or take it back.", FIXES, 7),
    Action("fixes.diff", "d", "preview", "Diff", "Show exactly what the ticked fixes change.", FIXES, 6),
    Action("fixes.apply", "A", "apply", "Apply", "Rerun the job with the ticked fixes; shows what changes and asks first.", FIXES, 7, changes_job=True),
    Action("fixes.predict", "P", "predict", "Predict", "Predict what each fix would do to this run; asks first.", FIXES, 5, changes_job=True),
    Action("fixes.recommended", "R", "recommend", "Best", "Tick the recommended combination.", FIXES, 3),
    Action("fixes.clear", "u", "clear", "Untick all", "Take every tick back.", FIXES),
    Action("fixes.all", "x", "fold", "All", "Show or hide the fixes that do not apply.", FIXES, 4),
    Action("fixes.back", "escape", "back", "Back", "Back to the diagnosis.", FIXES),
    Action("compare.back", "escape", "back", "Back", "Back to Fixes.", COMPARE),
    Action("sessions.delete", "D", "delete", "Delete", "Delete this session's folder; asks first.", SESSIONS, 4, changes_job=True),
    Action("sessions.pin", "p", "pin", "Pin", "Keep this session for good, or let retention delete it again.", SESSIONS, 3),
    Action("sessions.export", "E", "export", "Export", "Write this session into one file; asks first.", SESSIONS, 3),
    Action("sessions.mark", "m", "mark", "Mark", "Compare shows the marked session beside the open one.", SESSIONS, 3),
    Action("sessions.sort", "o", "sort", "Sort", "Order sessions by age, script, state or peak; a letter chooses.", SESSIONS),
    Action("sessions.reverse", "O", "reverse", "Reverse", "Turn the order of the sessions round.", SESSIONS),
    Action("sessions.filter", "slash", "filter", "Filter", "Show only sessions with this text.", SESSIONS, 5),
    Action("sessions.back", "escape", "back", "Back", "Back to Live.", SESSIONS),
    Action("log.follow", "f", "follow", "Follow", "Follow the newest line, or stand still.", LOG, 6),
    Action("log.wrap", "w", "wrap", "Wrap", "Break long lines, or cut them at the edge.", LOG, 3),
    Action("log.source", "tab", "source", "Other stream", "The next stream: output, errors, launcher, supervisor.", LOG, 5),
    Action("log.search", "slash", "search", "Search", "Find text in the log.", LOG, 4),
    Action("log.next", "n", "search_next(1)", "Next match", "Next line with the text.", LOG),
    Action("log.previous", "N", "search_next(-1)", "Previous match", "Previous line with the text.", LOG),
    Action("log.back", "escape", "back", "Back", "Close the log.", LOG, 7),
    Action("whatif.copy", "y", "copy_whatif", "Copy command", "Copy the command line that gives this answer.", WHATIF),
    Action("whatif.close", "escape,q,w,ctrl+c", "close", "Close", "Close, and end a replay that still runs.", WHATIF),
    Action("dialog.cancel", "escape,q,ctrl+c", "cancel", "Cancel", "Close and change nothing.", DIALOG, 1),
)  # fmt: skip

#: How a key is written for people; what is not here is written as Textual names it.
KEY_NAMES = {
    "question_mark": "?",
    "colon": ":",
    "comma": ",",
    "full_stop": ".",
    "slash": "/",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "apostrophe": "'",
    "escape": "esc",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "left": "←",
    "right": "→",
    "up": "↑",
    "down": "↓",
    "home": "Home",
    "end": "End",
    "f1": "F1",
}

#: The screens that have a digit, in the order of the tab strip: (mode, full label, short label).
TABS = (
    ("live", "Live", "Live"),
    ("oom", "OOM", "OOM"),
    ("snapshot", "Snapshot", "Snap"),
    ("fixes", "Fixes", "Fix"),
    ("compare", "Compare", "Cmp"),
    ("sessions", "Sessions", "Sess"),
)


def digit_of(mode: str) -> str:
    """The key of a screen; empty for one without a digit."""
    return next((str(number) for number, tab in enumerate(TABS, 1) if tab[0] == mode), "")


def all_actions() -> tuple[Action, ...]:
    """The whole table, the snapshot screen's part included."""
    from oomscope.tui.screens.snapshot_actions import SNAPSHOT_ACTIONS

    return (*_GLOBAL, *_LISTS, *_TIMELINE, *_SCREENS, *SNAPSHOT_ACTIONS)


def make_bindings(actions: Iterable[Action]) -> list[Binding]:
    """Textual bindings of `actions`; the footer is our own, so none is marked to be shown."""
    return [
        Binding(a.keys, a.action, a.label, show=False, tooltip=a.tooltip, id=a.id, priority=False)
        for a in actions
    ]


def bindings(*groups: str) -> list[Binding]:
    """Bindings of every action in `groups`, for a screen's or widget's `BINDINGS`."""
    return make_bindings(a for a in (*_GLOBAL, *_LISTS, *_TIMELINE, *_SCREENS) if a.group in groups)


def key_name(key: str) -> str:
    """`key` as people write it: "ctrl+l" as "^l", "full_stop" as "."."""
    if key.startswith("ctrl+"):
        return "^" + key_name(key[5:])
    if key.startswith("shift+"):
        return "shift " + key_name(key[6:])
    return KEY_NAMES.get(key, key)


def action_by_id(action_id: str) -> Action | None:
    """The action called `action_id`, None for a binding that is not ours."""
    return next((a for a in all_actions() if a.id == action_id), None)


_DOC_HEAD = """\
# Keys

Generated from the action table (`oomscope/tui/actions.py`) by `python -m oomscope.tui.keys`; do not edit.
In the program `?` shows the keys of the current screen; type to search, enter runs the entry.
"""


def keys_markdown() -> str:
    """The page docs/keys.md: one table per group, in the order of the action table."""
    parts = [_DOC_HEAD]
    actions = all_actions()
    for group in dict.fromkeys(a.group for a in actions):
        parts.append(f"\n## {group}\n\n| key | does | id |\n| --- | --- | --- |\n")
        for a in actions:
            if a.group == group:
                keys = " ".join(f"`{key_name(k)}`" for k in a.keys.split(","))
                parts.append(f"| {keys} | {a.label}: {a.tooltip} | `{a.id}` |\n")
    return "".join(parts)
