"""Colours and styles of the screens: dark, light, one of the terminal's own 16 colours, and one without any.

Colours are the Okabe-Ito set (distinguishable with the common colour-vision deficiencies), darkened on the
light background until the contrast is at least 3. Colour never stands alone: severity has a word and a
glyph, a memory class has its own glyph, the cursor has a mark. The monochrome theme uses the terminal's own
two colours and text attributes only, because a grey level is a colour too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from rich.style import Style
from textual.theme import Theme

DARK = "oomscope-dark"
LIGHT = "oomscope-light"
MONO = "oomscope-mono"
SIXTEEN = "oomscope-16"


def cycle(color_system: str | None) -> tuple[str, ...]:
    """The themes that `ctrl+t` walks through, the default first, on a terminal with Rich's `color_system`."""
    return (SIXTEEN, MONO) if color_system == "standard" else (DARK, LIGHT, MONO)


_DARK_COLOURS = {
    "baseline": "#0072B2",
    "allocated": "#56B4E9",
    "inactive": "#E69F00",
    "other": "#8C9196",
    "free": "#5E666E",
    "dim": "#A3A8AD",
    "faint": "#7E868E",
    "warn": "#F0E442",
    "error": "#FF7A33",
    "ok": "#2FC499",
    "accent": "#E69F00",
    "predicted": "#CC79A7",
    "over": "#FF7A33",
    "cursor": "#24384A",
    "bar": "#1C2126",
}
_LIGHT_COLOURS = {
    "baseline": "#00486F",
    "allocated": "#2F8FCB",
    "inactive": "#B37400",
    "other": "#6E6E6E",
    "free": "#8D959C",
    "dim": "#565C62",
    "faint": "#70777E",
    "warn": "#7A5C00",
    "error": "#B23C00",
    "ok": "#00785A",
    "accent": "#8A5A00",
    "predicted": "#99417A",
    "over": "#B23C00",
    "cursor": "#CFE2F1",
    "bar": "#E6EBEF",
}

#: The names are the terminal's own colours, which its user chose to be readable on its background.
_SIXTEEN_COLOURS = {
    "baseline": "blue",
    "allocated": "cyan",
    "inactive": "yellow",
    "other": "bright_black",
    "free": "bright_black",
    "dim": "default",
    "faint": "default",
    "warn": "yellow",
    "error": "red",
    "ok": "green",
    "accent": "yellow",
    "predicted": "magenta",
    "over": "red",
    "cursor": "default",
    "bar": "default",
}

#: Textual's variables that its ANSI themes give a colour.
_PLAIN_VARIABLES = (
    "line", "ansi-background", "ansi-foreground", "border", "border-blurred", "block-cursor-foreground",
    "block-cursor-background", "input-cursor-background", "input-cursor-foreground",
    "input-selection-background",
    "input-selection-foreground", "screen-selection-background", "screen-selection-foreground", "scrollbar",
    "scrollbar-hover", "scrollbar-active", "scrollbar-background", "scrollbar-background-hover",
    "scrollbar-background-active", "scrollbar-corner-color", "link-color", "link-background-hover",
    "link-color-hover",
)  # fmt: skip


def _ansi_theme(name: str, **colours: str) -> Theme:
    """A theme of the terminal's own colours; without `colours` of its two default ones only."""
    named = (
        "primary", "secondary", "accent", "warning", "error", "success", "foreground", "background", "surface",
        "panel", "boost",
    )  # fmt: skip
    return Theme(
        name=name,
        ansi=True,
        dark=True,
        variables=dict.fromkeys(_PLAIN_VARIABLES, "ansi_default")
        | {"input-cursor-text-style": "reverse", "block-cursor-text-style": "reverse"},
        **(dict.fromkeys(named, "ansi_default") | colours),  # type: ignore[arg-type]
    )


THEMES = (
    Theme(
        name=DARK,
        primary="#56B4E9",
        secondary="#009E73",
        accent="#E69F00",
        warning="#F0E442",
        error="#FF7A33",
        success="#2FC499",
        foreground="#DFE3E6",
        background="#101214",
        surface="#16191C",
        panel="#1C2126",
        dark=True,
        variables={"line": "#4A535B", "scrollbar": "#566068", "scrollbar-background": "#16191C"},
    ),
    Theme(
        name=LIGHT,
        primary="#00608F",
        secondary="#00785A",
        accent="#8A5A00",
        warning="#7A5C00",
        error="#B23C00",
        success="#00785A",
        foreground="#1B1F23",
        background="#FFFFFF",
        surface="#F4F6F8",
        panel="#E6EBEF",
        dark=False,
        variables={"line": "#9AA4AD", "scrollbar": "#8A939B", "scrollbar-background": "#F4F6F8"},
    ),
    _ansi_theme(MONO),
    _ansi_theme(SIXTEEN, primary="ansi_cyan", accent="ansi_yellow", warning="ansi_yellow", error="ansi_red"),
)


