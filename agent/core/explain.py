"""The spec explained: what stands at a dotted path, in words, from the models' own schema.

``describe`` answers ``agent explain``; ``reference`` is the field list of the reference manual; ``children``
and ``type_words`` serve error messages.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from agent.core.schema import json_schema
from agent.core.spec import EnvName

Schema = dict[str, Any]

_PATTERN_WORDS = {
    "600W": "power",
    "300-2000MHz": "clocks",
    "30s": "duration",
    "5%": "percentage",
    ">= 100 tok/s": "floor",
    "3 per 1h": "rate",
    "0000:01:00.0": "PCI address",
    "/usr/bin/python3": "absolute path",
    "sglang.service": "name of a systemd service",
    "inference": "name of small letters, digits, - and .",
    "590.48.01": "version",
    "HF_HOME": "name of an environment variable",
    "root@gpu1": "user and host",
    "GPU-5a1c0a52-6f5b-4a3b-9d4e-0c1f2a3b4c5d": "GPU UUID",
}


@functools.cache
def _root() -> Schema:
    return json_schema()


def describe(path: str) -> str | None:
    """Type, default, meaning and children of the setting at a path such as ``services.qwen.gate.benchmark``.

    The leading ``spec.`` may be left out. Names of groups, services and variables may be anything. None where
    the spec has no such place.
    """
    steps = tuple(step for step in re.split(r"\.|(\[\d+\])", path) if step)
    found = _find_dotted(_root(), steps)
    if found is None and steps[:1] != ("spec",):
        found = _find_dotted(_root(), ("spec", *steps))
        path = f"spec.{path}"
    if found is None:
        return None
    lines = [f"{path or 'the spec file'}: {type_words(found)}"]
    lines += [f"  {text}" for text in (_meaning(found), _default_words(found)) if text]
    below = _properties(found)
    width = max((len(name) for name in below), default=0)
    lines += ["  keys:"] if below else []
    lines += [f"    {name:<{width}}  {_one_line(schema)}" for name, schema in below.items()]
    return "\n".join(lines) + "\n"


def children(path: tuple[str | int, ...]) -> tuple[str, ...]:
    """The keys that may stand below a path; () where any name may, or nothing."""
    found = _find(path)
    return tuple(_properties(found)) if found is not None else ()


def expected_words(path: tuple[str | int, ...]) -> str:
    """What may stand at a path, in words; "" where nothing may."""
    found = _find(path)
    return type_words(found) if found is not None else ""


def key_words(path: tuple[str | int, ...]) -> str:
    """What the keys of the mapping at a path look like."""
    found = _find(path)
    patterns = [p for branch in _branches(found or {}) for p in branch.get("patternProperties", {})]
    return pattern_words(patterns[0]) if patterns else "whole number"


def pattern_words(pattern: str) -> str:
    """A pattern of the models in words, with an example; "" for one that they do not have."""
    example = _examples().get(pattern)
    return f'{_PATTERN_WORDS[example]} such as "{example}"' if example is not None else ""


@functools.cache
def _examples() -> dict[str, str]:
    # Names of variables stand only as keys, where a schema has no place for an example.
    return {**_patterns(_root()), **_patterns(TypeAdapter(EnvName).json_schema())}


def _patterns(node: Any) -> dict[str, str]:
    """Every pattern in a schema with its example."""
    found: dict[str, str] = {}
    if isinstance(node, dict):
        if "pattern" in node and "examples" in node:
            found[node["pattern"]] = node["examples"][0]
        for value in node.values():
            found.update(_patterns(value))
    elif isinstance(node, list):
        for value in node:
            found.update(_patterns(value))
    return found


def reference() -> str:
    """Every setting as Markdown: one table for each mapping of the spec, in the file's order."""
    parts = []
    for place, schema in _mappings((), _root()):
        rows = [
            f"| `{name}` | {_cell(type_words(child))} | {_cell(_default_cell(schema, name, child))} | {_cell(_meaning(child))} |"
            for name, child in _properties(schema).items()
        ]
        heading = f"### `{'.'.join(place) or 'top level'}`\n"
        parts.append("\n".join([heading, "| key | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def type_words(schema: Schema) -> str:
    """A schema in words: ``list of whole number from 1 to 4096``."""
    words = [_branch_words(branch) for branch in _branches(schema) if branch.get("type") != "null"]
    seen = list(dict.fromkeys(words))
    if "number" in seen and "whole number" in seen:
        seen.remove("whole number")
    return " or ".join([", ".join(seen[:-1]), seen[-1]]) if len(seen) > 1 else "".join(seen)


def _branch_words(schema: Schema) -> str:
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return f"list (each: {type_words(schema['items'])})" if "items" in schema else "list"
    if kind == "object":
        return _object_words(schema)
    if kind in {"integer", "number"}:
        return ("whole number" if kind == "integer" else "number") + _range_words(schema)
    if kind == "boolean":
        return "true or false"
    example = next(iter(schema.get("examples", ())), None)
    if example is None:
        return "text"
    return f'{_PATTERN_WORDS.get(example, "text")} such as "{example}"'


def _object_words(schema: Schema) -> str:
    if "properties" in schema:
        return "mapping with " + ", ".join(schema["properties"])
    values = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    value = next((v for v in values if isinstance(v, dict)), None)
    return (
        "mapping"
        if value is None or "properties" in _resolve(value)
        else f"mapping of name to {type_words(value)}"
    )


def _range_words(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return f" from {low}" if low is not None else ""


def _one_line(schema: Schema) -> str:
    return "; ".join(
        text.rstrip(".") for text in (type_words(schema), _default_words(schema), _meaning(schema)) if text
    )


def _meaning(schema: Schema) -> str:
    return str(schema.get("description", ""))


def _default_words(schema: Schema) -> str:
    text = _default_text(schema)
    return f"default: {text}" if text else ""


def _default_text(schema: Schema) -> str:
    """Defaults of whole mappings are left out: their keys say their own."""
    default = schema.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return default if isinstance(default, str) else json.dumps(default)


def _default_cell(parent: Schema, name: str, schema: Schema) -> str:
    if any(name in branch.get("required", ()) for branch in _branches(parent)):
        return "required"
    default = schema.get("default")
    if isinstance(default, dict | list) and not default:
        return "empty"
    return "those of its keys" if isinstance(default, dict) else _default_text(schema) or "not set"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _resolve(schema: Schema) -> Schema:
    if "allOf" in schema:
        return {**_resolve(schema["allOf"][0]), **{k: v for k, v in schema.items() if k != "allOf"}}
    if "$ref" in schema:
        found: Schema = _root()["definitions"][schema["$ref"].removeprefix("#/definitions/")]
        return found
    return schema


def _branches(schema: Schema) -> Iterator[Schema]:
    """A schema without its alternatives: each of them in turn."""
    resolved = _resolve(schema)
    alternatives = resolved.get("anyOf", resolved.get("oneOf"))
    if alternatives is None:
        yield resolved
        return
    for alternative in alternatives:
        yield from _branches(alternative)


def _properties(schema: Schema) -> Schema:
    found: Schema = {}
    for branch in _branches(schema):
        found.update(branch.get("properties", {}))
    return found


def _find(steps: tuple[str | int, ...]) -> Schema | None:
    here: Schema | None = _root()
    for step in steps:
        here = next(_below(here, step), None) if here is not None else None
    return here


def _find_dotted(schema: Schema, steps: tuple[str, ...]) -> Schema | None:
    """Like ``_find``, for a path that was cut at every dot: names such as ``qwen3.5`` have dots before digits."""
    if not steps:
        return schema
    digits = itertools.takewhile(lambda step: step[:1].isdigit(), steps[1:])
    for taken in range(1, len(list(digits)) + 2):
        for below in _below(schema, ".".join(steps[:taken])):
            found = _find_dotted(below, steps[taken:])
            if found is not None:
                return found
    return None


def _below(schema: Schema, step: str | int) -> Iterator[Schema]:
    for branch in _branches(schema):
        if isinstance(step, int) or step.startswith("["):
            if "items" in branch:
                yield branch["items"]
        elif step in branch.get("properties", {}):
            yield branch["properties"][step]
        elif "properties" not in branch:
            values = [*branch.get("patternProperties", {}).values(), branch.get("additionalProperties")]
            yield from (value for value in values if isinstance(value, dict))


def _mappings(place: tuple[str, ...], schema: Schema) -> Iterator[tuple[tuple[str, ...], Schema]]:
    if _properties(schema):
        yield place, schema
    for name, child in _properties(schema).items():
        yield from _mappings((*place, name), child)
    for branch in _branches(schema):
        if branch.get("type") == "array" and "items" in branch:
            yield from _mappings((*place[:-1], f"{place[-1]}[]"), branch["items"])
        elif branch.get("type") == "object" and "properties" not in branch:
            values = [*branch.get("patternProperties", {}).values(), branch.get("additionalProperties")]
            for value in values:
                if isinstance(value, dict):
                    yield from _mappings((*place, "NAME"), value)
