"""What NCCL will really make of a variable's text.

NCCL reads most numbers with strtoll and no end check, and ignores what it does not know without a word:
``NCCL_P2P_DISABLE=true`` is 0, so that P2P stays on; ``NCCL_BUFFSIZE=4M`` is 4 bytes; ``NCCL_P2P_LEVEL=sys`` is
ignored. Here such values are problems, with what NCCL would have understood.
"""

import difflib
import ipaddress
import re
from collections.abc import Callable

from agent.catalog.nccl import Variable, variables
from agent.core.problem import show

_STRTOLL = re.compile(r"[ \t\n\v\f\r]*([-+]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_NUMBERS = {"bool01", "int", "enum-int", "bytes", "int32", "int64", "uint64"}
_BOOL_RANGE = "0|1"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def check(name: str, value: str) -> str | None:
    """Why this name or value is wrong ("found ..., expected ..."), or None where NCCL reads it as meant."""
    if not name.startswith("NCCL_"):
        return f'found {name}, expected a name that begins with NCCL_; other variables go into "env"'
    variable = variables().get(name)
    if variable is None:
        return f"found the unknown variable {name}, expected one that NCCL reads{_nearest(name)}"
    if variable.status == "removed":
        return f"found {name}, which NCCL no longer reads ({variable.since}), expected it to be left out"
    if variable.type in _NUMBERS:
        return _check_number(variable, value)
    return _check_text(variable, value)


def strtoll(text: str) -> tuple[int, str]:
    """C's ``strtoll(text, &end, 0)``: the number, and the rest that was not read. No digits: 0, all of it."""
    match = _STRTOLL.match(text)
    if match is None:
        return 0, text
    digits = match[2]
    base = 16 if digits[:2] in {"0x", "0X"} else 8 if digits.startswith("0") else 10
    number = int(digits, base) if len(digits) <= 25 else 2**63 - 1
    number = min(number, 2**63 - 1)
    return (-number if match[1] == "-" else number), text[match.end() :]


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, list(variables()), 1, 0.75)
    return f" (did you mean {close[0]}?)" if close else ""


def _check_number(variable: Variable, value: str) -> str | None:
    number, rest = strtoll(value)
    wanted = _say_range(variable)
    plain = re.fullmatch(r"[-+]?(?:0[xX][0-9a-fA-F]+|[0-9]{1,25})", value.strip())
    octal = plain is not None and "x" not in value.lower() and int(value) != number
    if rest or octal:
        return f"found {show(value)}, which NCCL reads as {_reading(variable, number)}, expected {_suggest(variable, value) or wanted}"
    if not _in_range(_BOOL_RANGE if variable.type == "bool01" else variable.allowed, number):
        return f"found {show(value)}{_out_of_range(variable, number)}, expected {wanted}"
    return None


def _reading(variable: Variable, number: int) -> str:
    unit = " bytes" if variable.type == "bytes" else ""
    return f"{number}{unit}{_consequence(variable, number)}"


def _out_of_range(variable: Variable, number: int) -> str:
    consequence = _consequence(variable, number)
    return f", which NCCL takes without a word{consequence}" if consequence else ""


def _consequence(variable: Variable, number: int) -> str:
    """What a misread switch does: a *_DISABLE that is not on leaves its subject on."""
    if variable.type != "bool01" or not variable.name.endswith("_DISABLE"):
        return ""
    only_one = "only ==1" in variable.parser
    if number == 0 or (only_one and number != 1):
        return f", so that {variable.name.removeprefix('NCCL_').removesuffix('_DISABLE')} stays ON"
    return ""


def _suggest(variable: Variable, value: str) -> str:
    """The number that was probably meant: 4M is 4194304, true is 1."""
    if variable.type == "bytes" and (
        match := re.fullmatch(r"\s*(\d{1,12})\s*([KMG])i?B?\s*", value, re.IGNORECASE)
    ):
        return f"the number of bytes without a unit, {int(match[1]) * _UNITS[match[2].upper()]}"
    return ""


def _say_range(variable: Variable) -> str:
    if variable.type == "bool01":
        return "0 or 1"
    allowed = _without_note(variable.allowed)
    if not _range_parts(allowed):
        return "a whole number in decimal digits"
    words = [_say_part(part) for part in allowed.split("|")]
    return " or ".join(words) + (" (bytes)" if variable.type == "bytes" else "")


def _say_part(part: str) -> str:
    if part.startswith(">="):
        return f"a whole number of at least {part[2:]}"
    if part.startswith(">"):
        return f"a whole number above {part[1:]}"
    return part.replace("..", " to ")


