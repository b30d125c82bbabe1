"""One shell script for many questions, and the answers taken apart again.

The script goes to ``sh -s`` by standard input, so that nothing depends on how many shells read the command line on
the way. Every answer comes back in base64 between marks that nobody could have foreseen: whatever a file, an
environment or a log holds, it cannot pass for another answer.
"""

import base64
import binascii
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise

from agent.core.quantity import whole_number

NOT_THERE = 44  # the functions' status for what does not exist
_FUNCTIONS = files("agent.host").joinpath("target_functions.sh").read_text()
_WORDS = 300  # characters of an error that are passed on

Call = tuple[str, ...]  # a function of target_functions.sh, and its arguments


@dataclass(frozen=True, slots=True)
class Part:
    """How one call ended. ``words``: what it said on standard error."""

    status: int
    output: bytes
    words: str = ""


def script(mark: str, calls: Sequence[Call]) -> bytes:
    """Nothing of it runs unless all of it has arrived: the calls stand in a function that the last line calls."""
    lines = [f"part {n} {' '.join(quoted(word) for word in call)}" for n, call in enumerate(calls)]
    return os.fsencode("\n".join([f"MARK={mark}", _FUNCTIONS, "main() {", *lines, "}", "main", ""]))


def quoted(word: str) -> str:
    """Raises OSError (EINVAL) for what no argument can hold."""
    try:
        data = os.fsencode(word)
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, f"{word[:80]!r} cannot be encoded") from error
    if b"\0" in data:
        raise OSError(errno.EINVAL, f"{word[:80]!r} holds a zero byte")
    return "'" + word.replace("'", "'\\''") + "'"


def parts(mark: str, stdout: str, stderr: str) -> dict[int, Part]:
    """The calls that were answered in full, by number; one that was cut short is left out."""
    said = {whole_number(word): body.replace("\r\n", "\n").strip() for word, body in _marked(mark, stderr)}
    found: dict[int, Part] = {}
    for (word, body), (following, _) in pairwise((*_marked(mark, stdout), ("", ""))):
        number = whole_number(word)
        if number is None or number in found or following != "end":
            continue
        try:
            data = base64.b64decode(body.replace("\r", "").replace("\n", ""), validate=True)
        except (binascii.Error, ValueError):
            continue
        output, _, status = data.rpartition(b"\n")
        if (ended := whole_number(status.decode(errors="replace"))) is not None:
            found[number] = Part(ended, output, said.get(number, ""))
    return found


def _marked(mark: str, text: str) -> Iterator[tuple[str, str]]:
    """Every mark's word, and all that stands below it up to the next. Not by lines: millions of empty ones are cheap
    to send.
    """
    text, head = f"\n{text}", f"\n{mark} "
    at = text.find(head)
    while at >= 0:
        below = text.find("\n", at + 1)
        below = len(text) if below < 0 else below
        following = text.find(head, below)
        yield (
            text[at + len(head) : below].rstrip("\r"),
            text[below : len(text) if following < 0 else following],
        )
        at = following


def last_words(mark: str, stderr: str) -> str:
    """The last line of a tool's standard error that is neither empty nor a mark of ours."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith(f"{mark} ")]
    return lines[-1][:_WORDS] if lines else ""
