"""Driver binding: every function of a selected slot on the driver that its group names.

Sources: Documentation/ABI/testing/sysfs-bus-pci (driver_override, unbind, drivers_probe), Documentation/driver-api/vfio.rst.
"""

from dataclasses import replace

from agent.core.binding import FunctionBinding, SlotBinding
from agent.core.condition import Condition
from agent.core.errors import TerminalError, TransientError
from agent.core.fact import Absent, Fact, Known, say
from agent.core.inputs import Inputs
from agent.core.model import with_function, with_gpu, with_gpus, with_memory, without_holders
from agent.core.observation import Gpu
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage
from agent.core.resolve import Resolved
from agent.ports import Ports

UNBIND_DEADLINE = 60.0  # seconds; NVIDIA's remove() either returns in a few or never
PROBE_DEADLINE = 30.0
POLL = 0.25
UDEV_RULES = "/etc/udev/rules.d/50-gpu-host-agent.rules"
MODULES = {
    "nvidia": "nvidia",
    "vfio-pci": "vfio-pci",
    "snd_hda_intel": "snd_hda_intel",
    "xhci_hcd": "xhci_pci",
}


class UnbindStuckError(TerminalError):
    """An unbind did not return: the device is out of reach until a reboot (law 2)."""

    def __init__(self, address: str, seconds: float) -> None:
        super().__init__(
            f"the unbind of {address} has not returned for {seconds:.0f} s: something in the kernel still holds it",
            reason="RebootRequired",
            next_step="reboot the host when it suits you; until then this GPU is left alone",
        )
        self.address = address


