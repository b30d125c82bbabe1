"""Merging a scenario's ``set`` into a host's state: nested mappings merge, ``null`` removes, globs reach many keys."""

import fnmatch
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from agent.core.problem import Path
from agent.sim.state import WorldState
from agent.sim.yaml_text import LineOf, say_problems

# Paths below which keys are names rather than patterns: a file or a flag may well hold a star.
_LITERAL = ("files", "environment", "parameters")


def merge(base: Any, patch: Any, key: str = "") -> Any:
    """RFC 7386, and a key with ``*`` or ``?`` applies to every key that it matches."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(base) if isinstance(base, Mapping) else {}
    for name, value in patch.items():
        for place in _places(merged, str(name), key):
            if value is None:
                merged.pop(place, None)
            else:
                merged[place] = merge(merged.get(place), value, str(place))
    return merged


def _places(base: Mapping[Any, Any], name: str, key: str) -> list[Any]:
    keys = {str(one): one for one in base}
    if key not in _LITERAL and ("*" in name or "?" in name):
        return [original for text, original in keys.items() if fnmatch.fnmatchcase(text, name)]
    return [keys.get(name, name)]


def patched(
    state: WorldState,
    patch: Mapping[str, Any],
    origin: str,
    line_of: LineOf | None = None,
    at: Path = ("set",),
) -> WorldState:
    """The state with ``patch`` merged in. Raises ``ScenarioError`` naming every key that does not fit."""
    if not patch:
        return state
    data = merge(state.model_dump(by_alias=True), patch)
    try:
        return WorldState.model_validate(data)
    except ValidationError as error:
        raise say_problems(error, origin, line_of, at) from error
