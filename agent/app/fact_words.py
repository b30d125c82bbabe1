"""A fact in words for people."""

from collections.abc import Callable
from typing import Any

from agent.app.observe_dict import shown
from agent.app.terminal import Style, escape
from agent.core.fact import Absent, Fact, Known, Unknown

Row = tuple[str, str]  # a name, and what is said of it


def tell(fact: Fact[Any], style: Style, say: Callable[..., str] | None = None) -> str:
    """One fact. Unknown is written in capitals: it must not read like a value."""
    match fact:
        case Known(value):
            return escape(shown(say(value) if say else value_words(value)))
        case Absent(reason):
            return style.faint("none") + (f" ({escape(reason)})" if reason else "")
        case Unknown(reason, code):
            return style.unsure("UNKNOWN") + f" ({escape(code)}: {escape(reason)})"
    raise TypeError(f"not a fact: {fact!r}")


def value_words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(value_words(item) for item in value) or "(empty)"
    return str(value)
