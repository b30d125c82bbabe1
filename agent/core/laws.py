"""The laws that a plan can break, as code that can be read beside them.

A plan is walked through the model one action at a time; every law looks at each action with the state just before
it. Laws 6 to 9 are kept by other parts and their tests: every act reads back, a converged host gets an empty plan,
the journal and the trial record survive a kill, and status carries ``simulated`` and its own age.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from agent.core.binding import group_of
from agent.core.fact import Absent, Known, Unknown, say
from agent.core.forbidden_text import proposes_untranslated, secret_names, secrets_said
from agent.core.immovable import may_be_console
from agent.core.inputs import Inputs
from agent.core.p2p_decision import holds, standing
from agent.core.plan import Action, Plan
from agent.core.reach import is_out_of_reach
from agent.core.render import P2P_OFF_ENV, P2P_OFF_FLAG
from agent.core.resolve import resolve
from agent.core.revision import Revision
from agent.core.spec import GpuHost

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
    return [*found, *_law_5_refusals(plan, inputs), *_law_10_texts(plan, inputs)]


def law_1(inputs: Inputs, action: Action) -> list[str]:
    """Never unbind a device that has, or may have, a holder. Unknown means held."""
    broken = _group_held(inputs, action)
    for address, driver in _bindings(action):
        function = inputs.obs.function(address)
        if function is None or function.driver == Known(driver):
            continue
        holders = inputs.obs.holders_of(address)
        if isinstance(function.driver, Absent) and address not in inputs.obs.holders:
            continue  # nothing to unbind; where somebody was looked for, "no driver" may be a pending unbind
        if not isinstance(holders, Known):
            broken.append(f"unbinds {address}, and who holds it is {say(holders)}")
        elif holders.value:
            broken.append(f"unbinds {address}, which is held: {holders.value[0].describe()}")
        if isinstance(function.driver, Unknown):
            broken.append(f"unbinds {address}, and its driver is {say(function.driver)}")
        if function.driver == Known("nvidia") and function.is_gpu and not _persistence_off(inputs, address):
            broken.append(f"unbinds {address}, and its persistence mode is not known to be off")
        if may_be_console(function) and not isinstance(function.driver, Absent):
            broken.append(f"unbinds {address}, which is or may be the console")
    return broken


def _group_held(inputs: Inputs, action: Action) -> list[str]:
    """A group's type changes under its devices: nobody may hold one, and no driver of the host may use one."""
    broken = []
    for address in _devices(action) if action.verb == GROUP_TYPE else ():
        function, holders = inputs.obs.function(address), inputs.obs.holders_of(address)
        driver = function.driver if function is not None else Unknown("it is not seen")
        if not isinstance(driver, Absent) and driver != Known("vfio-pci"):
            broken.append(f"changes the group of {address}, whose driver is {say(driver)}")
        if not isinstance(holders, Known):
            broken.append(f"changes the group of {address}, and who holds it is {say(holders)}")
        elif holders.value:
            broken.append(f"changes the group of {address}, which is held: {holders.value[0].describe()}")
    return broken


def _persistence_off(inputs: Inputs, address: str) -> bool:
    nvml = inputs.obs.nvml.value if isinstance(inputs.obs.nvml, Known) else None
    gpu = nvml.gpus.get(address) if nvml else None
    return isinstance(gpu, Known) and gpu.value.persistence_mode == Known(value=False)


def law_2(inputs: Inputs, action: Action) -> list[str]:
    """An unbind that did not return is never written a second time, and the device is written to no more."""
    return [
        f"writes to {address}, which is out of reach: an unbind has not returned, or the device is lost"
        for address in sorted({*_devices(action), *_moves(action)})
        if _on_devices(action) and is_out_of_reach(address, inputs)
    ]


