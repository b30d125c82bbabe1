"""GPU settings through NVML of GPUs on nvidia: which differ, what stands in the way, set and read back."""

import errno
from dataclasses import dataclass, replace

from agent.core.condition import Condition
from agent.core.errors import TerminalError, TransientError
from agent.core.fact import Absent, Fact, Known, Unknown, say
from agent.core.inputs import Inputs
from agent.core.model import with_gpu
from agent.core.observation import NOT_TOLD, Gpu
from agent.core.plan import Action, Drift, Plan, Refusal, Stage
from agent.core.resolve import Resolved
from agent.core.spec import GpuSettings
from agent.kinds.gpu_setting import SETTINGS, Obstacle, Setting
from agent.ports import Ports

KIND = "gpu-settings"
_NOT_KEPT = "set persistenceMode: true too: without it the driver forgets the {} of a GPU that nobody uses"
_NEVER = {errno.EOPNOTSUPP, errno.ENOSYS}  # the card, or the driver, does not have this setting


@dataclass(frozen=True, slots=True)
class Wish:
    """One declared setting of one GPU, and what of it was accepted and works."""

    address: str
    setting: Setting
    value: str
    gpu: Fact[Gpu]

    @property
    def accepted(self) -> Fact[str]:
        return self.setting.read(self.gpu.value) if isinstance(self.gpu, Known) else self.gpu

    @property
    def works(self) -> Fact[str]:
        works = self.setting.works
        return works(self.gpu.value) if works is not None and isinstance(self.gpu, Known) else self.accepted

    @property
    def unknown(self) -> Unknown | None:
        """What bars a decision. A setting that nothing reads back is set instead."""
        for fact in (self.accepted, self.works):
            if isinstance(fact, Unknown) and fact.code != NOT_TOLD:
                return fact
        return None

    @property
    def to_set(self) -> bool:
        return self.unknown is None and self.accepted != Known(self.value)

    @property
    def met(self) -> bool:
        return self.accepted == self.works == Known(self.value)


