"""What a terminal can show: colour or not, its width, and text from outside made harmless.

Only the standard library: ``agent status`` must be instant.
"""

import os
import sys
import unicodedata
from typing import TextIO

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ZERO_WIDTH = {"Mn", "Me"}


def escape(text: str) -> str:
    """Text that cannot move the cursor, ring, recolour or reorder: all that does not print is shown as its code."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _SHORT.get(c) or _code(ord(c)) for c in text)


def _code(number: int) -> str:
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def is_terminal(stream: TextIO) -> bool:
    """A terminal that understands cursor movement."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def use_color(stream: TextIO) -> bool:
    """Colour on a terminal only, and never against NO_COLOR (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def width(stream: TextIO | None = None, default: int = 80) -> int:
    """Columns of the terminal behind ``stream`` (standard output); ``default`` where there is none."""
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns or default
    except (OSError, ValueError):
        return default


def is_utf8(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "") == "utf8"


def encodable(text: str, stream: TextIO) -> str:
    """The text with what the stream's encoding lacks written as codes, so that printing it cannot fail."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def cells(text: str) -> int:
    """Columns that printable text takes: two for wide East Asian characters and emoji, none for combining marks."""
    return len(text) if text.isascii() else sum(_cell(c) for c in text)


def _cell(char: str) -> int:
    if unicodedata.category(char) in _ZERO_WIDTH:
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def clip(text: str, columns: int) -> str:
    """At most so many columns; "..." stands for what was cut."""
    if cells(text) <= columns:
        return text
    return _head(text, columns - 3) + "..."


def _head(text: str, columns: int) -> str:
    if text.isascii():
        return text[: max(0, columns)]
    used = 0
    for index, char in enumerate(text):
        used += _cell(char)
        if used > columns:
            return text[:index]
    return text


def pad(text: str, columns: int) -> str:
    """The text filled with spaces to so many columns; longer text stays as it is."""
    return text + " " * (columns - cells(text))


def wrap(text: str, columns: int, limit: int = 0) -> list[str]:
    """Lines of at most so many columns, broken at spaces, within a word where it must be.

    ``limit``: at most so many lines (0: any number); "..." then ends the last one.
    """
    # A bound before the work: a message of megabytes must not make status slow.
    if limit:
        text = text[: columns * (limit + 1)]
    lines = [""]
    for word in text.split(" "):
        line = f"{lines[-1]} {word}" if lines[-1] else word
        if cells(line) <= columns:
            lines[-1] = line
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = lines[-1] or word
        while cells(lines[-1]) > columns:
            head = _head(lines[-1], columns) or lines[-1][0]
            lines[-1:] = [head, lines[-1][len(head) :]]
    if limit and len(lines) > limit:
        lines[limit - 1 :] = [clip(" ".join(lines[limit - 1 : limit + 1]), columns)]
    return lines


class Style:
    """Colours by meaning; every one of them gives plain text where colour is off."""

    def __init__(self, *, on: bool) -> None:
        self._on = on

    def _paint(self, codes: str, text: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self._on and text else text

    def good(self, text: str) -> str:
        return self._paint("32", text)

    def bad(self, text: str) -> str:
        return self._paint("31;1", text)

    def unsure(self, text: str) -> str:
        return self._paint("33", text)

    def strong(self, text: str) -> str:
        return self._paint("1", text)

    def faint(self, text: str) -> str:
        return self._paint("2", text)

    def banner(self, text: str) -> str:
        return self._paint("7;33;1", text)
