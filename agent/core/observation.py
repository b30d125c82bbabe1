"""One observation: every fact of one pass, as frozen data.

Mappings are never changed after construction. Addresses are PCI addresses in sysfs form
(``0000:01:00.0``). A per-item fact inside a Known whole can be Unknown: one lost GPU does not hide seven.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.gpu_facts import P2PCapability, RemappedRows

NOT_READ = Unknown("not read in this pass", "NotObserved")
NOT_TOLD = "NotTold"  # code of a setting that can be written, and that nothing reads back


@dataclass(frozen=True, slots=True)
class PciFunction:
    """One PCI function as sysfs shows it (/sys/bus/pci/devices/ADDRESS)."""

    address: str
    vendor_id: int
    device_id: int
    class_code: int  # 24 bits: 0x030000 VGA, 0x030200 3D controller, 0x040300 audio, 0x060400 bridge
    driver: Fact[str] = Absent()  # Absent: no driver bound
    driver_override: Fact[str] = Absent()
    iommu_group: Fact[int] = Absent()
    numa_node: Fact[int] = NOT_READ
    power_state: Fact[str] = NOT_READ  # D0, D3hot, D3cold
    boot_vga: Fact[bool] = Absent()
    slot: Fact[str] = Absent()  # physical slot name, /sys/bus/pci/slots
    serial: Fact[str] = NOT_READ  # PCIe device serial number capability, 16 hex digits
    bridges: tuple[str, ...] = ()  # upstream bridges, nearest to the root complex first
    acs_ctl: Fact[int] = Absent()  # ACS control register; bridges only
    bars: tuple[tuple[int, int], ...] = ()  # (first, last) bus address of each memory BAR
    link_speed: Fact[str] = Absent()
    link_width: Fact[int] = Absent()
    max_link_speed: Fact[str] = Absent()
    max_link_width: Fact[int] = Absent()
    reset_methods: Fact[tuple[str, ...]] = (
        NOT_READ  # flr, bus, pm..., the first tried first; Absent: no reset at all
    )
    power_control: Fact[str] = NOT_READ  # on: kept awake; auto: the kernel may let it sleep, down to D3cold
    virtual_functions: Fact[int] = NOT_READ  # of SR-IOV, now; Absent: it can have none. NVIDIA's only

    @property
    def is_gpu(self) -> bool:
        return self.vendor_id == 0x10DE and self.class_code >> 8 in (0x0300, 0x0302)

    @property
    def is_bridge(self) -> bool:
        return self.class_code >> 16 == 0x06

    @property
    def slot_address(self) -> str:
        """Domain, bus and device without the function: what belongs to one card."""
        return self.address.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class IommuGroup:
    number: int
    type: Fact[str]  # DMA, DMA-FQ, identity
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A loaded kernel module: parameters (as /sys/module shows them), use count, user modules."""

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    use_count: int = 0
    users: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Initramfs:
    """The initramfs of the running kernel: what of it decides which driver takes a GPU first, and with which options."""

    image: str  # its path
    rebuild: str  # the command that makes it anew
    modules: tuple[str, ...] = ()  # GPU drivers and vfio modules inside, by the kernel's names
    files: tuple[str, ...] = ()  # files of modprobe.d and udev rules inside, as absolute paths


@dataclass(frozen=True, slots=True)
class NvidiaNodes:
    """Character devices of NVIDIA's loaded modules that are not in /dev, and the program that can make them."""

    missing: tuple[str, ...] = ()
    maker: str = ""  # path of nvidia-modprobe; "": it is not installed


@dataclass(frozen=True, slots=True)
class Platform:
    boot_id: Fact[str] = NOT_READ
    kernel_release: Fact[str] = NOT_READ
    cmdline: Fact[tuple[str, ...]] = NOT_READ  # /proc/cmdline in words
    modules: Fact[Mapping[str, Module]] = NOT_READ
    module_options: Fact[tuple[str, ...]] = NOT_READ  # "options ..." lines of modprobe.d
    sev_snp: Fact[bool] = NOT_READ  # /sys/module/kvm_amd/parameters/sev_snp
    nvidia_driver: Fact[str] = NOT_READ  # the kernel module's version; Absent: not loaded
    systemd: Fact[str] = NOT_READ  # version; Absent: not the service manager here
    module_option_files: Fact[tuple[tuple[str, str], ...]] = (
        NOT_READ  # (file, "options ..." line), modprobe's order
    )
    boot_loader: Fact[str] = NOT_READ  # a name of core.boot.LOADERS
    next_cmdline: Fact[tuple[str, ...]] = (
        NOT_READ  # what the boot loader will hand over, by the files it reads
    )
    configured_cmdline: Fact[tuple[str, ...]] = (
        NOT_READ  # what those files would hold, were they made anew now
    )
    boot_sources: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # file that an operator edits -> words of the kernel command line in it
    initramfs: Fact[Initramfs] = NOT_READ
    nvidia_nodes: Fact[NvidiaNodes] = NOT_READ  # Absent: nvidia has no GPU, so there need be none
    modules_load: Fact[tuple[tuple[str, str], ...]] = NOT_READ  # (file, module) of modules-load.d