def law_3(inputs: Inputs, action: Action) -> list[str]:
    """Never touch a device the spec does not name, nor split a slot or an IOMMU group between drivers.

    A service that starts uses its GPUs: the spec must name them, and for this service.
    """
    if action.kind == "service" and action.verb in {"trial", "prove"}:
        return _foreign_gpus(inputs, action)
    if not _on_devices(action):
        return []
    slots = resolve(inputs).slots
    named = {f.address: s.driver for s in slots for f in s.functions}
    touched = sorted({*_devices(action), *_moves(action)})
    broken = [f"touches {d}, which the spec does not name" for d in touched if d not in named]
    broken += _left_out(inputs, action, touched)
    moves = dict(_bindings(action))
    for address, driver in moves.items():
        wanted = named.get(address, driver)
        if (driver == "vfio-pci") != (wanted == "vfio-pci"):
            broken.append(f"binds {address} to {driver or 'no driver'}, and its group has {wanted}")
        broken += _splits(inputs, address, moves, named)
    return broken


def _left_out(inputs: Inputs, action: Action, touched: list[str]) -> list[str]:
    """Whoever is in a group whose type changes is touched, whether the action says so or not."""
    if action.verb != GROUP_TYPE or not isinstance(inputs.obs.pci, Known):
        return []
    pci, number = inputs.obs.pci.value, action.params["group"]
    group = next((g for g in pci.groups.values() if str(g.number) == number), None)
    if group is None:
        return [f"changes IOMMU group {number}, which is not seen"]
    members = [m for m in group.members if m not in pci.functions or not pci.functions[m].is_bridge]
    return [f"changes the group of {m} and does not say so" for m in members if m not in touched]


def _foreign_gpus(inputs: Inputs, action: Action) -> list[str]:
    """Judged by what would be executed, and by what the action says of itself."""
    service = resolve(inputs).services.get(action.target)
    revision = service.effective if service else None
    named = service.gpus if service else ()
    foreign = {*_devices(action), *(revision.gpus if revision else ())}.difference(named)
    return [f"starts {action.target} on {d}, which the spec does not name for it" for d in sorted(foreign)]


def _splits(inputs: Inputs, address: str, moves: Mapping[str, str], named: Mapping[str, str]) -> list[str]:
    """Members of the slot and of the IOMMU group that would stay on the other side of vfio-pci.

    A slot moves in one action. Other cards of the group may follow in actions of their own, when the spec wants that.
    """
    pci = inputs.obs.pci.value if isinstance(inputs.obs.pci, Known) else None
    function = pci.functions.get(address) if pci else None
    if pci is None or function is None:
        return []
    to_vfio = moves[address] == "vfio-pci"
    if not to_vfio and isinstance(function.driver, Known) and function.driver != Known("vfio-pci"):
        return []  # from one host driver to another
    group = group_of(function, pci)
    slot = [a for a, f in pci.functions.items() if f.slot_address == function.slot_address]
    left = []
    for member in dict.fromkeys([*slot, *(group.members if group else ())]):
        other = pci.functions.get(member)
        if other is None or other.is_bridge or member in moves:
            continue
        follows = member not in slot and (named.get(member) == "vfio-pci") == to_vfio and member in named
        if not follows and (other.driver == Known("vfio-pci")) != to_vfio:
            left.append(f"leaves {member}, of {address}'s slot or IOMMU group, on {say(other.driver)}")
    return left


def law_4(inputs: Inputs, action: Action) -> list[str]:
    """A service starts with P2P on only under a good verdict with a matching fingerprint for exactly its GPUs.

    Judged by what would be executed, and by what the action says of itself: not by how the planner decided.
    """
    if action.kind != "service" or action.verb not in {"trial", "prove"}:
        return []
    service = resolve(inputs).services.get(action.target)
    revision = service.effective if service else None
    if (
        revision is None
        or len(revision.gpus) < 2
        or not (action.params.get("p2p") == "on" or leaves_p2p_on(revision))
    ):
        return []
    verdict = standing(inputs.memory.verdict_for(revision.gpus), inputs.obs, revision.gpus)
    if holds(verdict, inputs.obs, revision.gpus):
        return []
    return [f"starts {action.target} with P2P on, and no good verdict holds for {', '.join(revision.gpus)}"]