def _range_parts(allowed: str) -> list[Callable[[int], bool]]:
    """The tests that a column such as ``-1|>=0`` or ``1..64`` stands for; none where it is prose."""
    tests: list[Callable[[int], bool]] = []
    for part in _without_note(allowed).split("|"):
        if match := re.fullmatch(r">=(-?\d+)", part):
            tests.append(lambda n, low=int(match[1]): n >= low)  # type: ignore[misc]
        elif match := re.fullmatch(r">(-?\d+)", part):
            tests.append(lambda n, low=int(match[1]): n > low)  # type: ignore[misc]
        elif match := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", part):
            tests.append(lambda n, low=int(match[1]), high=int(match[2]): low <= n <= high)  # type: ignore[misc]
        elif re.fullmatch(r"-?\d+", part):
            tests.append(lambda n, only=int(part): n == only)  # type: ignore[misc]
        else:
            return []
    return tests


def _in_range(allowed: str, number: int) -> bool:
    tests = _range_parts(allowed)
    return not tests or any(test(number) for test in tests)


def _without_note(allowed: str) -> str:
    return re.sub(r"\s*\(.*\)\s*$", "", allowed).strip()


def _check_text(variable: Variable, value: str) -> str | None:
    checks = {
        "enum": _check_enum,
        "flaglist": _check_flags,
        "algolist": _check_tuning,
        "protolist": _check_tuning,
        "bool": _check_bool,
        "hostport": _check_hostport,
        "cidr": _check_cidr,
        "path": _check_path,
    }
    if not value.strip():
        return "found nothing, expected a value or the variable left out"
    problem = checks.get(variable.type, lambda _variable, _value: None)(variable, value)
    return f"found {show(value)}{problem}" if problem else None


def _folds_case(variable: Variable) -> bool:
    return variable.parser.startswith("strict-typed") or "case-insensitive" in variable.allowed


def _check_enum(variable: Variable, value: str) -> str | None:
    tokens = _tokens(variable)
    parts = value.split("|") if "joined by |" in variable.allowed else [value]
    if value in _legacy(variable) or all(_matches(p, tokens, fold=_folds_case(variable)) for p in parts):
        return None
    ignored = ", which NCCL ignores" if variable.parser == "level" and not value[0].isdigit() else ""
    near = next((token for token in tokens if token.lower() == value.lower()), "")
    hint = f" (case matters: {near})" if near and not _folds_case(variable) else ""
    return f"{ignored}, expected one of {', '.join(tokens)}{hint}"


def _legacy(variable: Variable) -> list[str]:
    """Numbers that older releases used instead of words, and that are still read."""
    if listed := re.search(r"\(([0-9|]+) legacy\)", variable.allowed):
        return listed[1].split("|")
    return list("01234") if "legacy int" in variable.allowed else []


def _tokens(variable: Variable) -> list[str]:
    tokens = variable.allowed.partition(" (")[0].split("|")
    if also := re.search(r"also accepts ([A-Z0-9,]+)", variable.allowed):
        tokens += also[1].split(",")
    return tokens


def _matches(value: str, tokens: list[str], *, fold: bool) -> bool:
    for token in tokens:
        pattern = re.escape(token).replace(":N", r":[0-9]+") if token.endswith(":N") else re.escape(token)
        if re.fullmatch(pattern, value, re.IGNORECASE if fold else 0):
            return True
    return False


def _check_flags(variable: Variable, value: str) -> str | None:
    tokens = variable.allowed.removeprefix("[^]").split("|")
    unknown = [flag for flag in value.removeprefix("^").split(",") if flag.strip().upper() not in tokens]
    return f", expected a list of {', '.join(tokens)} with commas between" if unknown else None


def _check_tuning(variable: Variable, value: str) -> str | None:
    """NCCL_ALGO and NCCL_PROTO: ``[function:]list;...``. A bad word stops NCCL's init since 2.24."""
    listed = re.search(r" of ([A-Za-z0-9|]+)", variable.allowed)
    tokens = listed[1].split("|") if listed else []
    known = {token.lower() for token in tokens}
    for group in value.split(";"):
        words = group.rpartition(":")[2].removeprefix("^").split(",")
        if any(word.strip().lower() not in known for word in words):
            return f", which NCCL refuses at its start, expected {', '.join(tokens)} with commas between"
    return None


def _check_bool(_variable: Variable, value: str) -> str | None:
    return None if value in {"1", "T", "TRUE", "0", "F", "FALSE"} else ", expected 1 or 0"


def _check_hostport(_variable: Variable, value: str) -> str | None:
    host, _, port = value.rpartition(":")
    good = bool(host) and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    return None if good else ", expected host:port"


def _check_cidr(_variable: Variable, value: str) -> str | None:
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        return ", expected an address range such as 10.0.0.0/8"
    return None


def _check_path(_variable: Variable, value: str) -> str | None:
    return ", which NCCL takes literally, expected a path without ~" if value.startswith("~") else None
