"""The catalogue of kernel log lines (kernel_log.yaml), loaded once and checked on loading."""

import re
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

# libyaml's reads it in a tenth of the time, where PyYAML was built with it; both are safe loaders.
_LOADER: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Severity = Literal["info", "program", "fault", "lost"]

_BUS = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}"
_MACROS = {"<bdf>": rf"(?P<address>{_BUS}\.[0-7])", "<gpu>": rf"(?P<address>{_BUS}(?:\.[0-7])?)"}


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


def _compiled(text: str) -> re.Pattern[str]:
    for macro, pattern in _MACROS.items():
        text = text.replace(macro, pattern)
    return re.compile(text, re.ASCII)


def _mapping(entry: object) -> object:
    return {"pattern": entry} if isinstance(entry, str) else entry


Pattern = Annotated[re.Pattern[str], BeforeValidator(_compiled)]


class LinePattern(_Entry):
    """``after``: it counts only behind a context line of that name."""

    pattern: Pattern
    after: str = ""


class CodeNote(_Entry):
    """What one code of a sort means (an Xid number, an AER status). Without a severity it has its sort's."""

    meaning: str
    next_step: str
    severity: Severity | None = None


class LineSort(_Entry):
    """One sort of lines, as the catalogue's head describes it."""

    sort: str
    needles: tuple[str, ...]
    patterns: tuple[Annotated[LinePattern, BeforeValidator(_mapping)], ...]
    suppressed: Pattern | None = None
    latest: bool = False
    severity: Severity
    meaning: str
    next_step: str
    codes: dict[int, CodeNote] = {}

    def note(self, code: int | None) -> CodeNote:
        """Meaning and next step of this code, or of the sort where the code has none of its own."""
        own = self.codes.get(code) if code is not None else None
        return own or CodeNote(meaning=self.meaning, next_step=self.next_step)

    def severity_of(self, code: int | None) -> Severity:
        return self.note(code).severity or self.severity


class Context(_Entry):
    """A line that says something about the lines after it: which device they are about, how bad they are."""

    name: str
    needle: str
    pattern: Pattern


class KernelLogCatalog(_Entry):
    contexts: tuple[Context, ...]
    sorts: tuple[LineSort, ...]

    def named(self, sort: str) -> LineSort | None:
        return next((entry for entry in self.sorts if entry.sort == sort), None)


@cache
def kernel_log_catalog() -> KernelLogCatalog:
    text = files("agent.catalog").joinpath("kernel_log.yaml").read_text(encoding="utf-8")
    return KernelLogCatalog.model_validate(yaml.load(text, Loader=_LOADER))  # noqa: S506 - both are safe
