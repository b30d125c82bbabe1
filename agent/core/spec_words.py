"""Pydantic's errors rewritten: what was found, what was expected, at the path the operator wrote."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from agent.core import nccl
from agent.core.explain import children, expected_words, key_words, pattern_words
from agent.core.problem import Path, Problem, secret_value, show

_SELECT = (
    "expected a list of PCI addresses, {uuid: ...}, {serial: ...} or {slot: ...}; or {numaNode: N, count: N}"
)
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
}


def rewrite(errors: Iterable[ErrorDetails], document: object) -> list[Problem]:
    """One problem for each path; several errors at one path are the branches of a union."""
    found: dict[tuple[Path, bool], list[ErrorDetails]] = {}
    for error in errors:
        path, at_key = _locate(error, document)
        if error["type"] == "too_short" and _value_at(path, document):
            continue  # pydantic does not count wrong items; those have errors of their own
        found.setdefault((path, at_key), []).append(error)
    return [Problem(path, _say(path, group, document), at_key) for (path, at_key), group in found.items()]


def _locate(error: ErrorDetails, document: object) -> tuple[Path, bool]:
    """The path in the document, without the names of union branches; and whether the key itself is meant."""
    path: Path = ()
    here = document
    for step in error["loc"]:
        inside = (
            step in here if isinstance(here, dict) else isinstance(here, list) and step in range(len(here))
        )
        if inside:
            here = here[step]  # type: ignore[index]
            path = (*path, step)
    if error["type"] == "missing":
        return (*path, str(error["loc"][-1])), False
    return path, error["type"] == "extra_forbidden" or error["loc"][-1:] == ("[key]",)


def _say(path: Path, group: list[ErrorDetails], document: object) -> str:
    error = group[0]
    if error["type"] == "extra_forbidden":
        return _unknown_key(path)
    if error["type"] == "missing":
        return f"found nothing, expected {_an(expected_words(path))}: this key is required"
    if error["loc"][-1:] == ("[key]",):
        return f"found this key, expected {_an(key_words(path[:-1]))}"
    value = _value_at(path, document)
    found = show(value, path)
    if path[-2:-1] == ("nccl",) and isinstance(value, bool):
        text = nccl.check(str(path[-1]), str(value).lower())
        return text or f"found {found}, expected text or a number; write it in quotes"
    return f"found {found}, {_expected(path, error)}{_hint(path, value)}"


def _expected(path: Path, error: ErrorDetails) -> str:
    context: Mapping[str, Any] = error.get("ctx") or {}
    if error["type"] == "value_error":
        return str(context["error"])
    if error["type"] == "branch":
        return error["msg"]
    if error["type"] in _BOUNDS:
        name, words = _BOUNDS[error["type"]]
        return f"expected {words} {context[name]}"
    if error["type"] == "too_short":
        return "expected at least one item"
    if error["type"] == "string_too_short":
        return "expected some text"
    if error["type"] == "string_pattern_mismatch" and "secrets" in path:
        return 'expected the absolute path of a file that holds the value, such as "/etc/gpu-host-agent/secrets/hf_token"'
    if error["type"] == "string_pattern_mismatch" and (words := pattern_words(context["pattern"])):
        return f"expected {_an(words)}"
    if path[-1:] == ("select",):
        return _SELECT
    return f"expected {_an(expected_words(path))}"


def _an(words: str) -> str:
    """With the article that a sentence wants."""
    if words.startswith(("text", "true or false", "one of", "gpu-host/", "GpuHost", "sglang", "host,")):
        return words
    return f"an {words}" if words[:1] in "aeo" else f"a {words}"


def _hint(path: Path, value: object) -> str:
    wanted = expected_words(path)
    if isinstance(value, bool | int | float) and "text" in wanted and "number" not in wanted:
        return "; write it in quotes"
    if isinstance(value, bool) and "text or number" in wanted:
        return "; write it in quotes"
    if isinstance(value, str) and "PCI address" in wanted and value != value.lower():
        return ", in small letters"
    if isinstance(value, str) and wanted == "true or false":
        return " (YAML 1.2 reads yes, no, on and off as text)"
    return ""


def _unknown_key(path: Path) -> str:
    known = children(path[:-1])
    key = str(path[-1])
    folded = {name.lower(): name for name in known}
    close = difflib.get_close_matches(
        key[:60].replace("_", "").replace("-", "").lower(), list(folded), 1, 0.6
    )
    if close and not secret_value(key):
        return (
            f'found an unknown key, expected one of {", ".join(known)} (did you mean "{folded[close[0]]}"?)'
        )
    return f"found an unknown key, expected one of {', '.join(known)}"


def _value_at(path: Path, document: object) -> object:
    here = document
    for step in path:
        here = here[step]  # type: ignore[index]
    return here
