"""The smoke test: is this text an answer? For servers that say 200 OK and talk nonsense.

``degenerate`` knows text that no question deserves; fluent nonsense is caught by the expected answer.
"""

import re
import unicodedata
from collections import Counter

from agent.core.memory import Memory
from agent.core.render import without_p2p
from agent.core.revision import Revision
from agent.core.spec import Service, SmokePrompt

_RULERS = set("-=_*#~.+|`")  # characters that documents draw lines with
_UNIT_LIMIT = 80  # longest phrase, in characters, that counts as a loop


def prompts_for(
    service: Service, revision: Revision, desired: Revision | None, memory: Memory
) -> tuple[SmokePrompt, ...]:
    """A promoted revision is asked what it was promoted with: the spec's answers may be those of another model.

    With P2P switched off it is the same revision. One before it that the spec means again is a candidate like any.
    """
    promoted, previous = memory.promoted.get(revision.service), memory.previous.get(revision.service)
    wanted = desired is not None and desired.id == revision.id
    for known in (promoted, None if wanted else previous):
        if known is None or known.smoke is None:
            continue
        if revision.id in {known.revision.id, without_p2p(known.revision).id}:
            return known.smoke
    return service.gate.smoke


def check_answer(prompt: SmokePrompt, text: str, tokens: int, finish: str) -> str:
    """Why this is no right answer to the prompt; "" when it is. ``tokens`` by the server's own usage."""
    if finish in ("abort", "error"):
        return f"{prompt.ask!r}: the server ended its answer with finish_reason {finish}"
    if tokens < 1:
        return f"{prompt.ask!r}: the server reported no generated tokens"
    if nonsense := degenerate(text):
        return f"{prompt.ask!r}: {nonsense}: {_excerpt(text)}"
    cut = f" (cut off after {tokens} tokens)" if finish == "length" else ""
    if prompt.expect is not None and not contains(text, prompt.expect):
        return f"{prompt.ask!r}: expected {prompt.expect!r} in the answer{cut}: {_excerpt(text)}"
    if prompt.expect_regex is not None:
        try:
            found = re.search(prompt.expect_regex, text)
        except re.error as error:
            return f"{prompt.ask!r}: expectRegex is not a regular expression: {error}"
        if found is None:
            return f"{prompt.ask!r}: expected a match of {prompt.expect_regex!r}{cut}: {_excerpt(text)}"
    return ""


def contains(text: str, expected: str) -> bool:
    """The expectation stands in the text by itself: "91" is not in "1910", "9,191", "91.5" or "-91".

    Case, width and white space do not matter. Word boundaries are asked for only beside ASCII letters and digits:
    Chinese and Japanese put none around words.
    """
    wanted, given = _plain(expected), _plain(text)
    if not wanted:
        return bool(given)
    before = after = ""
    if wanted[0].isascii() and wanted[0].isalnum():
        before = r"(?<![a-z0-9])" + (r"(?<!\d[.,])(?<![-\u2212])" if wanted[0].isdigit() else "")
    if wanted[-1].isascii() and wanted[-1].isalnum():
        after = r"(?![a-z0-9])" + (r"(?![.,]\d)" if wanted[-1].isdigit() else "")
    return re.search(before + re.escape(wanted) + after, given) is not None


def degenerate(text: str) -> str:
    """Why this text is no language, code, number, list or table; "" when it may be one."""
    solid = "".join(text.split())
    if not solid:
        return "empty answer"
    broken = sum(1 for c in solid if c == "\ufffd" or unicodedata.category(c) in ("Cc", "Cn", "Co", "Cs"))
    if broken > 0.3 * len(solid):
        return f"{broken} of {len(solid)} characters are control or replacement characters"
    return _one_character(solid) or _loop(" ".join(text.split()))


def _one_character(solid: str) -> str:
    """``!!!!!!!``, or a text that ends in such a run."""
    char, count = Counter(solid).most_common(1)[0]
    least = 24 if char.isdigit() else 8 if char.isalpha() else 4
    worded = any(c.isalnum() for c in solid)
    share = 1.0 if char.isdigit() or (char in _RULERS and worded) else 0.8
    if len(solid) >= least and count >= share * len(solid):
        return f"{char!r} makes {count} of {len(solid)} characters"
    last = solid[-1]
    run = len(solid) - len(solid.rstrip(last))
    if run >= (200 if last in _RULERS or last.isdigit() else 32):
        return f"{last!r} is repeated {run} times at the end"
    return ""


def _loop(line: str) -> str:
    """A short phrase that the text repeats to its end: the longest tail with a short period."""
    tail = line[-8000:]
    length, unit = _periodic_tail(tail)
    if not unit or length < 0.5 * len(tail):
        return ""
    times = round(length / len(unit))
    # Without letters it may be a table of numbers, a matrix of zeros or a recurring decimal.
    spoken = any(c.isalpha() for c in unit)
    if times >= 8 and length >= (16 if spoken else 400):
        return f"{unit.strip()!r} is repeated {times} times"
    return ""


def _periodic_tail(tail: str) -> tuple[int, str]:
    """Length and unit of the longest ending that repeats a unit of at most ``_UNIT_LIMIT`` characters.

    The prefix function of the reversed text: a prefix of length n has the period n - prefix[n].
    """
    text = tail[::-1]
    prefix, best = [0] * len(text), (0, "")
    for i in range(1, len(text)):
        k = prefix[i - 1]
        while k and text[i] != text[k]:
            k = prefix[k - 1]
        prefix[i] = k + 1 if text[i] == text[k] else 0
        period = i + 1 - prefix[i]
        if period <= _UNIT_LIMIT and i + 1 >= 2 * period:
            best = (i + 1, text[:period][::-1])
    return best


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 120 else line[:120] + "...")
