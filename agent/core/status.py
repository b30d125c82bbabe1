"""The status: what runs, how fast, and why like this. One document, published whole, read by everybody."""

from typing import Any, Literal

from agent.core.bench import BenchmarkResult
from agent.core.condition import Condition
from agent.core.record import Record
from agent.core.revision import Provenance

STATUS_VERSION = 1


class SpecStatus(Record):
    path: str
    accepted: bool
    problems: tuple[str, ...] = ()
    generation: int = 0


class GpuStatus(Record):
    """One selected GPU, or one that no group names (group "": never touched)."""

    address: str
    group: str
    driver: str
    desired_driver: str = ""
    name: str = ""
    uuid: str = ""
    numa_node: int | None = None
    iommu: str = ""
    power_limit: int | None = None  # watts
    note: str = ""


class TrialStatus(Record):
    outcome: str  # running while in flight
    phase: str
    revision: str
    attempt: int
    reason: str = ""
    message: str = ""
    started_at: float = 0.0
    finished_at: float | None = None
    restored: str = ""


class ServiceStatus(Record):
    name: str
    unit: str
    target: str
    state: str  # systemd's active state
    health: str
    revision: str = ""  # what runs, when it is known; else ""
    promoted: str = ""
    gpus: tuple[str, ...] = ()
    p2p: Literal["on", "off"] = "off"
    p2p_reason: str = ""
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}
    why: dict[str, Provenance] = {}
    benchmark: BenchmarkResult | None = None
    measured_at: float | None = None
    trial: TrialStatus | None = None


class P2PStatus(Record):
    gpus: tuple[str, ...]
    verdict: str
    summary: str
    explanation: str = ""
    bad_pairs: tuple[tuple[str, str], ...] = ()
    tested_at: float | None = None
    current: bool = False


class PlanStatus(Record):
    id: str
    text: str
    actions: int
    disruption: str
    blocked: str = ""  # why it is not executed
    approve: str = ""  # the command that lets exactly this plan run


class PassStatus(Record):
    id: str
    trigger: str
    sentence: str
    started_at: float
    seconds: float


class HostStatus(Record):
    name: str
    simulated: str = ""  # the profile; "" on a real host
    kernel: str = ""
    driver: str = ""
    iommu: str = ""
    sev_snp: str = ""


class Status(Record):
    version: int = STATUS_VERSION
    agent_version: str
    pid: int
    host: HostStatus
    published_at: float
    stale_after: float  # seconds after published_at; older than that it must not be believed
    activity: str = ""  # what the agent is doing right now; "" when it waits
    ready: Literal["True", "False", "Unknown"] = "Unknown"
    spec: SpecStatus
    last_pass: PassStatus | None = None
    conditions: tuple[Condition, ...] = ()
    gpus: tuple[GpuStatus, ...] = ()
    p2p: tuple[P2PStatus, ...] = ()
    services: tuple[ServiceStatus, ...] = ()
    plan: PlanStatus | None = None
    budget: str = ""
    journal: tuple[dict[str, Any], ...] = ()
    proof: str = ""  # how far what is said here is proved


def ready_of(conditions: tuple[Condition, ...]) -> Literal["True", "False", "Unknown"]:
    """Ready is the worst of what counts: a bad P2P verdict does not, because P2P is then off and proved without.

    An initramfs that cannot be listed is said and does not count: it may concern the next boot, and nothing that runs.
    """
    counting = [
        c
        for c in conditions
        if not c.type.startswith(("P2PVerified/", "Simulated"))
        and (c.type, c.status) != ("BindingsHoldAtBoot", "Unknown")
    ]
    if not counting:
        return "Unknown"
    if any(c.status == "False" for c in counting):
        return "False"
    return "Unknown" if any(c.status == "Unknown" for c in counting) else "True"
