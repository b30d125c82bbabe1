"""What a simulated host is made of, as data: ``profiles/NAME.yaml`` or ``synthetic_profile``."""

import re
from functools import cache
from importlib import resources
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from agent.core.quantity import parse_duration
from agent.sim.state import HolderState, ModuleState, TargetState, VmState
from agent.sim.yaml_text import ScenarioError, read_yaml, say_problems

Seconds = Annotated[float, BeforeValidator(lambda v: v if isinstance(v, float | int) else parse_duration(v))]


class ProfileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Device(ProfileModel):
    """A PCI function that is no GPU: a bridge, a network card, an NVMe drive, the BMC's VGA."""

    vendor: int
    device: int
    class_code: int
    driver: str = ""
    group: int | None = None
    numa_node: int | None = None
    boot_vga: bool | None = None
    acs_ctl: int | None = None
    bars: tuple[tuple[int, int], ...] = ()
    bridges: tuple[str, ...] = ()


class GpuModel(ProfileModel):
    """What all GPUs of the host have in common; ``audio`` is function .1 of each slot."""

    name: str
    vendor: int = 0x10DE
    device: int
    class_code: int = 0x030200
    audio_device: int | None = None
    memory_total: int  # MiB
    power_range: tuple[int, int]  # watts
    link_speed: str
    link_gen: int
    link_width: int


class Card(ProfileModel):
    """One GPU in its slot."""

    minor: int
    uuid: str
    nvml_serial: str
    serial: str
    slot: str
    numa_node: int
    group: int
    bridges: tuple[str, ...]
    bars: tuple[tuple[int, int], ...]


class When(ProfileModel):
    """A condition on a service as it is started: a flag of its argv or a variable of its environment."""

    flag: str | None = None
    env: str | None = None
    p2p: bool | None = None
    equals: str | None = None
    exists: bool | None = None


class Effect(ProfileModel):
    """A rule about speed: under ``when``, levels up to ``max_concurrency`` run ``factor`` times as fast."""

    when: When
    factor: float
    min_concurrency: int = 1
    max_concurrency: int = 1_000_000
    note: str


class Answer(ProfileModel):
    """A prompt that contains ``match`` is answered with ``answer``."""

    match: str
    answer: str


class Serving(ProfileModel):
    """How the simulated server behaves once it has loaded. ``source`` says where the figures are from."""

    source: str
    speeds: tuple[tuple[int, float], ...]  # (concurrency, aggregate tokens per second)
    effects: tuple[Effect, ...] = ()
    load_seconds: float = 45.0
    ttft_seconds: float = 0.2
    chunk_seconds: float = 0.25
    drain_seconds: float = 2.0
    max_total_tokens: int = 780820
    answers: tuple[Answer, ...] = ()
    default_answer: str = "This is a simulated answer."


class LogText(ProfileModel):
    """A kernel log line from ``age`` seconds before the host was first created."""

    age: Seconds
    text: str
    count: int = 1


class Profile(ProfileModel):
    """A whole host as found: hardware, kernel, targets, units, log."""

    name: str
    title: str
    boot_id: str
    kernel_release: str
    cmdline: tuple[str, ...]
    modules: dict[str, ModuleState]
    installed_modules: tuple[str, ...]
    module_options: tuple[str, ...] = ()
    sev_snp: bool | None = None
    nvidia_driver: str
    cuda_version: str
    systemd: str | None
    gpu_model: GpuModel
    gpus: dict[str, Card]  # by slot address without the function, 0000:01:00
    devices: dict[str, Device]
    targets: dict[str, TargetState]
    holders: tuple[HolderState, ...] = ()
    vms: dict[str, VmState] = {}
    kernel_log: tuple[LogText, ...] = ()
    serving: Serving
    time_factor: float = Field(default=60.0, gt=0)


@cache
def load_profile(name: str) -> Profile:
    """A shipped profile by name, or ``synthetic-N``. Raises ``ScenarioError`` naming the profiles that exist."""
    if (match := re.fullmatch(r"synthetic-(\d{1,4})", name)) is not None:
        return synthetic_profile(int(match[1]))
    folder = resources.files("agent.sim") / "profiles"
    file = folder / f"{name}.yaml"
    if "/" in name or not file.is_file():
        known = ", ".join(
            sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))
        )
        raise ScenarioError((f"no profile is called {name!r}; there are: {known}, synthetic-N",))
    data, line_of = read_yaml(file.read_text(encoding="utf-8"), f"{name}.yaml")
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise say_problems(error, f"{name}.yaml", line_of) from error


def synthetic_profile(gpus: int) -> Profile:
    """A host with any number of GPUs (1 to 7,000) and no service, for scale and benchmarks: no real machine."""
    if not 1 <= gpus <= 7000:
        raise ValueError(f"a synthetic host has 1 to 7000 GPUs, not {gpus}")
    base = load_profile("esc8000a")
    cards, devices = {}, {}
    for number in range(gpus):
        domain, bus = divmod(number, 200)
        port = f"{domain:04x}:00:{number % 32:02x}.{number // 32 % 8}"
        first = (number + 1) << 38
        cards[f"{domain:04x}:{bus + 1:02x}:00"] = Card(
            minor=gpus - 1 - number,
            uuid=f"GPU-00000000-0000-4000-8000-{number:012x}",
            nvml_serial=f"{1_000_000_000_000 + number}",
            serial=f"{number:016x}",
            slot=f"s{number}",
            numa_node=number * 2 // gpus,
            group=2 * number,
            bridges=(port,),
            bars=((first, first + (1 << 37) - 1),),
        )
        devices[port] = Device(
            vendor=0x1022,
            device=0x14AB,
            class_code=0x060400,
            driver="pcieport",
            group=2 * number + 1,
            acs_ctl=0x1D,
        )
    host = TargetState(reachable=True, user_driver=base.nvidia_driver)
    return base.model_copy(
        update={
            "name": f"synthetic-{gpus}",
            "title": f"a synthetic host with {gpus} GPUs",
            "gpus": cards,
            "devices": devices,
            "targets": {"host": host},
            "kernel_log": (),
        }
    )
