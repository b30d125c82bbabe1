"""Driver binding: every function of a selected slot on the driver that its group names.

Sources: Documentation/ABI/testing/sysfs-bus-pci (driver_override, unbind, drivers_probe), Documentation/driver-api/vfio.rst.
"""

from dataclasses import replace
from typing import Any

from agent.core.binding import FunctionBinding, SlotBinding
from agent.core.condition import Condition
from agent.core.errors import TerminalError
from agent.core.fact import Absent, Fact, Known, Unknown, say, value_or
from agent.core.inputs import Inputs
from agent.core.model import with_function, with_gpu, with_gpus, with_memory, without_holders
from agent.core.observation import Gpu
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage
from agent.core.resolve import Resolved
from agent.core.selection import identify
from agent.kind import must_wait
from agent.kinds.rebind import UDEV_RULES, mend_overrides, rebind, set_persistence, switch_unit, write_rules
from agent.kinds.udev_rules import udev_rules
from agent.ports import Ports


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
        unsure = any(r.reason.endswith("Unknown") for r in resolved.selection.refusals)
        if not isinstance(observed, Known | Absent) or not isinstance(inputs.obs.pci, Known) or unsure:
            return []
        if value_or(observed, "") == wanted and (wanted or isinstance(observed, Absent)):
            return []
        state = "missing" if isinstance(observed, Absent) else "different"
        return [
            Drift(
                self.name,
                "host",
                "udev rules",
                "as rendered" if wanted else "none",
                state,
                "bindings must hold before the agent starts",
            )
        ]

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        actions: list[Action] = []
        refusals: list[Refusal] = []
        quiesce: dict[str, list[str]] = {}
        for slot in resolved.slots:
            if slot.refusal is not None:
                said = slot.wrong or slot.group_shared or slot.refusal.reason.endswith("Unknown")
                refusals += [slot.refusal] if said else []
                continue
            made = self._slot_actions(slot, resolved)
            actions += made
            for unit in slot.quiesce if not any(must_wait(action, inputs) for action in made) else ():
                quiesce.setdefault(unit, []).extend(f.address for f in slot.functions)
        actions += [self._quiesce(unit, tuple(held)) for unit, held in sorted(quiesce.items())]
        actions += self._restore(inputs, set(quiesce))
        actions += [self._rules_action(resolved)] if self._rules_drift(inputs, resolved) else []
        return actions, [*refusals, *self._unreadable(inputs)]

    def _unreadable(self, inputs: Inputs) -> list[Refusal]:
        """Where nothing can be seen, nothing to do is not the same as all well (law 9)."""
        pci: Fact[Any] = inputs.obs.pci if inputs.spec.gpus else Absent()
        rules: Fact[Any] = inputs.obs.host_files.get(UDEV_RULES, Absent())
        facts = {"PciUnknown": ("the PCI tree", pci), "RulesUnknown": (UDEV_RULES, rules)}
        return [
            Refusal(
                self.name, "host", reason, f"{what} cannot be read: {fact.reason}", "wait for the next pass"
            )
            for reason, (what, fact) in facts.items()
            if isinstance(fact, Unknown)
        ]

    def _slot_actions(self, slot: SlotBinding, resolved: Resolved) -> list[Action]:
        actions = []
        if slot.driver_wrong:
            if slot.persistence:
                actions.append(_persistence_off(slot))
            actions.append(_bind(slot, resolved))
        elif stale := [f for f in slot.functions if f.override_wrong]:
            actions.append(_mend_override(slot, stale))
        return actions

    def _quiesce(self, unit: str, held: tuple[str, ...]) -> Action:
        return Action(
            self.name, "quiesce", unit, f"stop {unit}, which holds GPUs that change drivers",
            Stage.STOP, Disruption.LIVE, touches=(unit, *held), hits=(unit,), undo=f"start {unit} again",
            why="policy.quiesce lets the agent stop it", revert=_restore_unit(unit),
        )  # fmt: skip

    def _restore(self, inputs: Inputs, quiesce: set[str]) -> list[Action]:
        """Exactly the units that the agent stopped come back, also after a crash in between."""
        return [_restore_unit(unit) for unit in sorted(quiesce | set(inputs.memory.stopped_units))]

    def _rules_action(self, resolved: Resolved) -> Action:
        text = udev_rules(resolved)
        return Action(
            self.name, "write-rules", "host", f"{'write' if text else 'remove'} {UDEV_RULES}", Stage.PREPARE,
            Disruption.NONE, params={"text": text}, undo="put back what was there" if text else "write it again",
            why="the next boot must bind these GPUs right before the agent starts" if text else "no GPU goes to vfio-pci",
            optional=True,
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
            after = without_holders(inputs, lambda h: h.unit == action.target and not h.container)
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
            await set_persistence(action.target, ports, on=action.verb == "persistence-on")
        elif action.verb in {"quiesce", "restore-unit"}:
            await switch_unit(action.target, ports, on=action.verb == "restore-unit")
        elif action.verb == "write-rules":
            await write_rules(action.params["text"], ports)
        elif action.verb == "mend-override":
            await mend_overrides(_functions(action), ports)
        elif action.verb == "bind":
            await rebind(_functions(action), ports)
        else:
            raise TerminalError(f"driver binding knows no {action.verb}", reason="UnknownVerb")


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
        why="a stale override would bind the wrong driver at the next probe", optional=True,
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
            known = identify(address, function, inputs.obs, inputs.memory.identities).uuid
            uuid: Fact[str] = Known(known or f"GPU-{address}")
            off, idle = Known(value=False), Known(0)
            seen[address] = Known(
                Gpu(address, 0, Absent(), uuid, Absent(), persistence_mode=off, utilization=idle)
            )
    return with_gpus(inputs, seen)
