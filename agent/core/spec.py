"""The spec: what the operator wants of one GPU host (``apiVersion: gpu-host/v1``).

The models say what may be written; ``spec_load`` turns a file into one of them and reports every
error at its line. Field descriptions are the reference text of ``agent explain`` and of the JSON Schema.
"""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

from agent.core.quantity import (
    parse_clocks,
    parse_duration,
    parse_floor,
    parse_percent,
    parse_rate,
    parse_watts,
    say_clocks,
)


class SpecModel(BaseModel):
    """Frozen, strict about unknown keys, camelCase in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


_LONGEST_QUANTITY = 64  # characters; longer ones would make the parsers slow


def _parsed(parse: Callable[[object], object], *done: type) -> BeforeValidator:
    """Parse text. An already parsed value passes in Python (defaults, models made by code), never from a file."""

    def before(value: object, info: ValidationInfo) -> object:
        if info.mode == "python" and isinstance(value, done) and not isinstance(value, bool):
            return value
        return parse("" if isinstance(value, str) and len(value) > _LONGEST_QUANTITY else value)

    return BeforeValidator(before)


def _text(pattern: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


class Rate(SpecModel):
    """So many per window (seconds)."""

    count: int = Field(ge=0)
    window: float = Field(gt=0)


def _parse_rate(value: object) -> Rate:
    count, window = parse_rate(value)
    return Rate(count=count, window=window)


def _say_seconds(seconds: float) -> str:
    """The shortest exact spelling: 1h, 30m, 90s, 0.5s."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.15g}{unit}"
    return f"{seconds:.15f}".rstrip("0").rstrip(".") + "s"


Duration = Annotated[
    float,
    _parsed(parse_duration, float),
    PlainSerializer(_say_seconds, return_type=str),
    _text(r"^(\s*\d+(\.\d+)?\s*(ms|s|m|h|d))+\s*$", "30s"),
]
Watts = Annotated[
    int,
    _parsed(parse_watts, int),
    PlainSerializer(lambda v: f"{v}W", return_type=str),
    _text(r"^\s*\d+\s*W\s*$", "600W"),
]
Clocks = Annotated[
    tuple[int, int],
    _parsed(parse_clocks, tuple),
    PlainSerializer(say_clocks, return_type=str),
    _text(r"^(unlocked|\s*[1-9]\d*(\s*-\s*[1-9]\d*)?\s*MHz\s*)$", "300-2000MHz"),
]
Percent = Annotated[
    float,
    _parsed(parse_percent, float),
    PlainSerializer(lambda v: f"{v * 100:.12g}%", return_type=str),
    _text(r"^\s*\d+(\.\d+)?\s*%\s*$", "5%"),
]
Floor = Annotated[
    float,
    _parsed(parse_floor, float),
    PlainSerializer(lambda v: f">= {v:.15g} tok/s", return_type=str),
    _text(r"^\s*>=\s*\d+(\.\d+)?\s*tok/s\s*$", ">= 100 tok/s"),
]
RateText = Annotated[
    Rate,
    _parsed(_parse_rate, Rate),
    PlainSerializer(lambda v: f"{v.count} per {_say_seconds(v.window)}", return_type=str),
    _text(r"^\s*\d+\s+per\s+(\s*\d+(\.\d+)?\s*(ms|s|m|h|d))+\s*$", "3 per 1h"),
]
PciAddress = Annotated[
    str, Field(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$", examples=["0000:01:00.0"])
]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$", examples=["inference"])]
UnitName = Annotated[str, Field(pattern=r"^[A-Za-z0-9:_.\\@-]+\.service$", examples=["sglang.service"])]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00-\x1f]*$", examples=["/usr/bin/python3"])]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", examples=["HF_HOME"])]
DriverVersion = Annotated[str, Field(pattern=r"^\d+(\.\d+){1,2}$", examples=["590.48.01"])]
EnvValue = str | int | float

AllowedDisruption = Literal["live", "restart", "rebind"]
Driver = Literal["nvidia", "vfio-pci"]
ComputeMode = Literal["default", "exclusiveProcess", "prohibited"]