@dataclass(frozen=True, slots=True)
class Pci:
    functions: Mapping[str, PciFunction] = field(default_factory=dict)
    groups: Mapping[int, IommuGroup] = field(default_factory=dict)
    pending_unbinds: tuple[str, ...] = ()  # unbinds that have not returned, whoever wrote them


@dataclass(frozen=True, slots=True)
class Gpu:
    """What NVML says of one GPU. Powers in watts, memory in MiB, utilisation in percent."""

    address: str
    index: int
    minor: Fact[int]
    uuid: Fact[str]
    name: Fact[str]
    serial: Fact[str] = NOT_READ
    persistence_mode: Fact[bool] = NOT_READ
    power_limit: Fact[int] = NOT_READ
    power_limit_range: Fact[tuple[int, int]] = NOT_READ
    locked_graphics_clocks: Fact[tuple[int, int]] = NOT_READ  # MHz, by quantity.UNLOCKED; else NOT_TOLD
    locked_memory_clocks: Fact[tuple[int, int]] = NOT_READ
    graphics_clock: Fact[int] = NOT_READ  # MHz at this moment
    memory_clock: Fact[int] = NOT_READ
    ecc_mode: Fact[bool] = NOT_READ
    ecc_pending: Fact[bool] = NOT_READ  # what it will be after the next reset
    mig_mode: Fact[bool] = NOT_READ
    mig_pending: Fact[bool] = NOT_READ
    compute_mode: Fact[str] = NOT_READ  # default, exclusiveProcess, prohibited
    memory_total: Fact[int] = NOT_READ
    memory_used: Fact[int] = NOT_READ
    utilization: Fact[int] = NOT_READ
    pids: Fact[tuple[int, ...]] = NOT_READ  # compute processes
    recovery_action: Fact[str] = NOT_READ  # none, reset, reboot, drain, drain and reset
    link_gen: Fact[int] = NOT_READ
    max_link_gen: Fact[int] = NOT_READ
    link_width: Fact[int] = NOT_READ
    max_link_width: Fact[int] = NOT_READ
    replays: Fact[int] = NOT_READ  # PCIe packets sent again since the driver took the GPU
    vbios: Fact[str] = NOT_READ
    bar1_total: Fact[int] = NOT_READ
    clock_reasons: Fact[tuple[str, ...]] = NOT_READ  # what holds the clocks down now
    graphics_pids: Fact[tuple[int, ...]] = NOT_READ
    remapped_rows: Fact[RemappedRows] = NOT_READ
    p2p: Fact[Mapping[str, P2PCapability]] = NOT_READ  # to each other GPU by its address


@dataclass(frozen=True, slots=True)
class Nvml:
    driver_version: Fact[str]
    nvml_version: Fact[str] = NOT_READ
    cuda_version: Fact[str] = NOT_READ
    gpus: Mapping[str, Fact[Gpu]] = field(default_factory=dict)  # by PCI address
    confidential_compute: Fact[str] = NOT_READ  # off; on (production), with what is not usual about it


@dataclass(frozen=True, slots=True)
class Holder:
    """Something that keeps a driver on a device. ``what``: the open path, "persistence mode", "VM 101"..."""

    kind: str  # process, persistence, module, console, vm
    what: str
    pid: int | None = None
    command: str = ""
    unit: str = ""
    container: str = ""

    def describe(self) -> str:
        who = f"pid {self.pid} ({self.command})" if self.pid is not None else self.kind
        where = "".join(
            f", {label} {name}"
            for label, name in (("unit", self.unit), ("container", self.container))
            if name
        )
        return f"{who}{where} holds {self.what}"


