"""The spec's JSON Schema (draft-07, what editors and yaml-language-server read), made from the models."""

import functools
from typing import Any

from agent.core.spec import GpuHost, SpecModel

DRAFT = "http://json-schema.org/draft-07/schema#"
_TITLE = "gpu-host/v1: one GPU host's desired state"


def json_schema() -> dict[str, Any]:
    """A fresh copy of the schema; property names are those of the file."""
    return _draft07(_generated())


@functools.cache
def _generated() -> dict[str, Any]:
    schema = GpuHost.model_json_schema(by_alias=True, mode="validation")
    for model in SpecModel.__subclasses__():
        described = schema["$defs"].get(model.__name__)
        if described is not None:
            _write_defaults(model, described["properties"])
    return schema


def _write_defaults(model: type[SpecModel], properties: dict[str, Any]) -> None:
    """Defaults as an operator would write them: pydantic's own are Python's (3600.0 for "1h")."""
    written = model.model_construct().model_dump(mode="json", by_alias=True, exclude_none=True)
    for name, described in properties.items():
        described.pop("default", None)
        if name in written:
            described["default"] = written[name]


def _draft07(generated: dict[str, Any]) -> dict[str, Any]:
    """Pydantic writes draft 2020-12; the parts that differ are rewritten."""
    converted = _convert(generated)
    converted.pop("title", None)
    return {"$schema": DRAFT, "title": _TITLE, **converted}


def _convert(node: Any) -> Any:
    if isinstance(node, list):
        return [_convert(item) for item in node]
    if not isinstance(node, dict):
        return node
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key in {"properties", "patternProperties", "$defs"}:
            # Names of settings, not keywords: only what they name is converted.
            result["definitions" if key == "$defs" else key] = {n: _convert(v) for n, v in value.items()}
        elif key in {"default", "examples", "enum", "const"}:
            result[key] = value
        elif key == "$ref":
            result[key] = value.replace("#/$defs/", "#/definitions/")
        elif key == "prefixItems":
            result["items"] = _convert(value)
        elif key == "title":
            continue  # derived from the name, so it says nothing
        else:
            result[key] = _convert(value)
    if "patternProperties" in result and "properties" not in result:
        result["additionalProperties"] = False  # a name that fits no pattern is an error, as in the models
    return _ref_alone(result)


def _ref_alone(node: dict[str, Any]) -> dict[str, Any]:
    """Draft-07 ignores what stands beside $ref; descriptions and defaults must not be lost."""
    if "$ref" not in node or len(node) == 1:
        return node
    rest = {key: value for key, value in node.items() if key != "$ref"}
    return {"allOf": [{"$ref": node["$ref"]}], **rest}
