"""The state of one simulated host: everything that changes, as data that survives a process.

Keys are camelCase in files. Addresses are PCI addresses in sysfs form; times named ``*_at`` are simulated
seconds since the host was first created, except in the kernel log, which carries wall-clock seconds.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel


class SimModel(BaseModel):
    """Mutable, closed, camelCase in files."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=True, ser_json_inf_nan="constants"
    )


class FunctionState(SimModel):
    """One PCI function. ``native`` is the driver that claims it when no override says otherwise."""

    vendor: int
    device: int
    class_code: int
    native: str = ""
    driver: str = ""
    override: str = ""
    group: int | None = None
    numa_node: int | None = None
    power_state: str = "D0"
    boot_vga: bool | None = None
    slot: str = ""
    serial: str = ""
    bridges: list[str] = []
    acs_ctl: int | None = None
    bars: list[tuple[int, int]] = []
    link_speed: str = ""
    link_width: int | None = None
    max_link_speed: str = ""
    max_link_width: int | None = None
    virtual_functions: int | None = None  # None: no SR-IOV

    @property
    def is_gpu(self) -> bool:
        return self.vendor == 0x10DE and self.class_code >> 8 in (0x0300, 0x0302)


class GpuState(SimModel):
    """What NVML would say of a GPU while it is on nvidia. ``nvml_code`` other than 0 makes reads of it fail."""

    minor: int
    uuid: str
    name: str
    serial: str = ""
    persistence_mode: bool = False
    power_limit: int = 600
    power_range: tuple[int, int] = (300, 600)
    locked_graphics_clocks: tuple[int, int] | None = None  # MHz; null: not set since the driver took it
    locked_memory_clocks: tuple[int, int] | None = None
    ecc: bool = True
    ecc_pending: bool = True
    mig: bool = False
    mig_pending: bool = False
    compute_mode: str = "default"
    memory_total: int = 97887
    memory_used: int = 4
    utilization: int = 0
    recovery_action: str = "none"
    link_gen: int = 5
    max_link_gen: int = 5
    link_width: int = 16
    max_link_width: int = 16
    bar1_total: int = 131072
    vbios: str = ""
    replays: int = 0
    clock_reasons: list[str] = []  # in the words of ``agent observe``: hardware thermal slowdown, ...
    rows_pending: bool = False  # a remapping of memory rows waits for a reset
    rows_failed: bool = False
    p2p_status: str = "ok"  # what NVML says of the ways to every other GPU; copies need not agree
    nvml_code: int = 0


class ModuleState(SimModel):
    parameters: dict[str, str] = {}
    read_only: list[str] = []  # parameters that only a reload with other options changes
    users: list[str] = []
    version: str = ""


class GroupState(SimModel):
    type: str = "DMA"


class LogLine(SimModel):
    """One kernel log line, ``count`` times over."""

    at: float  # wall clock, seconds
    text: str
    count: int = 1


class HolderState(SimModel):
    """Something outside the modelled units that holds a function."""

    address: str
    kind: str = "process"
    what: str
    pid: int | None = None
    command: str = ""
    unit: str = ""
    container: str = ""


class VmState(SimModel):
    """A virtual machine that holds the VFIO groups of its functions while it runs."""

    functions: list[str]
    running: bool = False
    pid: int = 9001


class UnbindState(SimModel):
    """A write to a driver's unbind file. ``done_at`` None: it has not returned and nothing says it will."""

    driver: str
    done_at: float | None = None
    failed: str = ""
    waits_for: str = ""  # vfio: returns once no VM holds the function


class OrphanState(SimModel):
    """A process that outlived its unit's stop."""

    pid: int
    command: str = "sglang::scheduler"
    gpus: list[str] = []
    memory: int = 40000  # MiB on each GPU
    port: int | None = None
    in_cgroup: bool = True


