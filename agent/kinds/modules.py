"""Kernel modules that CUDA needs and that nothing loads by itself: nvidia_uvm; and the device nodes of NVIDIA's modules.

Binding a GPU loads nvidia, and opening CUDA as root loads nvidia_uvm; a container may not load modules, so after a
boot its first start fails. Source: NVIDIA driver README, "nvidia-modprobe"; reported as NixOS/nixpkgs#334180.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from agent.core.condition import Condition
from agent.core.errors import TransientError
from agent.core.fact import Known, say, value_or
from agent.core.inputs import Inputs
from agent.core.nvidia_nodes import by_hand
from agent.core.observation import Module, NvidiaNodes
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage
from agent.core.resolve import Resolved
from agent.ports import Ports

UVM = "nvidia_uvm"
MAKE = "make-nodes"
_WHY_NODES = "NVML and CUDA open them, and no udev rule has made them"


class ModulesKind:
    name = "modules"

    def _gpus(self, inputs: Inputs, resolved: Resolved) -> tuple[str, ...]:
        """GPUs of services that will need the module and do not have it; () when it is loaded or that is unknown."""
        modules = inputs.obs.platform.modules
        if not isinstance(modules, Known) or UVM in modules.value:
            return ()
        used = {gpu for service in resolved.services.values() for gpu in service.gpus}
        return tuple(s.gpu for s in resolved.slots if s.gpu in used and s.driver == "nvidia" and s.ready)

    def _nodes(self, inputs: Inputs, resolved: Resolved) -> NvidiaNodes | None:
        """Nodes that are missing and can be made. Where nothing makes them NVML says what it lacks."""
        nodes = value_or(inputs.obs.platform.nvidia_nodes, NvidiaNodes())
        used = any(s.driver == "nvidia" and s.ready for s in resolved.slots)
        return nodes if used and nodes.missing and nodes.maker else None

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        drifts = []
        if self._gpus(inputs, resolved):
            why = "CUDA needs it, and a container cannot load it"
            drifts.append(Drift(self.name, UVM, "module", "loaded", "none", why))
        if nodes := self._nodes(inputs, resolved):
            missing = f"{' '.join(nodes.missing)} missing"
            drifts.append(Drift(self.name, "nvidia", "device nodes", "as loaded", missing, _WHY_NODES))
        return drifts

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        gpus, nodes = self._gpus(inputs, resolved), self._nodes(inputs, resolved)
        return [*([_load(gpus)] if gpus else []), *([_make(nodes)] if nodes else [])], []

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        platform = inputs.obs.platform
        if action.verb == MAKE:
            nodes = Known(NvidiaNodes(maker=value_or(platform.nvidia_nodes, NvidiaNodes()).maker))
            return replace(inputs, obs=replace(inputs.obs, platform=replace(platform, nvidia_nodes=nodes)))
        if not isinstance(platform.modules, Known):
            return inputs
        loaded: Known[Mapping[str, Module]] = Known(
            {**platform.modules.value, action.target: Module(action.target)}
        )
        return replace(inputs, obs=replace(inputs.obs, platform=replace(platform, modules=loaded)))

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        refused = next((r for r in plan.refusals if r.kind == self.name), None)
        if self._gpus(inputs, resolved):
            reason, message = "ModuleMissing", f"{UVM} is not loaded"
            step = f"the agent loads it; if it stays so, see: modprobe {UVM}"
        elif nodes := self._nodes(inputs, resolved):
            reason, message = "NodesMissing", f"{' '.join(nodes.missing)} missing"
            step = f"the agent has {nodes.maker} make them; if they stay so: {by_hand(nodes)}"
        else:
            return []
        message, step = (refused.message, refused.next_step) if refused else (message, step)
        return [
            Condition(type="ModulesLoaded", status="False", reason=reason, message=message, next_step=step)
        ]

    async def act(self, action: Action, ports: Ports) -> None:
        if action.verb == MAKE:
            await _make_nodes(ports)
            return
        await ports.platform.load_module(action.target)
        modules = (await ports.platform.read()).modules
        if not isinstance(modules, Known) or action.target not in modules.value:
            raise TransientError(
                f"modprobe {action.target} came back, and the module is not loaded", reason="ReadBackFailed"
            )
        with contextlib.suppress(OSError):  # it is loaded; nodes that stay missing are a drift of their own
            await ports.platform.make_device_nodes()


async def _make_nodes(ports: Ports) -> None:
    await ports.platform.make_device_nodes()
    nodes = (await ports.platform.read()).nvidia_nodes
    if not isinstance(nodes, Known) or nodes.value.missing:
        left = " ".join(nodes.value.missing) if isinstance(nodes, Known) else say(nodes)
        raise TransientError(
            f"nvidia-modprobe came back, and of the device nodes there is missing: {left}",
            reason="ReadBackFailed",
            next_step="see ModifyDeviceFiles in /proc/driver/nvidia/params: at 0 the driver leaves its nodes to others",
        )


def _load(gpus: tuple[str, ...]) -> Action:
    return Action(
        "modules", "load", UVM, f"load {UVM}", Stage.SET, Disruption.NONE, touches=gpus,
        undo=f"modprobe -r {UVM}", why="CUDA needs it, and a container cannot load it",
    )  # fmt: skip


def _make(nodes: NvidiaNodes) -> Action:
    return Action(
        "modules", MAKE, "nvidia", f"make {', '.join(nodes.missing)}", Stage.SET, Disruption.NONE,
        undo=f"rm {' '.join(nodes.missing)}", why=_WHY_NODES,
    )  # fmt: skip
