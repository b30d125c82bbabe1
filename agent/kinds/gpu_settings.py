"""GPU settings through NVML: persistence mode and power limit of GPUs on nvidia."""

from dataclasses import replace

from agent.core.condition import Condition
from agent.core.errors import TransientError
from agent.core.fact import Absent, Fact, Known, Unknown, say, value_or
from agent.core.inputs import Inputs
from agent.core.model import with_gpu
from agent.core.observation import Gpu
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage
from agent.core.resolve import Resolved
from agent.core.spec import GpuSettings
from agent.ports import Ports

Setting = tuple[str, str, Fact[str], str]  # address, name, observed, desired


class GpuSettingsKind:
    name = "gpu-settings"

    def _settings(self, inputs: Inputs, resolved: Resolved) -> list[Setting]:
        """Every declared setting of every GPU that NVML can see and that stays on nvidia."""
        found: list[Setting] = []
        for slot in resolved.slots:
            wanted = inputs.spec.gpus[slot.group].settings
            function = inputs.obs.function(slot.gpu)
            if slot.driver != "nvidia" or function is None or function.driver != Known("nvidia"):
                continue
            if slot.refusal is not None and slot.refusal.terminal:
                continue  # out of reach until a reboot: nothing may be written to it
            found += _compare(slot.gpu, wanted, _gpu(slot.gpu, inputs))
        return found

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        return [
            Drift(self.name, address, name, desired, say(observed), "the group's settings")
            for address, name, observed, desired in self._settings(inputs, resolved)
            if observed != Known(desired) and not isinstance(observed, Unknown)
        ]

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        actions: list[Action] = []
        refusals = [
            replace(slot.refusal, kind=self.name)
            for slot in resolved.slots
            if slot.refusal
            and slot.refusal.terminal
            and inputs.spec.gpus[slot.group].settings != GpuSettings()
        ]
        for address, name, observed, desired in self._settings(inputs, resolved):
            if isinstance(observed, Unknown):
                message = f"{name} of {address} cannot be read: {observed.reason}"
                refusals.append(
                    Refusal(self.name, address, "SettingUnknown", message, "wait for the next pass")
                )
            elif isinstance(observed, Absent):
                message = f"{address} does not support {name}"
                refusals.append(
                    Refusal(
                        self.name, address, "NotSupported", message, "remove it from the spec", terminal=True
                    )
                )
            elif observed != Known(desired):
                refusal = _out_of_range(address, name, desired, _gpu(address, inputs))
                if refusal is not None:
                    refusals.append(refusal)
                else:
                    actions.append(_action(address, name, observed.value, desired))
        return actions, refusals

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        if action.verb == "power-limit":
            return with_gpu(
                inputs, action.target, lambda g: replace(g, power_limit=Known(int(action.params["value"])))
            )
        return with_gpu(
            inputs,
            action.target,
            lambda g: replace(g, persistence_mode=Known(value=action.params["value"] == "on")),
        )

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        settings = self._settings(inputs, resolved)
        if not settings:
            return []
        refused = [r for r in plan.refusals if r.kind == self.name]
        if refused:
            unknown = refused[0].reason == "SettingUnknown"
            return [
                Condition(
                    type="GpuSettingsApplied", status="Unknown" if unknown else "False", reason=refused[0].reason,
                    message=refused[0].message, next_step=refused[0].next_step,
                )
            ]  # fmt: skip
        wrong = [f"{n} of {a}" for a, n, o, d in settings if o != Known(d)]
        if wrong:
            return [
                Condition(
                    type="GpuSettingsApplied", status="False", reason="Converging", message=", ".join(wrong)
                )
            ]
        message = f"{len(settings)} settings as specified"
        return [Condition(type="GpuSettingsApplied", status="True", reason="AsSpecified", message=message)]

    async def act(self, action: Action, ports: Ports) -> None:
        value = action.params["value"]
        if action.verb == "power-limit":
            await ports.nvml.set_power_limit(action.target, int(value))
        else:
            await ports.nvml.set_persistence_mode(action.target, on=value == "on")
        nvml = await ports.nvml.read()
        gpu = nvml.value.gpus.get(action.target) if isinstance(nvml, Known) else None
        found = _read(gpu.value, action.verb) if isinstance(gpu, Known) else Unknown("NVML does not show it")
        if found != Known(value):
            message = f"{action.verb} of {action.target} was set to {value} and reads back {say(found)}"
            raise TransientError(message, reason="ReadBackFailed", next_step=_why_not_kept(action.verb, gpu))


def _gpu(address: str, inputs: Inputs) -> Fact[Gpu]:
    nvml = inputs.obs.nvml
    if isinstance(nvml, Known):
        return nvml.value.gpus.get(address, Unknown("NVML does not list this GPU"))
    return Unknown(nvml.reason or "NVML was not read")


def _read(gpu: Gpu, name: str) -> Fact[str]:
    if name == "power-limit":
        fact = gpu.power_limit
        return Known(str(fact.value)) if isinstance(fact, Known) else fact
    mode = gpu.persistence_mode
    return Known("on" if mode.value else "off") if isinstance(mode, Known) else mode


def _why_not_kept(name: str, gpu: Fact[Gpu] | None) -> str:
    if name == "power-limit" and isinstance(gpu, Known) and gpu.value.persistence_mode == Known(value=False):
        return (
            "set persistenceMode: true too: without it the driver forgets the limit of a GPU that nobody uses"
        )
    return ""


def _compare(address: str, wanted: GpuSettings, gpu: Fact[Gpu]) -> list[Setting]:
    pairs: list[tuple[str, str]] = []
    if wanted.persistence_mode is not None:
        pairs.append(("persistence-mode", "on" if wanted.persistence_mode else "off"))
    if wanted.power_limit is not None:
        pairs.append(("power-limit", str(wanted.power_limit)))
    if not isinstance(gpu, Known):
        unknown = gpu if isinstance(gpu, Unknown) else Unknown("NVML does not show it")
        return [(address, name, unknown, desired) for name, desired in pairs]
    return [(address, name, _read(gpu.value, name), desired) for name, desired in pairs]


def _out_of_range(address: str, name: str, desired: str, gpu: Fact[Gpu]) -> Refusal | None:
    if name != "power-limit" or not isinstance(gpu, Known):
        return None
    low, high = value_or(gpu.value.power_limit_range, (0, 1 << 30))
    if low <= int(desired) <= high:
        return None
    message = f"power limit {desired} W of {address} is outside what the card allows, {low} to {high} W"
    return Refusal(
        "gpu-settings", address, "OutOfRange", message, "correct powerLimit in the spec", terminal=True
    )


def _action(address: str, name: str, observed: str, desired: str) -> Action:
    unit = " W" if name == "power-limit" else ""
    return Action(
        "gpu-settings", name, address, f"set {name} of {address}: {observed} -> {desired}{unit}",
        Stage.SET, Disruption.LIVE, params={"value": desired}, touches=(address,),
        undo=f"set it back to {observed}{unit}", why="the group's settings", optional=True,
    )  # fmt: skip