class LoadedUnit(SimModel):
    """What systemd understood of the unit's files at the last daemon-reload."""

    exec_start: list[str] = []
    environment: dict[str, str] = {}
    environment_files: list[str] = []
    restart: str = "no"
    restart_seconds: float = 0.1
    stop_timeout: float = 90.0
    bad: str = ""


class UnitEnd(SimModel):
    """How a running unit is going to end, and what it says on the way."""

    at: float
    result: str = "success"
    status: int = 0
    log: list[str] = []


class UnitState(SimModel):
    active_state: str = "inactive"
    sub_state: str = "dead"
    main_pid: int = 0
    result: str = "success"
    exit_status: int = 0
    restarts: int = 0
    enabled: bool = False
    holds: list[str] | None = None  # for daemons: GPUs held while active; ["*"]: every GPU on nvidia
    loaded: LoadedUnit | None = None
    argv: list[str] = []
    env: dict[str, str] = {}
    gpus: list[str] = []  # held by the running process
    p2p: bool = False
    hung: bool = False
    ready: bool = False  # it has loaded and listens
    started_at: float = 0.0
    load_seconds: float | None = None  # until it listens; None: it never does
    end: UnitEnd | None = None
    restart_at: float | None = None
    start_queued: bool = False
    server: dict[str, Any] = {}  # what scenario faults change about its HTTP server
    log: list[tuple[float, str]] = []
    orphans: list[OrphanState] = []
    orphans_after_stop: list[OrphanState] = []


class FileState(SimModel):
    """A file of a target; a plain string is its text. ``opened_by``: pid of a process that has it open."""

    text: str = ""
    mode: int = 0o644
    opened_by: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) else value


class TargetState(SimModel):
    """One place where services run. ``device_nodes`` None: they follow the GPUs that are on nvidia."""

    reachable: bool = True
    user_driver: str | None = None
    nvml_code: int = 0
    shm_bytes: int | None = None
    device_nodes: list[str] | None = None
    sglang_version: str | None = None
    paths: list[str] = []  # what exists besides files: interpreters, model folders
    files: dict[str, FileState] = {}
    units: dict[str, UnitState] = {}


class WorldState(SimModel):
    """Everything that changes on the simulated host, and how far the scenario has come."""

    profile: str
    scenario: dict[str, Any] = {}
    boot_id: str
    kernel_release: str
    cmdline: list[str]
    boot_loader: str = "grub"
    next_cmdline: list[str] | None = None  # of the boot loader's own files; None: as booted
    boot_words: list[str] | None = (
        None  # of what an operator edits, without the agent's file; None: as booted
    )
    initramfs_modules: list[str] = []
    modules_load: list[str] = []  # named in modules-load.d
    made_nodes: list[str] | None = None  # None: udev rules make every node; else those made in this boot
    modules: dict[str, ModuleState]
    installed_modules: list[str]
    module_options: list[str] = []
    sev_snp: bool | None = None
    driver_version: str  # of the installed NVIDIA kernel module
    cuda_version: str = ""
    systemd: str | None = None
    functions: dict[str, FunctionState]
    groups: dict[int, GroupState]
    gpus: dict[str, GpuState]
    unbinds: dict[str, UnbindState] = {}
    holders: list[HolderState] = []
    vms: dict[str, VmState] = {}
    targets: dict[str, TargetState]
    kernel_log: list[LogLine] = []
    next_pid: int = 40000
    boots: int = 1
    buses: dict[str, str] = Field(
        default={}, description="Where buses of the profile are now, if they have moved."
    )

    epoch_real: float = 0.0
    epoch_sim: float = 0.0
    factor: float = 60.0

    writes: list[str] = []
    calls: dict[str, int] = {}
    fault_hits: dict[int, int] = {}
    added_faults: list[dict[str, Any]] = []
    events_armed: dict[int, float] = {}
    events_done: list[int] = []
    spec_edits: int = 0

    version: int = Field(default=0, description="Counts mutations, for caches.")
