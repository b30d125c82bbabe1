"""NCCL's environment variables, as data: ``nccl_env.tsv``, gathered from NCCL's documentation and source.

Columns: name, section (system, debugging, undocumented), type, allowed values, default, since, status (current,
deprecated, removed) and parser (how NCCL reads the text: strtoll without an end check, level, string...).
"""

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    section: str
    type: str
    allowed: str
    default: str
    since: str
    status: str
    parser: str


@functools.cache
def variables() -> Mapping[str, Variable]:
    """All known variables by name; read once, at the first call."""
    text = resources.files("agent.catalog").joinpath("nccl_env.tsv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return MappingProxyType({row["name"]: Variable(**row) for row in rows})
