"""One shell script for many questions, and the answers taken apart again.

The script goes to ``sh -s`` by standard input, so that nothing depends on how many shells read the command line on
the way. Every answer comes back in base64 between marks that nobody could have foreseen: whatever a file, an
environment or a log holds, it cannot pass for another answer.
"""

import base64
import binascii
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

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
    said = {number: "\n".join(lines).strip() for number, lines, _ in _sections(mark, stderr)}
    found: dict[int, Part] = {}
    for number, lines, ended in _sections(mark, stdout):
        try:
            output, _, status = base64.b64decode("".join(lines), validate=True).rpartition(b"\n")
            if ended and number not in found:
                found[number] = Part(int(status), output, said.get(number, ""))
        except (binascii.Error, ValueError):
            continue
    return found


def _sections(mark: str, text: str) -> list[tuple[int, list[str], bool]]:
    """(number, lines, whether its end was marked), of everything between marks."""
    sections: list[tuple[int, list[str], bool]] = []
    for line in text.split("\n"):
        word, _, rest = line.rstrip("\r").partition(" ")
        if word != mark:
            if sections and not sections[-1][2]:
                sections[-1][1].append(line.rstrip("\r"))
        elif rest == "end":
            if sections:
                sections[-1] = (*sections[-1][:2], True)
        elif rest.isdecimal():
            sections.append((int(rest), [], False))
    return sections


def last_words(mark: str, stderr: str) -> str:
    """The last line of a tool's standard error that is neither empty nor a mark of ours."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith(f"{mark} ")]
    return lines[-1][:_WORDS] if lines else ""
