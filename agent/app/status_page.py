"""The page that a status is written on: its width, its colours, its time, and lines with a label in front."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.app.terminal import Style, cells, pad, wrap
from agent.core.quantity import say_duration

LABEL = 11  # columns of the label in front of a paragraph
PROSE_LINES = 3  # of one paragraph on a narrow page
AGES = 100 * 365 * 86400.0

Paint = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Page:
    """``wide``: everything, at any length. Otherwise one screen: long paragraphs are cut and say so."""

    style: Style
    width: int
    wide: bool
    now: float

    def labelled(self, label: str, body: str, paint: Paint = str, limit: int | None = None) -> list[str]:
        """A paragraph with its label; "" writes it under the paragraph before."""
        most = 0 if self.wide else (PROSE_LINES if limit is None else limit)
        lines = wrap(body, max(20, self.width - LABEL), most)
        heads = [pad(label, LABEL), *[" " * LABEL] * (len(lines) - 1)]
        return [head + paint(line) for head, line in zip(heads, lines, strict=True)]

    def ago(self, then: float | None) -> str:
        if not then:
            return "at an unknown time"
        return f"{span(self.now - then)} ago" if then <= self.now else "just now"


def span(seconds: float) -> str:
    """A time that has passed, short: 4s, 12m, 2h5m, 3d."""
    if seconds >= AGES:
        return "very long"
    return f"{int(seconds)}s" if seconds < 10 else say_duration(seconds)


def table(rows: Sequence[Sequence[str]], left: frozenset[int] = frozenset(), gap: int = 2) -> list[str]:
    """Rows in columns ``gap`` blanks apart, to the right but for the columns in ``left``."""
    widths = [max(cells(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (" " * gap)
        .join(
            pad(cell, widths[i]) if i in left else " " * (widths[i] - cells(cell)) + cell
            for i, cell in enumerate(row)
        )
        .rstrip()
        for row in rows
    ]