def _coloured(colours: Mapping[str, str], *, ink: str) -> dict[str, Style]:
    """Styles by name from a colour table; `ink` is the text colour on a filled error bar."""
    styles = {name: Style(color=colours[name]) for name in colours if name not in ("cursor", "bar")}
    styles |= {
        "": Style(),
        "bold": Style(bold=True),
        "heading": Style(bold=True),
        "warn": Style(color=colours["warn"], bold=True),
        "error": Style(color=colours["error"], bold=True),
        "ok": Style(color=colours["ok"]),
        "key": Style(color=colours["accent"], bold=True),
        "cursor": Style(bgcolor=colours["cursor"]),
        "bar": Style(bgcolor=colours["bar"]),
        "bar-key": Style(color=colours["accent"], bgcolor=colours["bar"], bold=True),
        "bar-dim": Style(color=colours["dim"], bgcolor=colours["bar"]),
        "bar-bold": Style(bgcolor=colours["bar"], bold=True),
        "bar-error": Style(color=colours["error"], bgcolor=colours["bar"], bold=True),
        "bar-warn": Style(color=colours["warn"], bgcolor=colours["bar"], bold=True),
        "bar-ok": Style(color=colours["ok"], bgcolor=colours["bar"], bold=True),
        "tab": Style(bgcolor=colours["allocated"], color=ink, bold=True),
        "badge": Style(bgcolor=colours["allocated"], color=ink, bold=True),
        "alert": Style(bgcolor=colours["error"], color=ink, bold=True),
        "alert-warn": Style(bgcolor=colours["warn"], color=ink, bold=True),
        "alert-ok": Style(bgcolor=colours["ok"], color=ink, bold=True),
        "removed": Style(color=colours["error"]),
        "added": Style(color=colours["ok"]),
    }
    return styles


def _uncoloured() -> dict[str, Style]:
    """Styles by name from bold, underline and reverse alone."""
    plain = Style()
    styles = dict.fromkeys(_DARK_COLOURS, plain)
    bold, reverse = Style(bold=True), Style(reverse=True)
    strong = Style(bold=True, reverse=True)
    styles |= {
        "": plain,
        "bold": bold,
        "heading": bold,
        "warn": bold,
        "error": bold,
        "key": bold,
        "cursor": reverse,
        "bar": plain,
        "bar-key": bold,
        "bar-dim": plain,
        "bar-bold": bold,
        "bar-error": bold,
        "bar-warn": bold,
        "bar-ok": bold,
        "tab": strong,
        "badge": strong,
        "alert": strong,
        "alert-warn": reverse,
        "alert-ok": bold,
        "removed": plain,
        "added": plain,
    }
    return styles


def _sixteen() -> dict[str, Style]:
    """Styles by name from the terminal's own colours; bars are filled with colours that carry black or white text."""
    return _coloured(_SIXTEEN_COLOURS, ink="black") | {
        "cursor": Style(reverse=True),
        "tab": Style(bold=True, reverse=True),
        "badge": Style(bold=True, reverse=True),
        "alert": Style(color="bright_white", bgcolor="red", bold=True),
        "alert-warn": Style(color="black", bgcolor="yellow"),
        "alert-ok": Style(color="black", bgcolor="green"),
    }


_STYLES: dict[str, dict[str, Style]] = {
    DARK: _coloured(_DARK_COLOURS, ink="#101214"),
    LIGHT: _coloured(_LIGHT_COLOURS, ink="#FFFFFF"),
    MONO: _uncoloured(),
    SIXTEEN: _sixteen(),
}


#: Styles of areas and bars, which carry patterns of their own.
_PATTERNED = frozenset({"baseline", "allocated", "inactive", "other", "free", "predicted", "over"})


class Palette:
    """The named styles of one theme, laid over a widget's own text and background colour."""

    def __init__(self, theme: str, base: Style) -> None:
        known = theme if theme in _STYLES else DARK
        #: True where two memory classes may be told apart by their glyphs only.
        self.mono = known == MONO
        self.base = base
        self._styles = {name: base + style for name, style in _STYLES[known].items()}
        cursor = _STYLES[known]["cursor"]
        if known in (MONO, SIXTEEN):
            # Among 16 colours no background leaves red and yellow text readable; reverse always does.
            # Reverse on reverse would cancel out: on the cursor's row everything is simply reversed.
            # Bars keep their patterns: reversed, full and empty would change places.
            self._selected = {
                name: base + style if name in _PATTERNED else base + cursor + Style(bold=style.bold)
                for name, style in _STYLES[known].items()
            }
        else:
            self._selected = {name: base + cursor + style for name, style in _STYLES[known].items()}
        self._mixed: dict[tuple[str, str], Style] = {}

    def style(self, name: str, *, selected: bool = False) -> Style:
        """The style called `name`; an unknown name is a plain one."""
        table = self._selected if selected else self._styles
        return table.get(name) or table[""]

    def mixed(self, front: str, back: str) -> Style:
        """`front` as the text colour on the colour of `back`: two areas that meet inside one cell."""
        found = self._mixed.get((front, back))
        if found is None:
            found = self._styles[front] + Style(bgcolor=self._styles[back].color)
            self._mixed[front, back] = found
        return found


@lru_cache(maxsize=32)
def palette(theme: str, base: Style) -> Palette:
    """The palette of `theme` over `base`; cached, because every widget asks on every data change."""
    return Palette(theme, base)
