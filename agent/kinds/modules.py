"""Kernel modules that CUDA needs and that nothing loads by itself: nvidia_uvm.

Binding a GPU loads nvidia, and opening CUDA as root loads nvidia_uvm; a container may not load modules, so after a
boot its first start fails. Source: NVIDIA driver README, "nvidia-modprobe"; reported as NixOS/nixpkgs#334180.
"""

from collections.abc import Mapping
from dataclasses import replace

from agent.core.condition import Condition
from agent.core.errors import TransientError
from agent.core.fact import Known
from agent.core.inputs import Inputs
from agent.core.observation import Module
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage
from agent.core.resolve import Resolved
from agent.ports import Ports

UVM = "nvidia_uvm"


class ModulesKind:
    name = "modules"

    def _gpus(self, inputs: Inputs, resolved: Resolved) -> tuple[str, ...]:
        """GPUs of services that will need the module and do not have it; () when it is loaded or that is unknown."""
        modules = inputs.obs.platform.modules
        if not isinstance(modules, Known) or UVM in modules.value:
            return ()
        used = {gpu for service in resolved.services.values() for gpu in service.gpus}
        return tuple(s.gpu for s in resolved.slots if s.gpu in used and s.driver == "nvidia" and s.ready)

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        if not self._gpus(inputs, resolved):
            return []
        return [
            Drift(self.name, UVM, "module", "loaded", "none", "CUDA needs it, and a container cannot load it")
        ]

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        gpus = self._gpus(inputs, resolved)
        if not gpus:
            return [], []
        action = Action(
            self.name, "load", UVM, f"load {UVM}", Stage.SET, Disruption.NONE, touches=gpus,
            undo=f"modprobe -r {UVM}", why="CUDA needs it, and a container cannot load it",
        )  # fmt: skip
        return [action], []

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        modules = inputs.obs.platform.modules
        if not isinstance(modules, Known):
            return inputs
        loaded: Known[Mapping[str, Module]] = Known({**modules.value, action.target: Module(action.target)})
        return replace(inputs, obs=replace(inputs.obs, platform=replace(inputs.obs.platform, modules=loaded)))

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        if not self._gpus(inputs, resolved):
            return []
        refused = next((r for r in plan.refusals if r.kind == self.name), None)
        message = refused.message if refused else f"{UVM} is not loaded"
        step = refused.next_step if refused else f"the agent loads it; if it stays so, see: modprobe {UVM}"
        return [
            Condition(
                type="ModulesLoaded", status="False", reason="ModuleMissing", message=message, next_step=step
            )
        ]

    async def act(self, action: Action, ports: Ports) -> None:
        await ports.platform.load_module(action.target)
        modules = (await ports.platform.read()).modules
        if not isinstance(modules, Known) or action.target not in modules.value:
            raise TransientError(
                f"modprobe {action.target} came back, and the module is not loaded", reason="ReadBackFailed"
            )
