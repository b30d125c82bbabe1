"""How the page of an observation writes one fact, and rows of them."""

from collections.abc import Callable, Iterable
from typing import Any

from agent.app.observe_dict import shown
from agent.app.terminal import Style, cells, escape, pad, wrap
from agent.core.fact import Absent, Fact, Known, Unknown

WIDTH = 100
Row = tuple[str, str]


def tell(fact: Fact[Any], style: Style, say: Callable[..., str] | None = None) -> str:
    """One fact. Unknown is written in capitals: it must not read like a value."""
    match fact:
        case Known(value):
            return escape(shown(say(value) if say else said(value)))
        case Absent(reason):
            return style.faint("none") + (f" ({escape(reason)})" if reason else "")
        case Unknown(reason, code):
            return style.unsure("UNKNOWN") + f" ({escape(code)}: {escape(reason)})"
    raise TypeError(f"not a fact: {fact!r}")


def said(value: object) -> str:
    """A known value in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(said(item) for item in value) or "(empty)"
    return str(value)


def columns(rows: Iterable[Row]) -> list[str]:
    """Names and what is said of them, in two columns; long text goes on below itself."""
    told = [(escape(name), text) for name, text in rows]
    column = min(44, max((cells(name) for name, _ in told), default=0)) + 2
    lines = []
    for name, text in told:
        parts = wrap(text, WIDTH - column - 2)
        lines += [f"  {pad(name, column)}{parts[0]}", *(" " * (column + 2) + part for part in parts[1:])]
    return lines
