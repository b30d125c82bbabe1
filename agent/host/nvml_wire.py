"""What the NVML child is asked, its one argument, and what it says on its stdout: JSON, validated on arrival."""

from collections.abc import Mapping
from typing import Generic, Literal, TypeVar

from agent.core.record import Record

T = TypeVar("T")


class ReadRequest(Record):
    """Everything about all GPUs. ``addresses``: those bound to nvidia by sysfs. ``lasting``: with ``LastingAnswer``."""

    addresses: tuple[str, ...]
    lasting: bool


class WriteRequest(Record):
    """One setting of one GPU, by a name of the child's table. ``values`` are what NVML's own setter takes, in its units."""

    address: str
    setting: str
    values: tuple[int, ...]


class Fault(Record):
    """An NVML return code and NVML's own words for it."""

    code: int
    text: str


class Cell(Record, Generic[T]):
    """One answer: a value, or the fault that came instead of it."""

    value: T | None = None
    fault: Fault | None = None


class GpuAnswer(Record):
    """One GPU that could be opened. Power in milliwatts and memory in bytes, as NVML has them."""

    address: str
    index: int
    minor: Cell[int]
    uuid: Cell[str]
    name: Cell[str]
    serial: Cell[str]
    persistence_mode: Cell[bool]
    power_limit: Cell[int]
    power_limit_range: Cell[tuple[int, int]]
    graphics_clock: Cell[int]
    memory_clock: Cell[int]
    ecc: Cell[tuple[bool, bool]]  # now, and after the next reset
    mig: Cell[tuple[bool, bool]]
    compute_mode: Cell[int]
    memory_total: Cell[int]
    memory_used: Cell[int]
    utilization: Cell[int]
    clock_reasons: Cell[int]  # nvmlClocksEventReasons, a bit each
    pids: Cell[tuple[int, ...]]
    graphics_pids: Cell[tuple[int, ...]]
    recovery_action: Cell[int]
    replays: Cell[int]
    remapped_rows: Cell[tuple[int, int, int, int]]  # correctable, uncorrectable, pending, failure
    link_gen: Cell[int]
    max_link_gen: Cell[int]
    link_width: Cell[int]


class P2PAnswer(Record):
    """nvmlGpuP2PStatus_t from one GPU to another."""

    read: Cell[int]
    write: Cell[int]
    atomics: Cell[int]


class LastingAnswer(Record):
    """What changes with the card or its driver only. ``p2p``: by the other GPU's address."""

    vbios: Cell[str]
    bar1_total: Cell[int]
    max_link_width: Cell[int]
    p2p: Mapping[str, P2PAnswer]


class ClosedGpu(Record):
    """One GPU that could not be opened. ``address`` is "" where only its index is known."""

    address: str
    index: int | None
    fault: Fault


class Answer(Record):
    """Everything. ``fault``: NVML itself could not be opened, and there is nothing else."""

    version: Literal[1] = 1
    fault: Fault | None = None
    driver_version: Cell[str] = Cell[str]()
    nvml_version: Cell[str] = Cell[str]()
    cuda_version: Cell[int] = Cell[int]()  # 1000 * major + 10 * minor
    confidential_compute: Cell[tuple[int, int, int]] = Cell[
        tuple[int, int, int]
    ]()  # feature, environment, tools
    gpus: tuple[GpuAnswer, ...] = ()
    lasting: Mapping[str, LastingAnswer] = {}  # by address, for the GPUs in ``gpus``; empty: not asked for
    closed: tuple[ClosedGpu, ...] = ()


class Outcome(Record):
    """How a write ended. No fault: NVML took it, which says nothing yet of what reads back."""

    version: Literal[1] = 1
    fault: Fault | None = None
