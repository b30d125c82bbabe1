"""Unit files as systemd reads them: sections, drop-ins, quoting, specifiers, variables.

Rules from systemd.syntax(7), systemd.service(5) and systemd.unit(5).
"""

import re
from collections.abc import Iterable, Mapping

from agent.core.quantity import parse_duration
from agent.sim.state import LoadedUnit

_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    '"': '"',
    "'": "'",
    "s": " ",
}
_CODED = re.compile(r"x([0-9a-fA-F]{2})|([0-7]{3})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")


class UnitSyntaxError(ValueError):
    """A line that systemd would refuse or ignore."""


def split_words(text: str) -> list[str]:
    """Words with quotes taken off and C escapes resolved."""
    words: list[str] = []
    word: str | None = None
    quote = ""
    position = 0
    while position < len(text):
        char = text[position]
        position += 1
        if char == "\\":
            char, position = _unescape(text, position)
            word = (word or "") + char
        elif quote:
            quote, char = ("", "") if char == quote else (quote, char)
            word = (word or "") + char
        elif char in "\"'":
            quote, word = char, word or ""
        elif char.isspace():
            words += [word] if word is not None else []
            word = None
        else:
            word = (word or "") + char
    if quote:
        raise UnitSyntaxError(f"unbalanced quoting in {text!r}")
    return [*words, word] if word is not None else words


def _unescape(text: str, position: int) -> tuple[str, int]:
    if position < len(text) and text[position] in _ESCAPES:
        return _ESCAPES[text[position]], position + 1
    match = _CODED.match(text, position)
    if match is None:
        raise UnitSyntaxError(f"invalid escape sequence in {text!r}")
    code = match[1] or match[3] or match[4]
    return chr(int(code, 16) if code else int(match[2], 8)), match.end()


def expand_specifiers(text: str, unit: str) -> str:
    """%% is a per cent sign, %n and %N the unit's name; an unknown letter stays as it is."""
    known = {
        "%": "%",
        "n": unit,
        "N": unit.rpartition(".")[0],
        "p": unit.rpartition(".")[0],
        "h": "/root",
        "t": "/run",
    }
    return re.sub(r"%(.)", lambda m: known.get(m[1], m[0]), text)


def expand_argv(words: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """Variables of an Exec line: ``$NAME`` as a whole word is split, ``${NAME}`` is put in place, ``$$`` is ``$``."""
    argv: list[str] = []
    for word in words:
        whole = re.fullmatch(r"\$([A-Za-z_][A-Za-z0-9_]*)", word)
        if whole:
            argv += env.get(whole[1], "").split()
        else:
            argv.append(
                re.sub(
                    r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)\}",
                    lambda m: "$" if m[0] == "$$" else env.get(m[1], ""),
                    word,
                )
            )
    return argv


def assignments(text: str) -> Iterable[tuple[str, str, str]]:
    """(section, key, value) of every line, continuations joined, comments left out."""
    section, pending = "", ""
    for raw in text.splitlines():
        line = raw.strip()
        if line[:1] in ("#", ";") or (not line and not pending):
            continue
        line = f"{pending} {line}" if pending else line
        if line.endswith("\\"):
            pending = line[:-1].rstrip()
            continue
        pending = ""
        if line.startswith("["):
            section = line.strip("[]")
            continue
        key, equals, value = line.partition("=")
        if not equals:
            raise UnitSyntaxError(f"missing '=' in {line!r}")
        yield section, key.strip(), value.strip()


def load_unit(name: str, texts: Iterable[str]) -> LoadedUnit:
    """The fragment and its drop-ins in order, merged as systemd merges them."""
    loaded = LoadedUnit()
    try:
        for text in texts:
            for section, key, value in assignments(text):
                if section == "Service":
                    _assign(loaded, name, key, value)
    except (UnitSyntaxError, ValueError) as error:
        loaded.bad = str(error)
    if not loaded.exec_start and not loaded.bad:
        loaded.bad = "Service has no ExecStart="
    return loaded


def _assign(loaded: LoadedUnit, unit: str, key: str, value: str) -> None:
    if key == "ExecStart":
        if value and loaded.exec_start:
            raise UnitSyntaxError("Service has more than one ExecStart= setting")
        words = split_words(value.lstrip("-@:+!"))
        loaded.exec_start = [expand_specifiers(word, unit) for word in words]
    elif key == "Environment":
        if not value:
            loaded.environment = {}
        for word in split_words(value):
            variable, equals, text = expand_specifiers(word, unit).partition("=")
            if not equals:
                raise UnitSyntaxError(f"invalid environment assignment {word!r}")
            loaded.environment[variable] = text
    elif key == "EnvironmentFile":
        loaded.environment_files = [*loaded.environment_files, value] if value else []
    elif key == "Restart":
        loaded.restart = value
    elif key == "RestartSec":
        loaded.restart_seconds = seconds(value)
    elif key == "TimeoutStopSec":
        loaded.stop_timeout = seconds(value)


def seconds(value: str) -> float:
    """A systemd time span: a bare number is seconds."""
    if value == "infinity":
        return float("inf")
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    return parse_duration(value.replace("min", "m").replace("sec", "s"))


def environment_file(text: str) -> dict[str, str]:
    """VARIABLE=value lines; quotes around a value are taken off."""
    found = {}
    for raw in text.splitlines():
        line = raw.strip()
        if line and line[0] not in "#;" and "=" in line:
            name, _, value = line.partition("=")
            quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
            found[name.strip()] = value[1:-1] if quoted else value
    return found
