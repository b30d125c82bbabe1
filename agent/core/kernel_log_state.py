"""How far the kernel log was read and what its lines came to, in memory and as a file (``kernel-log.json``).

Position and records belong together: lines after the position are not in the records, and all lines before it are.
So whenever the agent ends, reading on from the saved position counts every line once.
"""

from dataclasses import asdict, dataclass, field
from typing import Literal

from pydantic import Field, ValidationError

from agent.core.kernel_log import MAX_RECORDS, Folded
from agent.core.observation import KernelEvent
from agent.core.record import Record


@dataclass(frozen=True, slots=True)
class KernelLogState:
    """``cursor`` is the port's. ``gaps`` counts reads of this boot's log that found lines lost."""

    cursor: str = ""
    folded: Folded = field(default_factory=Folded)
    gaps: int = 0


class _Event(Record):
    sort: str
    address: str
    count: int
    first: float
    last: float
    sample: str
    code: int | None
    peer: str


class _File(Record):
    version: Literal[1] = 1
    cursor: str
    context: str
    device: str
    gaps: int
    events: tuple[_Event, ...] = Field(max_length=MAX_RECORDS)


def to_file(state: KernelLogState) -> bytes:
    folded = state.folded
    return (
        _File(
            cursor=state.cursor, context=folded.context, device=folded.device, gaps=state.gaps,
            events=tuple(_Event(**asdict(e)) for e in folded.events),
        )
        .model_dump_json()
        .encode()
    )  # fmt: skip


def from_file(data: bytes) -> KernelLogState:
    """A file that makes no sense is no position: the log is then read from this boot's start.

    That loses nothing but what the kernel has overwritten, and that shows as a gap.
    """
    try:
        file = _File.model_validate_json(data)
    except ValidationError:
        return KernelLogState()
    events = tuple(KernelEvent(**dict(e)) for e in file.events)
    return KernelLogState(file.cursor, Folded(events, file.context, file.device), file.gaps)