class DriverBinding:
    name = "driver-binding"

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        drifts = []
        for slot in resolved.slots:
            why = f"group {slot.group} has driver {slot.driver}"
            for function in slot.functions:
                if function.driver_wrong:
                    drifts.append(
                        self._drift(
                            function, "driver", function.desired or "not vfio-pci", function.observed, why
                        )
                    )
                elif function.override_wrong:
                    wanted = function.desired if function.desired == "vfio-pci" else "none"
                    drifts.append(
                        self._drift(function, "driver_override", str(wanted), function.override, why)
                    )
        return drifts + self._rules_drift(inputs, resolved)

    def _drift(
        self, function: FunctionBinding, field: str, desired: str, observed: Fact[str], why: str
    ) -> Drift:
        return Drift(self.name, function.address, field, desired, say(observed), why)

    def _rules_drift(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        observed = inputs.obs.host_files.get(UDEV_RULES)
        wanted = udev_rules(resolved)
        if observed is None or not resolved.slots or observed == (Known(wanted) if wanted else Absent()):
            return []
        state = "missing" if isinstance(observed, Absent) else "different"
        return [
            Drift(
                self.name,
                "host",
                "udev rules",
                "as rendered",
                state,
                "bindings must hold before the agent starts",
            )
        ]

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        actions: list[Action] = []
        refusals: list[Refusal] = []
        quiesce: set[str] = set()
        for slot in resolved.slots:
            if slot.refusal is not None:
                refusals += [slot.refusal] if slot.driver_wrong else []
                continue
            if slot.driver_wrong and _standing_services(slot, resolved):
                continue  # its service cannot be stopped now, and says why
            quiesce |= set(slot.quiesce)
            actions += self._slot_actions(slot, resolved)
        actions += [self._quiesce(unit) for unit in sorted(quiesce)]
        actions += self._restore(inputs, quiesce)
        actions += [self._rules_action(resolved)] if self._rules_drift(inputs, resolved) else []
        return actions, refusals

    def _slot_actions(self, slot: SlotBinding, resolved: Resolved) -> list[Action]:
        actions = []
        if slot.driver_wrong:
            if slot.persistence:
                actions.append(_persistence_off(slot))
            actions.append(_bind(slot, resolved))
        elif stale := [f for f in slot.functions if f.override_wrong]:
            actions.append(_mend_override(slot, stale))
        return actions

    def _quiesce(self, unit: str) -> Action:
        return Action(
            self.name, "quiesce", unit, f"stop {unit}, which holds GPUs that change drivers",
            Stage.STOP, Disruption.LIVE, touches=(unit,), hits=(unit,), undo=f"start {unit} again",
            why="policy.quiesce lets the agent stop it",
        )  # fmt: skip

    def _restore(self, inputs: Inputs, quiesce: set[str]) -> list[Action]:
        """Exactly the units that the agent stopped come back, also after a crash in between."""
        return [_restore_unit(unit) for unit in sorted(quiesce | set(inputs.memory.stopped_units))]

    def _rules_action(self, resolved: Resolved) -> Action:
        return Action(
            self.name, "write-rules", "host", f"write {UDEV_RULES}", Stage.PREPARE, Disruption.NONE,
            params={"text": udev_rules(resolved)}, undo="remove the file",
            why="the next boot must bind these GPUs right before the agent starts",
        )  # fmt: skip

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        if action.verb == "persistence-off":
            after = with_gpu(inputs, action.target, lambda g: replace(g, persistence_mode=Known(value=False)))
            holders = dict(after.obs.holders)
            fact = holders.get(action.target)
            if isinstance(fact, Known):
                holders[action.target] = Known(tuple(h for h in fact.value if h.kind != "persistence"))
            return replace(after, obs=replace(after.obs, holders=holders))
        if action.verb == "quiesce":
            after = without_holders(inputs, lambda h: h.unit == action.target)
            return with_memory(
                after, stopped_units={**inputs.memory.stopped_units, action.target: "driver change"}
            )
        if action.verb == "restore-unit":
            left = {u: w for u, w in inputs.memory.stopped_units.items() if u != action.target}
            return with_memory(inputs, stopped_units=left)
        if action.verb == "write-rules":
            text = action.params["text"]
            files = {**inputs.obs.host_files, UDEV_RULES: Known(text) if text else Absent()}
            return replace(inputs, obs=replace(inputs.obs, host_files=files))
        return _predict_functions(action, inputs)

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        if not isinstance(inputs.obs.pci, Known):
            reason = inputs.obs.pci.reason or "not there"
            return [
                Condition(
                    type="DriversBound",
                    status="Unknown",
                    reason="PciUnknown",
                    message=f"the PCI tree cannot be read: {reason}",
                )
            ]
        refused = [r for r in plan.refusals if r.kind == self.name]
        wrong = [s for s in resolved.slots if s.driver_wrong]
        if refused:
            first = refused[0]
            more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            unknown = first.reason.endswith("Unknown")
            return [
                Condition(
                    type="DriversBound", status="Unknown" if unknown and not wrong else "False", reason=first.reason,
                    message=first.message + more, next_step=first.next_step,
                )
            ]  # fmt: skip
        if wrong:
            message = ", ".join(f"{s.gpu} not yet on {s.driver}" for s in wrong)
            return [Condition(type="DriversBound", status="False", reason="Converging", message=message)]
        counts = {d: sum(s.driver == d for s in resolved.slots) for d in ("nvidia", "vfio-pci")}
        message = ", ".join(f"{n} on {d}" for d, n in counts.items() if n) or "no GPU is selected"
        return [Condition(type="DriversBound", status="True", reason="AsSpecified", message=message)]

    async def act(self, action: Action, ports: Ports) -> None:
        if action.verb in {"persistence-off", "persistence-on"}:
            await _set_persistence(action.target, ports, on=action.verb == "persistence-on")
        elif action.verb in {"quiesce", "restore-unit"}:
            await _switch_unit(action.target, ports, on=action.verb == "restore-unit")
        elif action.verb == "write-rules":
            await _write_rules(action.params["text"], ports)
        elif action.verb == "mend-override":
            for address, driver in _functions(action):
                await ports.pci.set_override(address, driver)
        else:
            await _rebind(action, ports)


def _standing_services(slot: SlotBinding, resolved: Resolved) -> list[str]:
    return [s for s in slot.services if not resolved.services[s].must_stop]


def udev_rules(resolved: Resolved) -> str:
    """Rules that set driver_override as devices appear; "" when no GPU goes to vfio-pci."""
    addresses = [f.address for s in resolved.slots if s.driver == "vfio-pci" for f in s.functions]
    if not addresses:
        return ""
    lines = ["# Written by gpu-host-agent from the spec: these functions belong to vfio-pci from boot on."]
    lines += [
        f'ACTION=="add", SUBSYSTEM=="pci", KERNEL=="{a}", ATTR{{driver_override}}="vfio-pci"'
        for a in addresses
    ]
    return "\n".join(lines) + "\n"


def _restore_unit(unit: str) -> Action:
    return Action(
        "driver-binding", "restore-unit", unit, f"start {unit} again", Stage.START, Disruption.NONE,
        touches=(unit,), why="the agent stopped it for a driver change",
    )  # fmt: skip


def _persistence_off(slot: SlotBinding) -> Action:
    return Action(
        "driver-binding", "persistence-off", slot.gpu, f"turn persistence mode of {slot.gpu} off",
        Stage.RELEASE, Disruption.LIVE, touches=(slot.gpu,), undo="turn it on again",
        why="persistence mode holds the driver, and an unbind would never return",
        revert=Action(
            "driver-binding", "persistence-on", slot.gpu, f"turn persistence mode of {slot.gpu} on again",
            Stage.SET, Disruption.LIVE, touches=(slot.gpu,), why="the driver change did not happen",
        ),
    )  # fmt: skip


def _bind(slot: SlotBinding, resolved: Resolved) -> Action:
    moving = [f for f in slot.functions if f.driver_wrong]
    steps = ", ".join(f"{f.address} {say(f.observed)} -> {f.desired or 'host driver'}" for f in moving)
    hits = tuple(
        f"service {name}" for name, s in resolved.services.items() if slot.gpu in s.gpus and s.running
    )
    return Action(
        "driver-binding", "bind", slot.gpu, f"bind {steps}", Stage.BIND, Disruption.REBIND,
        params=_encode([(f.address, f.desired or "") for f in moving]),
        touches=tuple(f.address for f in slot.functions), hits=hits,
        undo="bind " + ", ".join(f"{f.address} to {say(f.observed)}" for f in moving),
        why=f"group {slot.group} has driver {slot.driver}",
    )  # fmt: skip


def _mend_override(slot: SlotBinding, stale: list[FunctionBinding]) -> Action:
    wanted = [(f.address, "vfio-pci" if f.desired == "vfio-pci" else "") for f in stale]
    return Action(
        "driver-binding", "mend-override", slot.gpu,
        "set driver_override: " + ", ".join(f"{a} -> {d or 'none'}" for a, d in wanted),
        Stage.PREPARE, Disruption.NONE, params=_encode(wanted), touches=tuple(a for a, _ in wanted),
        why="a stale override would bind the wrong driver at the next probe",
    )  # fmt: skip


def _encode(pairs: list[tuple[str, str]]) -> dict[str, str]:
    return dict(pairs)


def _functions(action: Action) -> list[tuple[str, str]]:
    return sorted(action.params.items())


def _predict_functions(action: Action, inputs: Inputs) -> Inputs:
    for address, driver in _functions(action):
        override: Fact[str] = Known("vfio-pci") if driver == "vfio-pci" else Absent()
        function = inputs.obs.function(address)
        if function is None:
            continue
        bound: Fact[str] = Known(driver) if driver else Absent()
        driver_now = function.driver if action.verb == "mend-override" else bound
        inputs = with_function(inputs, replace(function, driver=driver_now, driver_override=override))
    return inputs if action.verb == "mend-override" else _predict_nvml(action, inputs)


def _predict_nvml(action: Action, inputs: Inputs) -> Inputs:
    """GPUs on nvidia are in NVML's sight, and only those."""
    seen = dict(inputs.obs.nvml.value.gpus) if isinstance(inputs.obs.nvml, Known) else {}
    for address, driver in _functions(action):
        function = inputs.obs.function(address)
        if function is None or not function.is_gpu:
            continue
        seen.pop(address, None)
        if driver == "nvidia":
            uuid: Fact[str] = (
                Known(i.uuid)
                if (i := inputs.memory.identities.get(address)) and i.uuid
                else Known(f"GPU-{address}")
            )
            off, idle = Known(value=False), Known(0)
            seen[address] = Known(
                Gpu(address, 0, Absent(), uuid, Absent(), persistence_mode=off, utilization=idle)
            )
    return with_gpus(inputs, seen)


async def _set_persistence(address: str, ports: Ports, *, on: bool) -> None:
    await ports.nvml.set_persistence_mode(address, on=on)
    nvml = await ports.nvml.read()
    gpu = nvml.value.gpus.get(address) if isinstance(nvml, Known) else None
    if not isinstance(gpu, Known) or gpu.value.persistence_mode != Known(on):
        raise TransientError(f"persistence mode of {address} reads back unchanged", reason="ReadBackFailed")


async def _switch_unit(unit: str, ports: Ports, *, on: bool) -> None:
    host = ports.targets("host")
    await (host.start_unit(unit) if on else host.stop_unit(unit))
    wanted = {"active"} if on else {"inactive", "failed"}
    deadline = ports.clock.monotonic() + 60.0
    while (await host.unit(unit)).active_state not in wanted:
        if ports.clock.monotonic() > deadline:
            raise TransientError(
                f"{unit} did not {'start' if on else 'stop'} within 60 s", reason="UnitStuck"
            )
        await ports.clock.sleep(POLL)


async def _write_rules(text: str, ports: Ports) -> None:
    host = ports.targets("host")
    await (host.write_file(UDEV_RULES, text) if text else host.remove_file(UDEV_RULES))
    if (await host.read_file(UDEV_RULES) or "") != text:
        raise TransientError(
            f"{UDEV_RULES} reads back different from what was written", reason="ReadBackFailed"
        )


async def _rebind(action: Action, ports: Ports) -> None:
    """Override first, unbind, probe, read back: function by function; what fails goes back where it was."""
    await _assert_free([a for a, _ in _functions(action)], ports)
    for address, driver in _functions(action):
        before = await ports.pci.read_driver(address)
        if before != Known(driver):
            await _move(address, before, driver, ports)


async def _assert_free(addresses: list[str], ports: Ports) -> None:
    """Law 1 once more, at the last moment: what was free when the plan was made may be held now."""
    holders = await ports.holders.read(addresses)
    for address in addresses:
        fact = holders.get(address)
        if not isinstance(fact, Known):
            raise TransientError(f"who holds {address} cannot be told any more", reason="HoldersUnknown")
        if fact.value:
            raise TransientError(f"{address}: {fact.value[0].describe()}", reason="Held")


async def _move(address: str, before: Fact[str], wanted: str, ports: Ports) -> None:
    if wanted:
        await ports.platform.load_module(MODULES.get(wanted, wanted))
    await ports.pci.set_override(address, wanted)
    try:
        if isinstance(before, Known):
            await _unbind(address, before.value, ports)
        await _probe(address, wanted, ports)
    except UnbindStuckError:
        await ports.pci.set_override(address, "")
        raise
    except (TransientError, OSError):
        await _give_up(address, before, ports)
        raise
    if wanted != "vfio-pci":
        await ports.pci.set_override(address, "")


async def _unbind(address: str, driver: str, ports: Ports) -> None:
    await ports.pci.start_unbind(address, driver)
    deadline = ports.clock.monotonic() + UNBIND_DEADLINE
    while (state := await ports.pci.unbind_state(address)) == "running":
        if ports.clock.monotonic() > deadline:
            raise UnbindStuckError(address, UNBIND_DEADLINE)
        await ports.clock.sleep(POLL)
    if state.startswith("failed"):
        raise TransientError(f"unbinding {address} from {driver} failed: {state}", reason="UnbindFailed")
    if isinstance(await ports.pci.read_driver(address), Known):
        raise TransientError(f"{address} is still on a driver after its unbind", reason="ReadBackFailed")


async def _probe(address: str, wanted: str, ports: Ports) -> None:
    """drivers_probe succeeds also when nothing was bound: only the driver link tells (law 6)."""
    if not wanted:
        return
    await ports.pci.probe(address)
    deadline = ports.clock.monotonic() + PROBE_DEADLINE
    while (found := await ports.pci.read_driver(address)) != Known(wanted):
        if ports.clock.monotonic() > deadline:
            message = f"{address} was probed for {wanted}, and its driver is {say(found)}"
            raise TransientError(
                message, reason="BindFailed", next_step="see the kernel log for the driver's own error"
            )
        await ports.clock.sleep(POLL)


async def _give_up(address: str, before: Fact[str], ports: Ports) -> None:
    """Put the function back on the driver it had, and leave no override behind."""
    await ports.pci.set_override(address, before.value if isinstance(before, Known) else "")
    if isinstance(before, Known) and await ports.pci.read_driver(address) != before:
        await ports.pci.probe(address)
    if before != Known("vfio-pci"):
        await ports.pci.set_override(address, "")