class Budget(SpecModel):
    restarts: RateText = Field(
        default=Rate(count=3, window=3600.0),
        description="How many service starts the agent may make in a window before it stops and says so."
        " Survives agent restarts and boots.",
    )


class Policy(SpecModel):
    mode: Literal["enforce", "observe"] = Field(
        default="enforce", description="enforce: make it so. observe: plan and report, never act."
    )
    allow: tuple[AllowedDisruption, ...] = Field(
        default=("live", "restart", "rebind"),
        description="Disruptions allowed without asking. A plan beyond them is blocked whole until it is"
        " approved by its id. A reboot is never done, only asked for.",
    )
    resync: Duration = Field(
        default=30.0,
        description="A full pass at least this often, trigger or not. Above 40s it is every 40 seconds: status must not"
        " grow old while nothing happens.",
    )
    budget: Budget = Field(default=Budget(), description="Remediation budget.")
    quiesce: tuple[UnitName, ...] = Field(
        default=(),
        description="Units on the host that the agent may stop while it rebinds a GPU, and starts again"
        " afterwards: nvidia-persistenced, a metrics exporter.",
    )
    boot_files: Literal["ask", "edit"] = Field(
        default="ask",
        description="How kernel arguments get to the boot loader. ask: the agent says what to edit and which command"
        " to run. edit: it does both itself (GRUB: its own file in /etc/default/grub.d; proxmox-boot-tool:"
        " /etc/kernel/cmdline). It never reboots.",
    )


class KernelArgs(SpecModel):
    require: tuple[str, ...] = Field(
        default=(), description="Arguments that must be on the kernel command line."
    )
    forbid: tuple[str, ...] = Field(
        default=(), description="Arguments that must not be there; * and ? match as in a shell."
    )


class Platform(SpecModel):
    iommu: Literal["translated", "passthrough", "off", "any"] = Field(
        default="any",
        description="What the IOMMU must do with the GPUs' DMA. The fact is the type of each GPU's IOMMU group:"
        " DMA or DMA-FQ is translated, identity is passthrough, no groups is off.",
    )
    sev_snp: Literal["enabled", "disabled", "any"] = Field(
        default="any", description="SEV-SNP on the host (kvm_amd's sev_snp). Needs a translated IOMMU."
    )
    kernel_args: KernelArgs = Field(default=KernelArgs(), description="Kernel command line.")
    modules: dict[str, dict[str, str | int]] = Field(
        default_factory=dict, description="Module options: module -> parameter -> value."
    )
    nvidia_driver: DriverVersion | None = Field(
        default=None,
        description="Version of the NVIDIA kernel module, and of the user-space driver in every target.",
    )


class ByAddress(SpecModel):
    address: PciAddress = Field(description="PCI address of the card's function 0.")


class ByUuid(SpecModel):
    uuid: str = Field(
        pattern=r"^GPU-[0-9a-fA-F-]{36}$",
        examples=["GPU-5a1c0a52-6f5b-4a3b-9d4e-0c1f2a3b4c5d"],
        description="The UUID that nvidia-smi -L shows.",
    )


class BySerial(SpecModel):
    serial: str = Field(min_length=1, description="PCIe device serial number: 16 hex digits, in quotes.")


class BySlot(SpecModel):
    slot: str = Field(min_length=1, description="Physical slot name as in /sys/bus/pci/slots, in quotes.")


class ByNuma(SpecModel):
    numa_node: int = Field(ge=0, description="A NUMA node of the host.")
    count: int = Field(ge=1, description="How many GPUs of that node, in the order of their addresses.")


def _by_key(
    models: dict[str, type[BaseModel]], is_text: Callable[[str], bool], message: str
) -> Discriminator:
    """Choose a branch by what is written, so that an error names one branch and not all of them.

    Tags stand in angle brackets: no key of a spec does.
    """

    def choose(value: object) -> str | None:
        if isinstance(value, str):
            return "<text>" if is_text(value) else None
        if isinstance(value, dict):
            return next((f"<{key}>" for key in models if to_camel(key) in value or key in value), None)
        return next((f"<{key}>" for key, model in models.items() if isinstance(value, model)), None)

    return Discriminator(choose, custom_error_type="branch", custom_error_message=message)


