"""Which cards a spec means: selectors resolved to PCI addresses, and cards that moved found out.

A card is identified by UUID, serial or slot. An address alone is only a place: once a card was seen at a
selected address its identity is remembered, and another card found there later is refused, never bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.core.fact import Known, Unknown, value_or
from agent.core.inputs import Inputs
from agent.core.memory import Identity
from agent.core.observation import Observation, PciFunction
from agent.core.plan import Refusal
from agent.core.spec import ByAddress, ByNuma, BySerial, BySlot, ByUuid, GpuGroup, Selector

MOVED_STEP = "select the cards by uuid, serial or slot, or correct the addresses and save the spec"


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
    # A card is its function 0: virtual functions are GPUs by their class, and no cards.
    gpus = {a: f for a, f in sorted(inputs.obs.pci.value.functions.items()) if f.is_gpu and a.endswith(".0")}
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
            problems.append(_unknown(name, selector, gpus, inputs) or _missing(name, selector, inputs))
        elif moved := _moved(address, selector, gpus, inputs):
            problems.append(moved)
        elif address not in found:
            found.append(address)
    return tuple(sorted(found)), problems


def _select_numa(
    name: str, wanted: ByNuma, gpus: Mapping[str, PciFunction]
) -> tuple[tuple[str, ...], list[Refusal]]:
    unread = [a for a, f in gpus.items() if isinstance(f.numa_node, Unknown)]
    if unread:  # it may be one of the first, and then another card would be taken in its place
        message = f"group {name}: the NUMA node of {', '.join(unread)} cannot be read"
        return (), [Refusal("driver-binding", name, "NumaUnknown", message, "wait for the next pass")]
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
    seen = _seen(address, function, obs)
    old = None if seen.uuid else _remembered(seen, obs, remembered)
    if old is None:
        return seen
    return seen.model_copy(update={"uuid": old.uuid, "board": seen.board or old.board})


def _seen(address: str, function: PciFunction, obs: Observation) -> Identity:
    gpu = obs.nvml.value.gpus.get(address) if isinstance(obs.nvml, Known) else None
    uuid = value_or(gpu.value.uuid, "") if isinstance(gpu, Known) else ""
    board = value_or(gpu.value.serial, "") if isinstance(gpu, Known) else ""
    serial, slot = value_or(function.serial, ""), value_or(function.slot, "")
    return Identity(address=address, uuid=uuid, serial=serial, board=board, slot=slot)


def _remembered(seen: Identity, obs: Observation, remembered: Mapping[str, Identity]) -> Identity | None:
    """The memory of this card: by its serial wherever it stands now, else by its place while that still means it."""
    for old in remembered.values():
        if seen.serial and old.serial == seen.serial:
            return old
    here = remembered.get(seen.address)
    if here is None or not same_card(here, seen) or (not _agree(here, seen) and renumbered(obs, remembered)):
        return None
    shown = obs.nvml.value.gpus.items() if isinstance(obs.nvml, Known) else ()
    elsewhere = any(
        isinstance(g, Known) and g.value.uuid == Known(here.uuid) for a, g in shown if a != seen.address
    )
    return None if elsewhere else here


def same_card(a: Identity, b: Identity) -> bool:
    """False only on evidence: a UUID or serial that both have and that differs, or without either another slot."""
    if (a.uuid and b.uuid and a.uuid != b.uuid) or (a.serial and b.serial and a.serial != b.serial):
        return False
    return _agree(a, b) or not (a.slot and b.slot)


def _agree(a: Identity, b: Identity) -> bool:
    return any(x and x == y for x, y in ((a.uuid, b.uuid), (a.serial, b.serial), (a.slot, b.slot)))


def renumbered(obs: Observation, remembered: Mapping[str, Identity]) -> bool:
    """Bus numbers have changed: another card stands where one was, or one is gone and a new place is taken.

    Of cards whose place is to be learned anew only their names are remembered: they say nothing about places.
    """
    if not isinstance(obs.pci, Known):
        return False
    places = {key: old for key, old in remembered.items() if key == old.address}
    here = {a: _seen(a, f, obs) for a, f in obs.pci.value.functions.items() if f.is_gpu and a.endswith(".0")}
    other = any(a in here and not same_card(old, here[a]) for a, old in places.items())
    return other or (any(a not in here for a in places) and any(a not in places for a in here))


def _moved(
    address: str, selector: Selector, gpus: Mapping[str, PciFunction], inputs: Inputs
) -> Refusal | None:
    if not isinstance(selector, str | ByAddress):
        return None  # the selector itself names the card
    remembered = inputs.memory.identities
    old, seen = remembered.get(address), _seen(address, gpus[address], inputs.obs)
    if old is not None and not same_card(old, seen):
        now_at = _now_at(old, inputs)
        message = (
            f"the card at {address} is not the one the spec was accepted for"
            f" (was {_who(old)}, is {_who(seen)}); that card is {'now at ' + now_at if now_at else 'not seen on this host'}"
        )
    elif (old is None or not _agree(old, seen)) and renumbered(inputs.obs, remembered):
        message = (
            f"cards have moved on this host, and nothing tells whether the one at {address} is still the same"
        )
    else:
        return None
    return Refusal("driver-binding", address, "CardMoved", message, MOVED_STEP, terminal=True)


def _now_at(old: Identity, inputs: Inputs) -> str | None:
    """Where else that card is now, or None when no GPU of this host is known to be it."""
    functions = inputs.obs.pci.value.functions if isinstance(inputs.obs.pci, Known) else {}
    others = (f for f in functions.values() if f.is_gpu and f.address != old.address)
    return next((f.address for f in others if _matches(old, identify(f.address, f, inputs.obs, {}))), None)


def _matches(old: Identity, seen: Identity) -> bool:
    return bool((old.uuid and old.uuid == seen.uuid) or (old.serial and old.serial == seen.serial))


def _who(identity: Identity) -> str:
    return identity.uuid or (f"serial {identity.serial}" if identity.serial else "unidentified")


def _unknown(
    name: str, selector: Selector, gpus: Mapping[str, PciFunction], inputs: Inputs
) -> Refusal | None:
    """The card may well be here: some cards cannot be told apart now."""
    if isinstance(selector, str | ByAddress):
        return None
    field = next(iter(type(selector).model_fields))
    seen = {a: identify(a, f, inputs.obs, inputs.memory.identities) for a, f in gpus.items()}
    nameless = [a for a, card in seen.items() if not getattr(card, field)]
    if not nameless:
        return None
    message = f"group {name}: no card is known to have {_words(selector)}, and that of {', '.join(nameless)} is unknown"
    step = "wait until it can be read; a card on vfio-pci shows its serial and slot, but no uuid"
    return Refusal("driver-binding", name, "CardUnknown", message, step)


def _words(selector: Selector) -> str:
    return (
        selector
        if isinstance(selector, str)
        else " ".join(f"{k} {v}" for k, v in selector.model_dump().items())
    )


def _missing(name: str, selector: Selector, inputs: Inputs) -> Refusal:
    wanted = _words(selector)
    target = wanted if isinstance(selector, str) else name
    function = inputs.obs.function(wanted) if isinstance(selector, str) else None
    what = "is not an NVIDIA GPU" if function is not None else "was not found on this host"
    old = inputs.memory.identities.get(wanted) if isinstance(selector, str) else None
    if old is not None and (now_at := _now_at(old, inputs)):
        message = f"group {name}: {wanted} {what}; the card seen there before is now at {now_at}"
        return Refusal("driver-binding", wanted, "CardMoved", message, MOVED_STEP, terminal=True)
    known = f"; the card seen there before was {_who(old)}" if old else ""
    message = f"group {name}: {wanted} {what}{known}"
    step = "check the card (lspci -d 10de:) and correct the spec"
    return Refusal("driver-binding", target, "DeviceMissing", message, step)