def leaves_p2p_on(revision: Revision) -> bool:
    """Some consumer of P2P is not switched off: NCCL, or SGLang's own custom all-reduce."""
    env_off = all(revision.env.get(name) == value for name, value in P2P_OFF_ENV.items())
    return not (env_off and f"--{P2P_OFF_FLAG}" in revision.argv)


def law_5(inputs: Inputs, action: Action) -> list[str]:
    """Never propose iommu=pt or IOMMU off on a host whose spec has SEV-SNP: the kernel then refuses SNP."""
    if not _snp(inputs.host):
        return []
    texts = [action.description, action.undo, *action.params.values()]
    if any(proposes_untranslated(text) for text in texts):
        return ["proposes a kernel argument that makes the kernel refuse SNP"]
    if action.verb == GROUP_TYPE and action.params.get("type") not in TRANSLATED:
        return ["takes a group's DMA out of translation, which SNP forbids"]
    return []


def _law_5_refusals(plan: Plan, inputs: Inputs) -> list[Violation]:
    if not _snp(inputs.host):
        return []
    return [
        Violation(5, f"{r.kind}/{r.target}", f"advises what makes the kernel refuse SNP: {r.next_step}")
        for r in plan.refusals
        if proposes_untranslated(r.next_step)
    ]


def _snp(host: GpuHost) -> bool:
    return host.spec.platform.sev_snp == "enabled"


def law_10(inputs: Inputs, action: Action) -> list[str]:
    """No secret reaches a unit file, a log, the journal or a diff: actions carry paths of secrets, never values."""
    texts = [action.description, action.why, action.undo, *action.params.values(), *action.params]
    found = [f"carries a value for the secret {n}" for n in secrets_said(inputs, texts)]
    return found + [f"carries a value for the secret {n}" for n in secret_names(inputs) if n in action.params]


def _law_10_texts(plan: Plan, inputs: Inputs) -> list[Violation]:
    """Drift and refusals are read by people and kept in the status and the journal.

    The planner has redacted its own: what others wrote must not keep it from acting.
    """
    texts = [(f"{d.kind}/{d.target}", [d.field, d.desired, d.observed, d.why]) for d in plan.drifts]
    texts += [(f"{r.kind}/{r.target}", [r.message, r.next_step]) for r in plan.refusals]
    return [
        Violation(10, where, f"carries a value for the secret {name}")
        for where, said in texts
        for text in said
        for name in secrets_said(inputs, [text])
    ]


# Verbs of driver binding that move no driver; every other one is taken for a move.
UNMOVING = {"persistence-off", "persistence-on", "quiesce", "restore-unit", "write-rules", "mend-override"}
GROUP_TYPE = "set-group-type"
TRANSLATED = {"DMA", "DMA-FQ"}
DEVICE_KINDS = {"driver-binding", "gpu-settings", "p2p"}
ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def _on_devices(action: Action) -> bool:
    return action.kind in DEVICE_KINDS or action.verb == GROUP_TYPE


def _bindings(action: Action) -> list[tuple[str, str]]:
    return [] if action.verb in UNMOVING else sorted(_moves(action).items())


def _moves(action: Action) -> dict[str, str]:
    """Functions and drivers in the action's parameters, whether it moves them or only says where they belong."""
    if action.kind != "driver-binding":
        return {}
    return {name: value for name, value in action.params.items() if ADDRESS.fullmatch(name)}


def _devices(action: Action) -> list[str]:
    """Devices that the action says it touches; a unit that is stopped or started again touches nothing on them."""
    if action.verb in {"quiesce", "restore-unit"}:
        return []
    return [t for t in (action.target, *action.touches) if ADDRESS.fullmatch(t)]


LAWS: dict[int, Callable[[Inputs, Action], list[str]]] = {
    1: law_1,
    2: law_2,
    3: law_3,
    4: law_4,
    5: law_5,
    10: law_10,
}
