"""Facts as scenarios write them: a plain value is Known; ``{unknown: reason, code: Code}`` and ``{absent: reason}``."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.sim.scenario import Fault
from agent.sim.yaml_text import ScenarioError

D = TypeVar("D")


def known(value: Any, *, empty: Any = None, absent: str = "") -> Any:
    """Known(value), or Absent with this reason for the value that stands for nothing."""
    return Absent(absent) if value == empty else Known(value)


def fact_of(raw: Any) -> Fact[Any]:
    if isinstance(raw, Mapping) and set(raw) <= {"unknown", "code"} and "unknown" in raw:
        return Unknown(str(raw["unknown"]), str(raw.get("code", "Unknown")))
    if isinstance(raw, Mapping) and set(raw) == {"absent"}:
        return Absent(str(raw["absent"]))
    return Known(tuple(raw) if isinstance(raw, list) else raw)


def patched(record: D, values: Mapping[str, Any]) -> D:
    """A frozen record with fields replaced; names in camelCase or as in the record."""
    names = {field.name for field in fields(record)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for key, raw in values.items():
        name = re.sub(r"([A-Z])", lambda m: f"_{m[1].lower()}", key)
        if name not in names:
            known_names = ", ".join(sorted(names))
            raise ScenarioError(
                (f"value: {key}: {type(record).__name__} has no such field; it has {known_names}",)
            )
        fact = isinstance(getattr(record, name), Known | Absent | Unknown)
        changes[name] = fact_of(raw) if fact else tuple(raw) if isinstance(raw, list) else raw
    return replace(record, **changes)  # type: ignore[type-var]


def scripted(fault: Fault | None) -> Unknown | Absent | None:
    """The fact that a fault puts in place of what is read."""
    if fault is not None and fault.unknown is not None:
        return Unknown(fault.unknown, "Scripted")
    if fault is not None and fault.absent is not None:
        return Absent(fault.absent)
    return None