Selector = Annotated[
    Annotated[PciAddress, Tag("<text>")]
    | Annotated[ByAddress, Tag("<address>")]
    | Annotated[ByUuid, Tag("<uuid>")]
    | Annotated[BySerial, Tag("<serial>")]
    | Annotated[BySlot, Tag("<slot>")],
    _by_key(
        {"address": ByAddress, "uuid": ByUuid, "serial": BySerial, "slot": BySlot},
        lambda _: True,
        'expected a PCI address such as "0000:01:00.0", {uuid: ...}, {serial: ...} or {slot: ...}',
    ),
]


def _list_or_numa(value: object) -> str:
    return "<numa>" if isinstance(value, dict | ByNuma) else "<list>"


Selection = Annotated[
    Annotated[tuple[Selector, ...], Field(min_length=1), Tag("<list>")] | Annotated[ByNuma, Tag("<numa>")],
    Discriminator(_list_or_numa),
]


class GpuSettings(SpecModel):
    persistence_mode: bool | None = Field(default=None, description="NVML persistence mode.")
    power_limit: Watts | None = Field(default=None, description="NVML power management limit.")
    locked_graphics_clocks: Clocks | None = Field(
        default=None,
        description="Lowest and highest graphics clock, or unlocked. Needs persistenceMode: true.",
    )
    locked_memory_clocks: Clocks | None = Field(
        default=None,
        description="Lowest and highest memory clock, or unlocked. Needs persistenceMode: true.",
    )
    ecc: bool | None = Field(
        default=None, description="ECC of the GPU's memory. Works from the next reset of the GPU or boot on."
    )
    compute_mode: ComputeMode | None = Field(
        default=None,
        description="How many processes may compute on a GPU: any number, one, or none.",
    )
    mig: bool | None = Field(
        default=None,
        description="MIG mode; no instances are made. Changed only while nothing holds the GPU.",
    )


class GpuGroup(SpecModel):
    select: Selection = Field(
        description="Which GPUs: PCI addresses, {uuid: ...}, {serial: ...} or {slot: ...}, or"
        " {numaNode: N, count: N} for the first N GPUs of a node by address."
    )
    driver: Driver = Field(description="The driver that must hold every function of these GPUs' slots.")
    settings: GpuSettings = Field(default=GpuSettings(), description="Settings through NVML; only on nvidia.")


class LxcTarget(SpecModel):
    lxc: int = Field(ge=1, description="A container's id on this host.")


class SshTarget(SpecModel):
    ssh: str = Field(
        pattern=r"^[^\s@-][^\s@]*@[^\s@-][^\s@]*$", examples=["root@gpu1"], description="user@host"
    )


Target = Annotated[
    Annotated[Literal["host"], Tag("<text>")]
    | Annotated[LxcTarget, Tag("<lxc>")]
    | Annotated[SshTarget, Tag("<ssh>")],
    _by_key(
        {"lxc": LxcTarget, "ssh": SshTarget},
        lambda text: text == "host",
        "expected host, {lxc: ID} or {ssh: user@host}",
    ),
]


def target_name(target: Target) -> str:
    """The one spelling of a target in keys, messages and status: host, lxc:129, ssh:root@gpu1."""
    if isinstance(target, LxcTarget):
        return f"lxc:{target.lxc}"
    if isinstance(target, SshTarget):
        return f"ssh:{target.ssh}"
    return "host"


class SmokePrompt(SpecModel):
    ask: str = Field(min_length=1, description="Sent at temperature 0.")
    expect: str | None = Field(default=None, min_length=1, description="Text that the answer must contain.")
    expect_regex: str | None = Field(
        default=None, min_length=1, description="A regular expression that the answer must match."
    )


