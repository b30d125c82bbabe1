"""What the NVML child is asked, its one argument, and what it says on its stdout: JSON, validated on arrival."""

from typing import Generic, Literal, TypeVar

from agent.core.record import Record

T = TypeVar("T")


class ReadRequest(Record):
    """Everything about all GPUs. ``addresses``: those bound to nvidia by sysfs."""

    addresses: tuple[str, ...]


class WriteRequest(Record):
    """One setting of one GPU. ``values`` are what NVML's own setter takes, in its units (mode 0 or 1, milliwatts)."""

    address: str
    setting: Literal["persistence-mode", "power-limit"]
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
    memory_total: Cell[int]
    memory_used: Cell[int]
    utilization: Cell[int]
    pids: Cell[tuple[int, ...]]
    recovery_action: Cell[int]
    link_gen: Cell[int]
    max_link_gen: Cell[int]
    link_width: Cell[int]


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
    gpus: tuple[GpuAnswer, ...] = ()
    closed: tuple[ClosedGpu, ...] = ()


class Outcome(Record):
    """How a write ended. No fault: NVML took it, which says nothing yet of what reads back."""

    version: Literal[1] = 1
    fault: Fault | None = None