class GpuSettingsKind:
    name = KIND

    def _wishes(self, inputs: Inputs, resolved: Resolved) -> list[Wish]:
        """Every declared setting of every GPU that NVML can see and that stays on nvidia."""
        found: list[Wish] = []
        for slot in resolved.slots:
            wanted = inputs.spec.gpus[slot.group].settings
            function = inputs.obs.function(slot.gpu)
            if slot.driver != "nvidia" or function is None or function.driver != Known("nvidia"):
                continue
            if slot.refusal is not None and slot.refusal.terminal:
                continue  # out of reach until a reboot: nothing may be written to it
            gpu = _gpu(slot.gpu, inputs)
            found += [
                Wish(slot.gpu, s, value, gpu) for s in SETTINGS if (value := s.wanted(wanted)) is not None
            ]
        return found

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        return [
            Drift(self.name, w.address, w.setting.name, w.value, _now(w), "the group's settings")
            for w in self._wishes(inputs, resolved)
            if w.unknown is None and not w.met
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
        for wish in self._wishes(inputs, resolved):
            obstacle = _obstacle(wish, inputs)
            if obstacle is not None:
                refusals.append(
                    Refusal(
                        self.name, wish.address, obstacle.reason, obstacle.message, obstacle.next_step,
                        terminal=obstacle.terminal,
                    )
                )  # fmt: skip
            elif wish.to_set:
                actions.append(_action(wish))
        return actions, refusals

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        setting, value = _setting(action.verb), action.params["value"]
        return with_gpu(inputs, action.target, lambda gpu: setting.predict(gpu, value))

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        wishes = self._wishes(inputs, resolved)
        if not wishes:
            return []
        refused = [r for r in plan.refusals if r.kind == self.name]
        if refused:
            unknown = refused[0].reason.endswith("Unknown")
            return [
                Condition(
                    type="GpuSettingsApplied", status="Unknown" if unknown else "False", reason=refused[0].reason,
                    message=refused[0].message, next_step=refused[0].next_step,
                )
            ]  # fmt: skip
        wrong = [f"{w.setting.name} of {w.address}" for w in wishes if not w.met]
        if wrong:
            return [
                Condition(
                    type="GpuSettingsApplied", status="False", reason="Converging", message=", ".join(wrong)
                )
            ]
        message = f"{len(wishes)} settings as specified"
        return [Condition(type="GpuSettingsApplied", status="True", reason="AsSpecified", message=message)]

    async def act(self, action: Action, ports: Ports) -> None:
        setting, value = _setting(action.verb), action.params["value"]
        try:
            await ports.nvml.set(action.target, setting.name, value)
        except OSError as error:
            if error.errno in _NEVER:
                message = f"{action.target} cannot have {setting.name} set: {error}"
                step = "remove it from the spec, or install a driver that has it"
                raise TerminalError(message, reason="NotSupported", next_step=step) from error
            raise
        nvml = await ports.nvml.read()
        gpu = nvml.value.gpus.get(action.target) if isinstance(nvml, Known) else None
        found = setting.read(gpu.value) if isinstance(gpu, Known) else Unknown("NVML does not show it")
        if found != Known(value):
            message = f"{setting.name} of {action.target} was set to {value} and reads back {say(found)}"
            raise TransientError(message, reason="ReadBackFailed", next_step=_why_not_kept(setting, gpu))


def _setting(name: str) -> Setting:
    return next(setting for setting in SETTINGS if setting.name == name)


def _gpu(address: str, inputs: Inputs) -> Fact[Gpu]:
    nvml = inputs.obs.nvml
    if not isinstance(nvml, Known):
        return Unknown(nvml.reason or "NVML was not read")
    gpu = nvml.value.gpus.get(address, Unknown("NVML does not list this GPU"))
    return Unknown("NVML does not show it") if isinstance(gpu, Absent) else gpu


def _now(wish: Wish) -> str:
    if wish.works != wish.accepted and isinstance(wish.works, Known):
        return f"{wish.works.value}, {say(wish.accepted)} after a reset"
    return say(wish.accepted)


def _obstacle(wish: Wish, inputs: Inputs) -> Obstacle | None:
    address, name = wish.address, wish.setting.name
    if wish.unknown is not None:
        message = f"{name} of {address} cannot be read: {wish.unknown.reason}"
        return Obstacle("SettingUnknown", message, "wait for the next pass")
    if isinstance(wish.accepted, Absent):
        message = f"{address} does not support {name}"
        return Obstacle("NotSupported", message, "remove it from the spec", terminal=True)
    if wish.to_set:
        return (
            wish.setting.obstacle(address, wish.value, wish.gpu.value, inputs)
            if isinstance(wish.gpu, Known)
            else None
        )
    if not wish.met:
        message = f"{name} of {address} will be {wish.value} after the next reset of the GPU; until then it is {say(wish.works)}"
        step = (
            f"when it suits you, stop what uses the GPU and run nvidia-smi --gpu-reset -i {address};"
            " or reboot the host"
        )
        return Obstacle("ResetPending", message, step, terminal=True)
    return None


def _why_not_kept(setting: Setting, gpu: Fact[Gpu] | None) -> str:
    forgets = isinstance(gpu, Known) and gpu.value.persistence_mode == Known(value=False)
    return _NOT_KEPT.format(setting.needs_persistence) if setting.needs_persistence and forgets else ""


def _action(wish: Wish) -> Action:
    name, address, unit = wish.setting.name, wish.address, wish.setting.unit
    before = wish.accepted.value if isinstance(wish.accepted, Known) else "not known"
    undo = f"set it back to {before}{unit}" if isinstance(wish.accepted, Known) else "set it to unlocked"
    return Action(
        KIND, name, address, f"set {name} of {address}: {before} -> {wish.value}{unit}{wish.setting.note}",
        Stage.SET, wish.setting.disruption, params={"value": wish.value}, touches=(address,),
        undo=undo, why="the group's settings", optional=True,
    )  # fmt: skip
