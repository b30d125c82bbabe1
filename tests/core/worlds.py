"""Generated hosts: a spec over the eight cards, a starting point, and a few faults."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from agent.core.fact import Known
from agent.core.inputs import Inputs
from agent.core.observation import Pci
from agent.core.spec import ByNuma, GpuHost
from agent.core.spec_checks import cross_check
from tests.core import build
from tests.core.build import FIRST, GPUS, LAST, Change, audio_of, made, serial_of, spec, uuid_of
from tests.core.faults import EXPORTER, FAULTS, PERSISTENCED
from tests.core.verdicts import rules_written

DRIVERS = {"inference": "nvidia", "second": "nvidia", "confidential": "vfio-pci"}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"persistenceMode": True},
    {"powerLimit": "450W"},
    {"persistenceMode": True, "lockedGraphicsClocks": "300-2000MHz", "computeMode": "exclusiveProcess"},
    {"ecc": False, "lockedMemoryClocks": "unlocked", "mig": False},
]
FaultDraw = tuple[str, str, int]


@dataclass(frozen=True)
class World:
    """Inputs, how they came about, and the truth that the code has to find out.

    ``wanted`` has the driver of every card that the spec names; ``cards`` the card that stands at each address.
    Cards go by their UUID.
    """

    inputs: Inputs
    drawn: tuple[Any, ...]
    wanted: dict[str, str]
    cards: dict[str, str]

    def driver_at(self, address: str) -> str:
        """What the spec wants for the card that stands there: "" for a card that it does not name."""
        return self.wanted.get(self.cards.get(address[:-1] + "0", ""), "")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis shows an example: by the draws that made it, not by a page of facts."""
        printer.text("World(" + ", ".join(map(str, self.drawn)) + ")")


def _selector(address: str, style: str) -> object:
    return {
        "address": address,
        "uuid": {"uuid": uuid_of(address)},
        "serial": {"serial": serial_of(address)},
        "slot": {"slot": str(GPUS.index(address) + 1)},
    }[style]


@st.composite
def specs(draw: st.DrawFn) -> tuple[GpuHost, dict[str, str], dict[str, Any]]:
    """A spec that the checks accept, and the driver that it wants for each card."""
    groups = draw(
        st.lists(
            st.sampled_from(["", "inference", "second", "confidential", "confidential"]),
            min_size=8,
            max_size=8,
        )
        | st.just(["inference"] * 4 + ["confidential"] * 4)
    )
    style = draw(st.sampled_from(["address", "uuid", "serial", "slot", "numa"]))
    owner = dict(zip(GPUS, groups, strict=True))
    select: dict[str, Any] = {
        name: [_selector(a, style if style != "numa" else "address") for a in GPUS if owner[a] == name]
        for name in DRIVERS
        if name in groups
    }
    if style == "numa":
        owner = {
            a: "inference" if a in FIRST else "confidential" for a in GPUS if a not in (FIRST[3], LAST[3])
        }
        select = {"inference": {"numaNode": 0, "count": 3}, "confidential": {"numaNode": 1, "count": 3}}
    sections = _sections(draw, select)
    host = spec(**sections)
    assert not cross_check(host.spec)
    wanted = {uuid_of(a): DRIVERS[name] for a, name in owner.items() if name}
    return host, wanted, sections


def _sections(draw: st.DrawFn, select: dict[str, Any]) -> dict[str, Any]:
    settings = draw(st.sampled_from(SETTINGS))
    gpus = {
        name: {
            "select": chosen,
            "driver": DRIVERS[name],
            "settings": settings if DRIVERS[name] == "nvidia" else {},
        }
        for name, chosen in select.items()
    }
    names = draw(st.sets(st.sampled_from([n for n in select if DRIVERS[n] == "nvidia"] or [""])))
    services = {
        f"serve-{name}": {
            **build.SERVICE,
            "gpus": name,
            "unit": build.UNIT if name == "inference" else "sglang-second.service",
            "target": draw(st.sampled_from(["host", {"lxc": 129}])),
            "args": {"model-path": "/models/qwen", "port": 30000 + len(name)},
            "p2p": draw(st.sampled_from(["auto", "off", "required"])),
            "gate": {"onFailure": draw(st.sampled_from(["rollback", "hold"]))},
        }
        for name in sorted(names - {""})
    }
    quiesce = draw(st.sampled_from([[], [EXPORTER], [EXPORTER, PERSISTENCED]]))
    platform = draw(
        st.sampled_from(
            [
                {},
                {
                    "sevSnp": "enabled",
                    "iommu": "translated",
                    "kernelArgs": {"forbid": ["iommu=pt", "vfio-pci.ids=*"]},
                },
                {"iommu": "passthrough", "sevSnp": "disabled", "nvidiaDriver": "590.48.01"},
                {
                    "modules": {"nvidia_uvm": {"uvm_disable_hmm": 1}},
                    "kernelArgs": {"require": ["pcie_aspm=off"]},
                },
            ]
        )
    )
    return {"policy": {"quiesce": quiesce}, "platform": platform, "gpus": gpus, "services": services}


