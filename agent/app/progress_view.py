"""Progress for people who watch: one live line on a terminal, one line per phase anywhere else."""

import re
import time
from collections.abc import Callable
from typing import TextIO

from agent.app.status_page import span
from agent.app.terminal import Style, cells, clip, encodable, escape, is_terminal, is_utf8, width

REDRAW = 0.05  # seconds between two drawings of the same phase
BAR = 20  # columns

_COUNTED = re.compile(r"(.*?)\s+(\d+)/(\d+)$", re.DOTALL)
_PAIR = re.compile(r"(.*?):?\s+[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] -> .*", re.DOTALL)


class ProgressPrinter:
    """Lines about work in hand. On a terminal the current phase is redrawn in place and stays when the next begins.

    Elsewhere a phase is one line, whatever ticks inside it, so that logs stay short. ``clock`` gives seconds.
    """

    def __init__(self, stream: TextIO, color: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._style = Style(on=color)
        self._clock = clock
        self._live = is_terminal(stream)
        rich = is_utf8(stream)
        self._good, self._bad, self._dot = ("✓", "✗", "·") if rich else ("ok", "FAILED", "-")
        self._full, self._empty = ("█", "░") if rich else ("#", ".")
        self._begun = clock()
        self._phase = ""
        self._text = ""
        self._phase_begun = self._begun
        self._drawn_at = 0.0
        self._drawn = 0  # columns of the live line on the screen
        self._gone = False  # nobody reads the stream any more

    def step(self, text: str) -> None:
        """A line that stays: an action, a phase."""
        self._settle()
        self._line(f"{self._dot} {escape(text)}")

    def activity(self, text: str) -> None:
        """What is being done right now; "" is a sign of life of the same work."""
        now = self._clock()
        if not text:
            if self._text:
                self._draw(now)
            return
        phase = _phase_of(text)
        if phase != self._phase and not phase.startswith(f"{self._phase} "):
            self._settle()
            self._phase_begun = now
        fresh = phase != self._phase
        self._phase, self._text = phase, text
        if fresh and not self._live:
            self._line(f"{self._dot} {escape(phase)}")
        elif fresh or now - self._drawn_at >= REDRAW:
            self._draw(now)

    def done(self, text: str) -> None:
        self._end(self._style.good(self._good), text)

    def fail(self, text: str) -> None:
        self._end(self._style.bad(self._bad), text)

    def _end(self, mark: str, text: str) -> None:
        self._settle()
        self._line(f"{mark} {escape(text)}  {self._style.faint(span(self._clock() - self._begun))}")

    def _settle(self) -> None:
        """The live line becomes one that stays. Its mark is neutral: how it went, the end says."""
        if self._live and self._text:
            took = span(self._clock() - self._phase_begun)
            self._line(f"{self._dot} {escape(self._without_count())}  {self._style.faint(took)}")
        self._phase = self._text = ""

    def _without_count(self) -> str:
        return self._phase if _COUNTED.fullmatch(self._text) else self._text

    def _draw(self, now: float) -> None:
        if not self._live:
            return
        took = span(now - self._phase_begun)
        room = width(self._stream) - 1 - len(took) - 2
        counted = _COUNTED.fullmatch(self._text)
        line = f"{self._dot} " + (self._bar(counted) if counted else escape(self._text))
        line = encodable(clip(line, room), self._stream)
        used = cells(line) + 2 + len(took)
        blank = " " * max(0, self._drawn - used)
        self._write(f"\r{line}  {self._style.faint(took)}{blank}")
        self._drawn, self._drawn_at = used, now

    def _bar(self, counted: re.Match[str]) -> str:
        done, total = int(counted[2]), int(counted[3])
        filled = min(BAR, BAR * done // total) if total else 0
        return f"{escape(counted[1])} {self._full * filled}{self._empty * (BAR - filled)} {done}/{total}"

    def _line(self, text: str) -> None:
        if self._drawn:
            self._write("\r" + " " * self._drawn + "\r")
            self._drawn = 0
        self._write(encodable(text, self._stream) + "\n")

    def _write(self, text: str) -> None:
        """Show it, if anybody still looks: a reader that went away must not end the work that is being shown."""
        if self._gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._gone = True


def _phase_of(text: str) -> str:
    """The text without what ticks in it: a count, the pair under test."""
    if counted := _COUNTED.fullmatch(text):
        return counted[1]
    pair = _PAIR.fullmatch(text)
    return pair[1] if pair else text