@dataclass(frozen=True, slots=True)
class Unit:
    """One systemd unit, by ``systemctl show``'s words."""

    name: str
    load_state: str  # loaded, not-found
    active_state: str  # active, activating, deactivating, inactive, failed
    sub_state: str = ""
    main_pid: int = 0
    result: str = ""  # success, exit-code, signal, timeout, watchdog, oom-kill
    exit_status: int = 0
    restarts: int = 0  # NRestarts
    pids: tuple[int, ...] = ()  # every process in its cgroup
    needs_reload: bool = False  # NeedDaemonReload: its files have changed since systemd read them


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a target looks like from inside."""

    reachable: Fact[bool]
    user_driver: Fact[str] = NOT_READ  # version of libcuda / libnvidia-ml there
    nvml: Fact[str] = NOT_READ  # Known("ok") or Unknown(reason, code) as seen from inside
    shm_bytes: Fact[int] = NOT_READ  # size of /dev/shm
    device_nodes: Fact[tuple[str, ...]] = NOT_READ  # /dev/nvidia*
    sglang_version: Fact[str] = NOT_READ


@dataclass(frozen=True, slots=True)
class Process:
    """A running main process: what was executed, and what its environment was at exec."""

    pid: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Silence:
    """A running service's health probes in a row that got no token, the last one included."""

    probes: int
    seconds: float  # from the end of the first of them to the end of the last
    answered: bool  # a probe was answered before, in this run of the service and of the agent
    timed_out: int = 0  # of these probes, those that only waited too long: a busy server's may, too


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    unit: Fact[Unit] = NOT_READ
    files: Fact[Mapping[str, str]] = NOT_READ  # files we own for it: path -> text; a missing one is left out
    process: Fact[Process] = NOT_READ  # Absent: no main process
    model_present: Fact[bool] = NOT_READ  # the model path exists in the target
    health: Fact[str] = NOT_READ  # Known("ok"), Absent("connection refused"), Unknown(...)
    silence: Silence | None = None  # None: the last probe was answered, or there was none
    at: tuple[str, str] | None = None  # target_name() and unit looked at; None: where the spec has it


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """Kernel log lines of one sort about one device, folded into one record with a count."""

    sort: str  # page-fault, xid, bus-lost, aer, vfio-blocked... (agent/catalog/kernel_log.yaml has them all)
    address: str  # PCI address, or "" for the host
    count: int  # a lower bound: the kernel rate-limits
    first: float  # wall clock, seconds
    last: float
    sample: str  # one line of the log
    code: int | None = None  # Xid number, page-fault flags, AER status
    peer: str = ""  # the GPU whose BAR holds the faulting address


@dataclass(frozen=True, slots=True)
class Observation:
    """All facts of one pass."""

    platform: Platform = Platform()
    pci: Fact[Pci] = NOT_READ
    nvml: Fact[Nvml] = NOT_READ  # Absent: no GPU on nvidia, so NVML was not opened
    holders: Mapping[str, Fact[tuple[Holder, ...]]] = field(default_factory=dict)  # by function address
    quiesced: Mapping[str, Fact[Unit]] = field(default_factory=dict)  # units of policy.quiesce
    targets: Mapping[str, TargetFacts] = field(default_factory=dict)  # by target_name()
    services: Mapping[str, ServiceFacts] = field(default_factory=dict)  # by service name
    host_files: Mapping[str, Fact[str]] = field(
        default_factory=dict
    )  # files of ours on the host: path -> text
    kernel_events: Fact[tuple[KernelEvent, ...]] = NOT_READ  # since boot
    kernel_gaps: int = 0  # reads of the kernel log so far that found lines lost
    unbinds: Mapping[str, Fact[str]] = field(default_factory=dict)  # states of unbinds that were left open
    former_units: Mapping[str, Fact[Unit]] = field(default_factory=dict)  # by "UNIT in TARGET"
    kernel_unread: bool = False  # lines of the kernel log are left: they came faster than they could be read

    def function(self, address: str) -> PciFunction | None:
        return self.pci.value.functions.get(address) if isinstance(self.pci, Known) else None

    def holders_of(self, address: str) -> Fact[tuple[Holder, ...]]:
        """Law 1: what was not looked at may be held."""
        return self.holders.get(address, Unknown("holders were not looked for", "HoldersUnknown"))