class BenchmarkSpec(SpecModel):
    concurrency: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(1, 4, 16), min_length=1, description="Levels: how many requests are in flight at once."
    )
    input_tokens: int = Field(default=128, ge=1, description="Length of each prompt, roughly.")
    output_tokens: int = Field(default=500, ge=1, description="Exact length of each answer (ignore_eos).")
    requests_per_slot: int = Field(default=2, ge=1, description="Requests per slot in one repeat.")
    repeats: int = Field(default=3, ge=1, le=99, description="Repeats of each level; the median counts.")
    timeout: Duration = Field(default=3600.0, description="Deadline for the whole benchmark.")


class Regression(SpecModel):
    throughput: Percent = Field(default=0.05, description="How much slower than the baseline may be.")
    latency_p50: Percent = Field(default=0.10, description="How much longer the median request may take.")
    latency_p95: Percent = Field(default=0.20, description="How much longer the 95th percentile may take.")


class Gate(SpecModel):
    start_timeout: Duration = Field(default=1800.0, description="From start to ready.")
    drain_timeout: Duration = Field(
        default=60.0, description="How long running requests may finish before stop."
    )
    stop_timeout: Duration = Field(default=120.0, description="From stop to proved stopped.")
    smoke: tuple[SmokePrompt, ...] = Field(
        default=(SmokePrompt(ask="What is 7 * 13?", expect="91"),), description="Prompts with known answers."
    )
    benchmark: BenchmarkSpec = Field(default=BenchmarkSpec(), description="The speed test.")
    require: dict[int, Floor] = Field(
        default_factory=dict,
        description="Floors: concurrency -> least aggregate tokens per second.",
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]+$"}},
    )
    regression: Regression = Field(
        default=Regression(), description="Against the baseline of promoted trials."
    )
    on_failure: Literal["rollback", "hold"] = Field(
        default="rollback", description="rollback: the last good revision comes back. hold: stop and wait."
    )


ArgValue = bool | int | float | str | None | tuple[bool | int | float | str, ...]


class Service(SpecModel):
    runtime: Literal["sglang"] = Field(description="What serves the model.")
    target: Target = Field(default="host", description="Where it runs: host, {lxc: ID} or {ssh: user@host}.")
    unit: UnitName = Field(description="The systemd unit in the target; the agent owns one drop-in of it.")
    gpus: Name = Field(description="The GPU group it uses; its driver must be nvidia.")
    python: AbsolutePath = Field(default="/usr/bin/python3", description="The interpreter that has SGLang.")
    p2p: Literal["auto", "off", "required"] = Field(
        default="auto",
        alias="p2p",  # the generator would make it p2P
        description="GPU-to-GPU transfers. auto: on only under a good P2P verdict for exactly these GPUs."
        " required: refuse to start without one.",
    )
    args: dict[str, ArgValue] = Field(
        default_factory=dict, description="SGLang's own flags without the dashes. true: the bare flag."
    )
    env: dict[EnvName, EnvValue] = Field(default_factory=dict, description="Environment of the service.")
    nccl: dict[EnvName, EnvValue] = Field(
        default_factory=dict, description="NCCL environment; merged with what the P2P verdict decides."
    )
    secrets: dict[EnvName, AbsolutePath] = Field(
        default_factory=dict, description="Variable -> path of a file in the target that holds its value."
    )
    gate: Gate = Field(default=Gate(), description="What a restart must prove before it stands.")


class Spec(SpecModel):
    policy: Policy = Field(default=Policy(), description="What the agent may do by itself.")
    platform: Platform = Field(default=Platform(), description="What the host's platform must look like.")
    gpus: dict[Name, GpuGroup] = Field(
        default_factory=dict, description="GPU groups. A GPU in no group is never touched."
    )
    services: dict[Name, Service] = Field(default_factory=dict, description="Services by name.")


class Metadata(SpecModel):
    name: Name = Field(description="The host's name; only for people.")


class GpuHost(SpecModel):
    """One GPU host's desired state."""

    api_version: Literal["gpu-host/v1"] = Field(description="The format of this file.")
    kind: Literal["GpuHost"] = Field(description="What the file describes.")
    metadata: Metadata = Field(description="The host's name.")
    spec: Spec = Field(description="The desired state.")