def _start(name: str, wanted: dict[str, str]) -> Change:
    """Where the host stands before the faults: as found, idle, split as wanted, or all cards given away."""
    every = tuple(a for gpu in GPUS for a in (gpu, audio_of(gpu)))
    if name == "found":
        return lambda inputs: inputs

    def change(inputs: Inputs) -> Inputs:
        inputs = made(inputs, *(build.stopped(n) for n in inputs.spec.services), build.idle(*every))
        given = GPUS if name == "given" else [a for a in GPUS if wanted.get(uuid_of(a)) == "vfio-pci"]
        return inputs if name == "idle" else made(inputs, build.on("vfio-pci", *given), rules_written)

    return change


faults = st.tuples(st.sampled_from(sorted(FAULTS)), st.sampled_from(GPUS), st.integers(0, 3))


@st.composite
def worlds(draw: st.DrawFn, most: int = 6) -> World:
    host, wanted, sections = draw(specs())
    start = draw(st.sampled_from(["found", "idle", "split", "given"]))
    chosen: list[FaultDraw] = draw(st.lists(faults, max_size=most))
    moved = draw(st.sampled_from(["", "", "", "buses shifted"]))
    inputs = made(build.type_host(host), _start(start, wanted))
    for name, address, variant in chosen:
        inputs = FAULTS[name](address, variant)(inputs)
    cards = {a: uuid_of(a) for a in GPUS}
    if moved and len(inputs.memory.identities) == len(
        GPUS
    ):  # an address that nobody remembers means what is there now
        inputs, cards = shifted(inputs), {_shifted(a): card for a, card in cards.items()}
    if any(isinstance(g.select, ByNuma) for g in host.spec.gpus.values()):
        wanted = _by_node(inputs, cards)
    return World(inputs, (sections, start, *chosen, moved), wanted, cards)


def _by_node(inputs: Inputs, cards: dict[str, str]) -> dict[str, str]:
    """What a NUMA selection means: the first cards of the node, by their addresses now."""
    wanted: dict[str, str] = {}
    tree = build.known_pci(inputs)
    for group in inputs.spec.gpus.values():
        if isinstance(group.select, ByNuma):
            node = [
                a
                for a in sorted(cards)
                if a in tree.functions and tree.functions[a].numa_node == Known(group.select.numa_node)
            ]
            wanted |= {cards[a]: group.driver for a in node[: group.select.count]}
    return wanted


def _shifted(address: str) -> str:
    return f"{address[:5]}{(int(address[5:7], 16) + 0x10) & 0xFF:02x}{address[7:]}"


def shifted(inputs: Inputs) -> Inputs:
    """After a boot that gave every card a bus number higher by 0x10, so that most stand where another one stood."""
    tree = build.known_pci(inputs)
    every = {f for f, function in tree.functions.items() if function.slot_address + ".0" in GPUS}

    def place(address: str) -> str:
        return _shifted(address) if address in every else address

    functions = {place(a): replace(f, address=place(a)) for a, f in tree.functions.items()}
    groups = {n: replace(g, members=tuple(map(place, g.members))) for n, g in tree.groups.items()}
    nvml = inputs.obs.nvml
    if isinstance(nvml, Known):
        nvml = Known(replace(nvml.value, gpus={place(a): g for a, g in nvml.value.gpus.items()}))
    return build.made(
        build.with_obs(
            inputs, pci=Known(Pci(functions, groups)), nvml=nvml,
            holders={place(a): f for a, f in inputs.obs.holders.items()},
        ),
        build.platform(boot_id=Known("another boot")),
    )  # fmt: skip
