"""The type of an IOMMU group's default domain, changed at run time where the kernel and the laws allow it.

Such a change is lost when the devices are removed and scanned for anew, and at the next boot: the command line decides
then. Source: Documentation/ABI/testing/sysfs-kernel-iommu_groups.
"""

from dataclasses import replace

from agent.core.binding import group_of
from agent.core.errors import TransientError
from agent.core.fact import Absent, Fact, Known, Unknown, say, value_or
from agent.core.inputs import Inputs
from agent.core.observation import IommuGroup, Pci
from agent.core.plan import Action, Disruption, Stage
from agent.core.reach import is_out_of_reach
from agent.core.resolve import Resolved
from agent.ports import Ports

VERB = "set-group-type"
MODES = {"DMA": "translated", "DMA-FQ": "translated", "identity": "passthrough"}


def selected_groups(resolved: Resolved, pci: Pci) -> list[IommuGroup]:
    """The groups of every selected card, each once."""
    functions = [pci.functions[f.address] for s in resolved.slots for f in s.functions]
    found = {g.number: g for f in functions if (g := group_of(f, pci)) is not None}
    return [found[number] for number in sorted(found)]


def wrong_groups(inputs: Inputs, resolved: Resolved) -> list[IommuGroup]:
    """Groups whose known type is not of the mode that the spec asks for."""
    wanted = inputs.spec.platform.iommu
    if wanted not in MODES.values() or not isinstance(inputs.obs.pci, Known):
        return []
    groups = selected_groups(resolved, inputs.obs.pci.value)
    return [g for g in groups if isinstance(g.type, Known) and MODES.get(g.type.value) != wanted]


def group_actions(inputs: Inputs, resolved: Resolved) -> list[Action]:
    if not isinstance(inputs.obs.pci, Known):
        return []
    pci = inputs.obs.pci.value
    return [
        _action(group, _type(inputs, resolved, pci), pci)
        for group in wrong_groups(inputs, resolved)
        if not obstacle(group, inputs, resolved)
    ]


def _type(inputs: Inputs, resolved: Resolved, pci: Pci) -> str:
    """What translated groups have here already, so that all are alike; else the stricter of the two."""
    if inputs.spec.platform.iommu == "passthrough":
        return "identity"
    types = [value_or(g.type, "") for g in selected_groups(resolved, pci)]
    return next((t for t in types if MODES.get(t) == "translated"), "DMA")


def _action(group: IommuGroup, wanted: str, pci: Pci) -> Action:
    members = tuple(m for m in group.members if not pci.functions[m].is_bridge)
    was = say(group.type)
    return Action(
        "platform", VERB, f"iommu-group-{group.number}",
        f"set the type of IOMMU group {group.number} ({', '.join(members)}): {was} -> {wanted}",
        Stage.PREPARE, Disruption.NONE, params={"group": str(group.number), "type": wanted},
        touches=members, undo=f"write {was} to /sys/kernel/iommu_groups/{group.number}/type",
        why="platform.iommu, and no driver of the host or open VFIO device stands in the way", optional=True,
    )  # fmt: skip


def obstacle(group: IommuGroup, inputs: Inputs, resolved: Resolved) -> str:
    """Why its type cannot or must not be changed now; "" where it can."""
    if not isinstance(inputs.obs.pci, Known):
        return "the PCI tree cannot be read"
    pci, wanted = inputs.obs.pci.value, inputs.spec.platform
    if wanted.sev_snp == "enabled" and inputs.obs.platform.sev_snp != Known(value=True):
        return "SEV-SNP comes only with a boot, which sets the type too"
    snp = inputs.obs.platform.sev_snp
    if wanted.iommu == "passthrough" and not isinstance(snp, Absent) and snp != Known(value=False):
        return "with SEV-SNP on, or not known to be off, the kernel refuses passthrough"
    named = {f.address for s in resolved.slots for f in s.functions}
    for address in group.members:
        function = pci.functions.get(address)
        if function is None:
            return f"{address} is not seen"
        if not function.is_bridge and (reason := _member(address, function.driver, named, inputs)):
            return reason
    return ""


def _member(address: str, driver: Fact[str], named: set[str], inputs: Inputs) -> str:
    if address not in named:
        return f"the spec does not name {address}"
    if is_out_of_reach(address, inputs):
        return f"{address} is out of reach"
    if not isinstance(driver, Absent) and driver != Known("vfio-pci"):
        return f"{address} is on {say(driver)}"
    holders = inputs.obs.holders_of(address)
    if isinstance(holders, Unknown):
        return f"who holds {address} is unknown: {holders.reason}"
    held = value_or(holders, ())
    return held[0].describe() if held else ""


def predict_group(action: Action, inputs: Inputs) -> Inputs:
    if not isinstance(inputs.obs.pci, Known):
        return inputs
    pci, number = inputs.obs.pci.value, int(action.params["group"])
    if number not in pci.groups:
        return inputs
    groups = {**pci.groups, number: replace(pci.groups[number], type=Known(action.params["type"]))}
    return replace(inputs, obs=replace(inputs.obs, pci=Known(replace(pci, groups=groups))))


async def set_group_type(action: Action, ports: Ports) -> None:
    """Law 1 once more at the last moment; the kernel refuses by itself what it does not allow (EPERM)."""
    number, wanted = int(action.params["group"]), action.params["type"]
    held = await ports.holders.read(action.touches)
    for address in action.touches:
        fact = held.get(address, Unknown("not looked for"))
        if not isinstance(fact, Known) or fact.value:
            who = fact.value[0].describe() if isinstance(fact, Known) else f"holders {say(fact)}"
            raise TransientError(
                f"{address}: {who}", reason="Held" if isinstance(fact, Known) else "HoldersUnknown"
            )
    await ports.pci.set_group_type(number, wanted)
    group = (await ports.pci.read()).groups.get(number)
    found: Fact[str] = group.type if group is not None else Unknown("the group is gone")
    if found != Known(wanted):
        message = f"the type of IOMMU group {number} was set to {wanted} and reads back {say(found)}"
        raise TransientError(message, reason="ReadBackFailed")
