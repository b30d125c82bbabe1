"""What the agent remembers between passes and across restarts and boots.

One file holds it (``memory.json``), replaced atomically. It is input to the pure functions, like the
observation; the journal explains how it came to be.
"""

from typing import Literal

from agent.core.bench import Baseline, BenchmarkResult
from agent.core.record import Record
from agent.core.revision import Revision
from agent.core.spec import SmokePrompt
from agent.core.verdict import P2PVerdict

Phase = Literal[
    "preflight",
    "drain",
    "stop",
    "assert-stopped",
    "render",
    "start",
    "ready",
    "effective",
    "smoke",
    "benchmark",
    "judge",
]
Outcome = Literal["promoted", "degraded", "rolled-back", "held", "superseded", "refused", "failed"]


class PhaseNote(Record):
    """How one phase of a trial went."""

    phase: str
    result: str  # ok, failed, timeout, superseded
    detail: str = ""
    seconds: float = 0.0


class TrialRecord(Record):
    """A trial in flight, or the last finished one of a service."""

    service: str
    generation: int
    revision: Revision | None = None
    attempt: int = 1  # 2: the one more start after an inconclusive first
    phase: Phase = "preflight"
    started_at: float = 0.0
    notes: tuple[PhaseNote, ...] = ()
    outcome: Outcome | None = None
    reason: str = ""  # CamelCase
    message: str = ""
    benchmark: BenchmarkResult | None = None
    finished_at: float | None = None
    restored: str = ""  # revision that came back after a rollback


class Rejected(Record):
    """A revision that must not be tried again until the spec changes or the operator says so."""

    revision: str
    generation: int
    reason: str
    message: str
    at: float


class Promoted(Record):
    """The last good revision of a service and the figures it was promoted with."""

    revision: Revision
    generation: int
    at: float
    benchmark: BenchmarkResult | None
    smoke: tuple[SmokePrompt, ...] | None = None  # what it answered rightly; None: not remembered


class Quarantine(Record):
    """A device that must not be touched: an unbind that never returned, a card off the bus."""

    address: str
    reason: str  # CamelCase
    message: str
    boot_id: str
    at: float


class Unbinding(Record):
    """An unbind of ours: from before it is written until it is proved to have returned (law 2)."""

    boot_id: str  # "": could not be read; filled in by the first observation that can
    at: float


class Identity(Record):
    """Which card was seen at an address: a moved card is found by this, never by position."""

    address: str
    uuid: str = ""
    serial: str = ""  # PCIe device serial number: seen whatever driver holds the card
    board: str = ""  # NVML's board serial: seen only while the card is on nvidia
    slot: str = ""


class Grant(Record):
    """One approved plan, in force while something of it is left to do, a day at most, and never for another generation."""

    plan_id: str
    generation: int
    disruption: int
    touches: tuple[str, ...]
    at: float


class Memory(Record):
    version: int = 1
    generation: int = 0
    spec_digest: str = ""  # of the accepted content
    verdicts: tuple[P2PVerdict, ...] = ()
    promoted: dict[str, Promoted] = {}
    previous: dict[str, Promoted] = {}  # the one promoted before that
    rejected: dict[str, Rejected] = {}
    trials: dict[str, TrialRecord] = {}
    baselines: tuple[Baseline, ...] = ()
    host_memory: dict[str, str] = {}  # target -> why NCCL cannot share host memory by cuMem with P2P off
    quarantine: dict[str, Quarantine] = {}
    unbinding: dict[str, Unbinding] = {}  # by function address
    identities: dict[str, Identity] = {}
    busy_alone: dict[
        str, float
    ] = {}  # GPU -> since when it has been fully busy with nothing on it, wall clock
    approved: str = ""  # plan id that the operator approved and that has not begun yet
    grant: Grant | None = None
    starts: tuple[float, ...] = ()  # wall-clock times of service starts, for the budget
    asked: tuple[
        str, ...
    ] = ()  # services that an operator's retry is about, until it is tried or they are seen to answer
    unrefreshed: str = (
        ""  # boot file that is being edited, until the boot loader's own files are made anew from it
    )
    stopped_units: dict[str, str] = {}  # unit we stopped -> why; exactly these are started again
    failures: dict[str, int] = {}  # consecutive transient failures by action key
    retry_after: dict[str, float] = {}  # wall clock, by action key
    errors: dict[str, str] = {}  # why it failed last, by action key
    terminal: dict[str, str] = {}  # action key -> message; waits for a new generation or the operator

    def verdict_for(self, gpus: tuple[str, ...]) -> P2PVerdict | None:
        wanted = tuple(sorted(gpus))
        return next((v for v in reversed(self.verdicts) if v.gpus == wanted), None)
