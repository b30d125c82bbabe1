"""The PCI sections of an observation's page: NVIDIA's functions one by one, the rest in short."""

from typing import Any

from agent.app.observe_text import Row, columns, said, tell
from agent.app.status_page import table
from agent.app.terminal import Style, escape
from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import Observation, Pci, PciFunction
from agent.core.unbind_state import detail_of

NVIDIA = 0x10DE
CLASSES = {0x0300: "VGA", 0x0302: "3D", 0x0403: "audio", 0x0C03: "USB", 0x0C80: "serial bus"}


def nvidia_functions(obs: Observation, style: Style) -> list[str]:
    """A table of NVIDIA's functions, and below it what does not fit into a word."""
    if not isinstance(obs.pci, Known):
        return columns([("PCI tree", tell(obs.pci, style))])
    pci = obs.pci.value
    ours = [f for _, f in sorted(pci.functions.items()) if f.vendor_id == NVIDIA and not f.is_bridge]
    if not ours:
        return ["  none"]
    heads = ("address", "what", "driver", "override", "group", "NUMA", "power", "slot", "link")
    # Reasons stand below the table; in it, a fact is one word.
    body = [heads, *(_function(f, pci) for f in ours)]
    lines = ["  " + line for line in table(body, left=frozenset(range(len(heads))))]
    lines += columns(_reasons(ours, style))
    lines += columns([(f.address, _standing(f, style)) for f in ours if f.is_gpu])
    if pci.pending_unbinds:
        told = ", ".join(f"{a}{detail_of(obs.unbinds.get(a))}" for a in pci.pending_unbinds)
        lines.append(style.bad(f"  unbinds that have not returned: {escape(told)}"))
    return lines


def _word(fact: Fact[Any]) -> str:
    if isinstance(fact, Known):
        return escape(said(fact.value))
    return "none" if isinstance(fact, Absent) else "UNKNOWN"


def _function(function: PciFunction, pci: Pci) -> tuple[str, ...]:
    what = (
        "GPU"
        if function.is_gpu
        else CLASSES.get(function.class_code >> 8, f"class {function.class_code:06x}")
    )
    name = f"{what} {function.vendor_id:04x}:{function.device_id:04x}"
    group = _word(function.iommu_group)
    if isinstance(function.iommu_group, Known) and (found := pci.groups.get(function.iommu_group.value)):
        group += f" {_word(found.type)}"
    console = " (console)" if function.boot_vga == Known(value=True) else ""
    return (
        escape(function.address), name + console, _word(function.driver), _word(function.driver_override), group,
        _word(function.numa_node), _word(function.power_state), _word(function.slot), _link(function),
    )  # fmt: skip


def _link(function: PciFunction) -> str:
    now, most = (function.link_speed, function.link_width), (function.max_link_speed, function.max_link_width)
    if isinstance(now[0], Absent):
        return "none"
    told = f"{_word(now[0])} x{_word(now[1])}"
    return told if now == most else f"{told} of {_word(most[0])} x{_word(most[1])}"


def _standing(function: PciFunction, style: Style) -> str:
    """What there is to bring a lost GPU back, whether the kernel may put it to sleep, and who would go with it."""
    return (
        f"reset by {tell(function.reset_methods, style)}, power control {tell(function.power_control, style)}, "
        f"virtual functions {tell(function.virtual_functions, style)}"
    )


def _reasons(functions: list[PciFunction], style: Style) -> list[Row]:
    """Why a word in the table is UNKNOWN."""
    named = (
        "driver",
        "driver_override",
        "iommu_group",
        "numa_node",
        "power_state",
        "slot",
        "link_speed",
        "serial",
    )
    return [
        (f.address, f"{name}: {tell(fact, style)}")
        for f in functions
        for name in named
        if isinstance(fact := getattr(f, name), Unknown)
    ]


def bridges_and_groups(obs: Observation, style: Style) -> list[str]:
    """Bridges by their ACS control, how many others there are, and the IOMMU groups of NVIDIA's functions."""
    if not isinstance(obs.pci, Known):
        return []
    pci = obs.pci.value
    acs: dict[str, list[str]] = {}
    for address, function in sorted(pci.functions.items()):
        if function.is_bridge:
            told = (
                f"{function.acs_ctl.value:#06x}"
                if isinstance(function.acs_ctl, Known)
                else tell(function.acs_ctl, style)
            )
            acs.setdefault(told, []).append(address)
    rows = [
        (f"bridges: {len(found)}", f"ACS control {told}: {escape(' '.join(found))}")
        for told, found in acs.items()
    ]
    others = [f for f in pci.functions.values() if not f.is_bridge and f.vendor_id != NVIDIA]
    rows.append((f"others: {len(others)}", "functions by other vendors"))
    for number, group in sorted(pci.groups.items()):
        if any(pci.functions[a].vendor_id == NVIDIA for a in group.members if a in pci.functions):
            rows.append(
                (f"IOMMU group {number}", f"{tell(group.type, style)}: {escape(' '.join(group.members))}")
            )
    return columns(rows)
