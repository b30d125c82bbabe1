"""The laws that a plan can break, as code that can be read beside them.

A plan is walked through the model one action at a time; every law looks at each action with the state just before
it. Laws 6 to 9 are kept by other parts and their tests: every act reads back, a converged host gets an empty plan,
the journal and the trial record survive a kill, and status carries ``simulated`` and its own age.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agent.core.fact import Known, say
from agent.core.inputs import Inputs
from agent.core.memory import Memory
from agent.core.p2p_decision import decide, standing
from agent.core.plan import Action, Plan
from agent.core.resolve import resolve
from agent.core.spec import GpuHost
from agent.core.verdict import usable

Step = tuple[Inputs, Action]


@dataclass(frozen=True, slots=True)
class Violation:
    law: int
    action: str
    message: str


def check_plan(plan: Plan, inputs: Inputs, steps: Iterable[Step]) -> list[Violation]:
    """Every way in which this plan breaks a law; [] when it breaks none. Whoever made it."""
    found = [
        Violation(law, action.key, message)
        for state, action in steps
        for law, broken in LAWS.items()
        for message in broken(state, action)
    ]
    return found + _law_5_refusals(plan, inputs)


def law_1(inputs: Inputs, action: Action) -> list[str]:
    """Never unbind a device that has, or may have, a holder. Unknown means held."""
    broken = []
    for address, driver in _bindings(action):
        function = inputs.obs.function(address)
        if function is None or not isinstance(function.driver, Known) or function.driver == Known(driver):
            continue
        holders = inputs.obs.holders_of(address)
        if not isinstance(holders, Known):
            broken.append(f"unbinds {address}, and who holds it is {say(holders)}")
        elif holders.value:
            broken.append(f"unbinds {address}, which is held: {holders.value[0].describe()}")
        if function.driver == Known("nvidia") and not _persistence_off(inputs, address):
            broken.append(f"unbinds {address}, and its persistence mode is not known to be off")
        if function.boot_vga == Known(value=True):
            broken.append(f"unbinds {address}, which is the console")
    return broken


def _persistence_off(inputs: Inputs, address: str) -> bool:
    nvml = inputs.obs.nvml.value if isinstance(inputs.obs.nvml, Known) else None
    gpu = nvml.gpus.get(address) if nvml else None
    return isinstance(gpu, Known) and gpu.value.persistence_mode == Known(value=False)


def law_2(inputs: Inputs, action: Action) -> list[str]:
    """An unbind that did not return is never written a second time."""
    pending = inputs.obs.pci.value.pending_unbinds if isinstance(inputs.obs.pci, Known) else ()
    return [
        f"unbinds {address} again, whose earlier unbind has not returned"
        for address, _ in _bindings(action)
        if address in pending or _stuck(inputs.memory, address, inputs)
    ]


def _stuck(memory: Memory, address: str, inputs: Inputs) -> bool:
    entry = memory.quarantine.get(address)
    return entry is not None and Known(entry.boot_id) == inputs.obs.platform.boot_id


def law_3(inputs: Inputs, action: Action) -> list[str]:
    """Never touch a device the spec does not name, nor split a slot or an IOMMU group between drivers."""
    if action.kind not in {"driver-binding", "gpu-settings", "p2p"}:
        return []
    resolved = resolve(inputs)
    named = {f.address for s in resolved.slots for f in s.functions}
    devices = [t for t in action.touches if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", t)]
    broken = [f"touches {d}, which the spec does not name" for d in devices if d not in named]
    moves = dict(_bindings(action))
    for address, driver in moves.items():
        if driver == "vfio-pci":
            broken += [
                f"leaves {m} of {address}'s IOMMU group on {d}"
                for m, d in _left_behind(inputs, address, moves)
            ]
    return broken


def _left_behind(inputs: Inputs, address: str, moves: dict[str, str]) -> list[tuple[str, str]]:
    """Members of the group, the slot included, that stay on a host driver and are no one's to move to vfio-pci."""
    pci = inputs.obs.pci.value if isinstance(inputs.obs.pci, Known) else None
    function = pci.functions.get(address) if pci else None
    if pci is None or function is None:
        return []
    group = pci.groups.get(function.iommu_group.value) if isinstance(function.iommu_group, Known) else None
    slots = resolve(inputs).slots
    to_vfio = {f.address for s in slots if s.driver == "vfio-pci" for f in s.functions}
    left = []
    for member in group.members if group else ():
        other = pci.functions.get(member)
        if other is None or other.is_bridge or member in moves or member in to_vfio:
            continue
        if other.driver != Known("vfio-pci"):
            left.append((member, say(other.driver)))
    return left


def law_4(inputs: Inputs, action: Action) -> list[str]:
    """A service starts with P2P on only under a good verdict with a matching fingerprint for exactly its GPUs."""
    if action.kind != "service" or action.verb not in {"trial", "prove"}:
        return []
    service = resolve(inputs).services.get(action.target)
    revision = service.effective if service else None
    if service is None or revision is None or len(revision.gpus) < 2 or not revision.p2p:
        return []
    verdict = standing(inputs.memory.verdict_for(revision.gpus), inputs.obs, revision.gpus)
    if usable(verdict, inputs.obs, revision.gpus):
        return []
    return [
        f"starts {action.target} with P2P on, and {decide(service.service, revision.gpus, inputs).reason}"
    ]


FORBIDDEN_WITH_SNP = re.compile(
    r"\b(put|add|set|append)\b[^;,]*\b(iommu=pt|iommu=off|amd_iommu=off|intel_iommu=off)"
)


def law_5(inputs: Inputs, action: Action) -> list[str]:
    """Never propose iommu=pt or IOMMU off on a host whose spec has SEV-SNP: the kernel then refuses SNP."""
    if not _snp(inputs.host):
        return []
    text = " ".join([action.description, *action.params.values()])
    return (
        ["proposes a kernel argument that makes the kernel refuse SNP"]
        if FORBIDDEN_WITH_SNP.search(text)
        else []
    )


def _law_5_refusals(plan: Plan, inputs: Inputs) -> list[Violation]:
    if not _snp(inputs.host):
        return []
    return [
        Violation(5, f"{r.kind}/{r.target}", f"advises what makes the kernel refuse SNP: {r.next_step}")
        for r in plan.refusals
        if FORBIDDEN_WITH_SNP.search(r.next_step)
    ]


def _snp(host: GpuHost) -> bool:
    return host.spec.platform.sev_snp == "enabled"


def law_10(inputs: Inputs, action: Action) -> list[str]:
    """No secret reaches a unit file, a log, the journal or a diff: actions carry paths of secrets, never values."""
    names = {n for s in inputs.spec.services.values() for n in s.secrets}
    text = " ".join([action.description, action.why, action.undo, *action.params.values()])
    return [
        f"carries a value for the secret {n}" for n in sorted(names) if re.search(rf"\b{re.escape(n)}=", text)
    ]


def _bindings(action: Action) -> list[tuple[str, str]]:
    if action.kind != "driver-binding" or action.verb != "bind":
        return []
    return sorted(action.params.items())


LAWS: dict[int, Callable[[Inputs, Action], list[str]]] = {
    1: law_1,
    2: law_2,
    3: law_3,
    4: law_4,
    5: law_5,
    10: law_10,
}
