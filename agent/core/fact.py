"""What can be said of one thing on the host: Known, Absent or Unknown.

Law 9: Unknown is neither zero nor healthy. Code that needs a value must say what it does
when there is none; ``value_or`` makes that choice visible where it is taken.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar, Union

T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Known(Generic[T]):
    """The fact was read, and this is its value."""

    value: T


@dataclass(frozen=True, slots=True)
class Absent:
    """The fact was looked for and is not there: no driver bound, no such file, no IOMMU group."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The fact could not be read. ``code`` is a CamelCase reason for conditions; ``reason`` is for people."""

    reason: str
    code: str = "Unknown"


Fact = Union[Known[T], Absent, Unknown]  # noqa: UP007 - a subscriptable generic alias needs Union on 3.11


def value_or(fact: Fact[T], default: D) -> T | D:
    return fact.value if isinstance(fact, Known) else default


def say(fact: Fact[T]) -> str:
    """The fact in words, for plans and messages."""
    if isinstance(fact, Known):
        return str(fact.value)
    if isinstance(fact, Absent):
        return "none" if not fact.reason else f"none ({fact.reason})"
    return f"unknown ({fact.reason})"
