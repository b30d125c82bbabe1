"""The catalogue of kernel log lines (kernel_log.yaml), loaded once and checked on loading."""

import re
from functools import cache
from importlib.resources import files
from typing import Annotated

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


Pattern = Annotated[re.Pattern[str], BeforeValidator(re.compile)]


class CodeNote(_Entry):
    """What one code of a sort means (an Xid number, an AER status)."""

    meaning: str
    next_step: str


class LineSort(_Entry):
    """One sort of lines. ``lost``: the device does not come back by itself and must be left alone.

    ``fault``: the device is at fault until a reset or reboot; ``fault_codes``: with these codes it is.
    """

    sort: str
    needles: tuple[str, ...]
    patterns: tuple[Pattern, ...]
    suppressed: Pattern | None = None
    lost: bool = False
    fault: bool = False
    fault_codes: tuple[int, ...] = ()
    meaning: str
    next_step: str
    codes: dict[int, CodeNote] = {}

    def note(self, code: int | None) -> CodeNote:
        """Meaning and next step of this code, or of the sort where the code has none of its own."""
        general = CodeNote(meaning=self.meaning, next_step=self.next_step)
        return general if code is None else self.codes.get(code, general)


class Context(_Entry):
    """A line that names the device of the lines after it."""

    needle: str
    pattern: Pattern


class KernelLogCatalog(_Entry):
    context: Context
    sorts: tuple[LineSort, ...]

    def named(self, sort: str) -> LineSort | None:
        return next((entry for entry in self.sorts if entry.sort == sort), None)


@cache
def kernel_log_catalog() -> KernelLogCatalog:
    text = files("agent.catalog").joinpath("kernel_log.yaml").read_text(encoding="utf-8")
    return KernelLogCatalog.model_validate(yaml.safe_load(text))
