"""Which cards a spec means: selectors resolved to PCI addresses, and cards that moved found out.

A card is identified by UUID, serial or slot. An address alone is only a place: once a card was seen at a
selected address its identity is remembered, and another card found there later is refused, never bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.core.fact import Known, value_or
from agent.core.inputs import Inputs
from agent.core.memory import Identity
from agent.core.observation import Observation, PciFunction
from agent.core.plan import Refusal
from agent.core.spec import ByAddress, ByNuma, BySerial, BySlot, ByUuid, GpuGroup, Selector


@dataclass(frozen=True, slots=True)
class Selection:
    """GPU groups as addresses (ascending), and what could not be selected."""

    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()

    def group_of(self, address: str) -> str:
        return next((name for name, members in self.groups.items() if address in members), "")


def select(inputs: Inputs) -> Selection:
    groups: dict[str, tuple[str, ...]] = {}
    refusals: list[Refusal] = []
    if not isinstance(inputs.obs.pci, Known):
        return Selection()
    gpus = {a: f for a, f in sorted(inputs.obs.pci.value.functions.items()) if f.is_gpu}
    for name, group in inputs.spec.gpus.items():
        found, problems = _select_group(name, group, gpus, inputs)
        groups[name] = found
        refusals += problems
    return _disjoint(groups, refusals)


def _disjoint(groups: dict[str, tuple[str, ...]], refusals: list[Refusal]) -> Selection:
    """A card that two groups lay claim to belongs to neither: only the host shows such an overlap."""
    every = [a for members in groups.values() for a in members]
    twice = sorted({a for a in every if every.count(a) > 1})
    for address in twice:
        names = " and ".join(n for n, members in groups.items() if address in members)
        message = f"{address} is selected by groups {names}"
        refusals.append(
            Refusal(
                "driver-binding",
                address,
                "SelectedTwice",
                message,
                "let each GPU belong to one group",
                terminal=True,
            )
        )
    kept = {n: tuple(a for a in members if a not in twice) for n, members in groups.items()}
    return Selection(kept, tuple(refusals))


def _select_group(
    name: str, group: GpuGroup, gpus: Mapping[str, PciFunction], inputs: Inputs
) -> tuple[tuple[str, ...], list[Refusal]]:
    if isinstance(group.select, ByNuma):
        return _select_numa(name, group.select, gpus)
    found: list[str] = []
    problems: list[Refusal] = []
    for selector in group.select:
        address = find(selector, gpus, inputs)
        if address is None:
            problems.append(_missing(name, selector, inputs))
        elif moved := _moved(address, selector, gpus, inputs):
            problems.append(moved)
        elif address not in found:
            found.append(address)
    return tuple(sorted(found)), problems


def _select_numa(
    name: str, wanted: ByNuma, gpus: Mapping[str, PciFunction]
) -> tuple[tuple[str, ...], list[Refusal]]:
    found = tuple(a for a, f in gpus.items() if f.numa_node == Known(wanted.numa_node))[: wanted.count]
    if len(found) == wanted.count:
        return found, []
    message = (
        f"group {name} wants {wanted.count} GPUs of NUMA node {wanted.numa_node}; {len(found)} were found"
    )
    return found, [
        Refusal("driver-binding", name, "TooFewGpus", message, "correct the spec or look for a lost card")
    ]


def find(selector: Selector, gpus: Mapping[str, PciFunction], inputs: Inputs) -> str | None:
    """The address that a selector means on this host now, or None."""
    if isinstance(selector, str):
        return selector if selector in gpus else None
    if isinstance(selector, ByAddress):
        return selector.address if selector.address in gpus else None
    for address, function in gpus.items():
        seen = identify(address, function, inputs.obs, inputs.memory.identities)
        if isinstance(selector, ByUuid) and seen.uuid.lower() == selector.uuid.lower():
            return address
        if isinstance(selector, BySerial) and selector.serial in {seen.serial, seen.board}:
            return address
        if isinstance(selector, BySlot) and seen.slot == selector.slot:
            return address
    return None


def identify(
    address: str, function: PciFunction, obs: Observation, remembered: Mapping[str, Identity]
) -> Identity:
    """Who the card at an address is: facts first, and the UUID that was seen before it left NVML's sight.

    A remembered UUID counts only while nothing that can be seen contradicts it.
    """
    gpu = obs.nvml.value.gpus.get(address) if isinstance(obs.nvml, Known) else None
    uuid = value_or(gpu.value.uuid, "") if isinstance(gpu, Known) else ""
    board = value_or(gpu.value.serial, "") if isinstance(gpu, Known) else ""
    serial = value_or(function.serial, "")
    old = next((i for i in remembered.values() if serial and i.serial == serial), None) or remembered.get(
        address
    )
    if not uuid and old is not None and (not serial or not old.serial or old.serial == serial):
        uuid, board = old.uuid, board or old.board
    return Identity(address=address, uuid=uuid, serial=serial, board=board, slot=value_or(function.slot, ""))


def same_card(a: Identity, b: Identity) -> bool:
    """False only on evidence: a UUID or serial that both have and that differs."""
    return not ((a.uuid and b.uuid and a.uuid != b.uuid) or (a.serial and b.serial and a.serial != b.serial))


def _moved(
    address: str, selector: Selector, gpus: Mapping[str, PciFunction], inputs: Inputs
) -> Refusal | None:
    if not isinstance(selector, str | ByAddress):
        return None  # the selector itself names the card
    old = inputs.memory.identities.get(address)
    seen = identify(address, gpus[address], inputs.obs, {})
    if old is None or same_card(old, seen):
        return None
    now_at = next(
        (a for a, f in gpus.items() if a != address and _matches(old, identify(a, f, inputs.obs, {}))), None
    )
    message = (
        f"the card at {address} is not the one the spec was accepted for"
        f" (was {_who(old)}, is {_who(seen)}); that card is {'now at ' + now_at if now_at else 'not on this host'}"
    )
    step = "select the cards by uuid, serial or slot, or correct the addresses and save the spec"
    return Refusal("driver-binding", address, "CardMoved", message, step, terminal=True)


def _matches(old: Identity, seen: Identity) -> bool:
    return bool((old.uuid and old.uuid == seen.uuid) or (old.serial and old.serial == seen.serial))


def _who(identity: Identity) -> str:
    return identity.uuid or (f"serial {identity.serial}" if identity.serial else "unidentified")


def _missing(name: str, selector: Selector, inputs: Inputs) -> Refusal:
    wanted = (
        selector
        if isinstance(selector, str)
        else " ".join(f"{k} {v}" for k, v in selector.model_dump().items())
    )
    target = wanted if isinstance(selector, str) else name
    function = inputs.obs.function(wanted) if isinstance(selector, str) else None
    what = "is not an NVIDIA GPU" if function is not None else "was not found on this host"
    old = inputs.memory.identities.get(wanted) if isinstance(selector, str) else None
    known = f"; the card seen there before was {_who(old)}" if old else ""
    message = f"group {name}: {wanted} {what}{known}"
    step = "check the card (lspci -d 10de:) and correct the spec"
    return Refusal("driver-binding", target, "DeviceMissing", message, step)
