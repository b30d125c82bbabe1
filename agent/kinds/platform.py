"""Platform: IOMMU mode, SEV-SNP, kernel arguments, module options, driver version.

Almost all of it changes only with a reboot, which the agent never does: it says exactly what to do and waits.
"""

from dataclasses import replace

from agent.core.condition import Condition
from agent.core.errors import TerminalError
from agent.core.fact import Absent, Known, Unknown, say
from agent.core.inputs import Inputs
from agent.core.plan import Action, Drift, Plan, Refusal
from agent.core.resolve import Resolved
from agent.core.spec import Spec
from agent.kinds.boot_files import VERB as EDIT
from agent.kinds.boot_files import (
    boot_files,
    edit_actions,
    edit_boot_files,
    edit_drift,
    edit_refusals,
    predict_edit,
)
from agent.kinds.group_types import VERB as SET_TYPE
from agent.kinds.group_types import group_actions, predict_group, set_group_type
from agent.kinds.module_options import (
    MODPROBE_CONF,
    option_actions,
    option_drift,
    option_refusals,
    write_options,
)
from agent.kinds.platform_conditions import (
    boot_conditions,
    driver_conditions,
    kernel_conditions,
    platform_ready,
)
from agent.kinds.platform_finding import Finding
from agent.kinds.platform_findings import findings_of
from agent.ports import Ports


def platform_files(spec: Spec) -> tuple[str, ...]:
    """Files of the host that this kind decides by, besides the platform port's facts."""
    return (MODPROBE_CONF, *boot_files(spec))


class PlatformKind:
    name = "platform"

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        drifts = [
            Drift(self.name, "host", f.field, f.desired, say(f.observed), "platform")
            for f in findings_of(inputs, resolved)
            if f.wrong
        ]
        return [*drifts, *option_drift(inputs), *edit_drift(inputs)]

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        findings = findings_of(inputs, resolved)
        refusals = [self._refusal(f) for f in findings if f.wrong and not f.mended]
        refusals += [
            Refusal(
                self.name, f.field, "NotObserved", f"{f.field}: {say(f.observed)}", "wait for the next pass"
            )
            for f in findings
            if isinstance(f.observed, Unknown)
        ]
        refusals += [*option_refusals(inputs), *edit_refusals(inputs)]
        actions = [*option_actions(inputs), *edit_actions(inputs), *group_actions(inputs, resolved)]
        return actions, refusals

    def _refusal(self, finding: Finding) -> Refusal:
        message = f"{finding.field}: {say(finding.observed)}, wanted {finding.desired}"
        return Refusal(self.name, finding.field, finding.reason, message, finding.next_step)

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        if action.verb == EDIT:
            return predict_edit(action, inputs)
        if action.verb == SET_TYPE:
            return predict_group(action, inputs)
        text = action.params["text"]
        files = {**inputs.obs.host_files, MODPROBE_CONF: Known(text) if text else Absent()}
        return replace(inputs, obs=replace(inputs.obs, host_files=files))

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        findings = findings_of(inputs, resolved)
        wrong = [f for f in findings if f.wrong]
        unknown = [f for f in findings if isinstance(f.observed, Unknown)]
        return [
            platform_ready(wrong, unknown, len(findings)),
            *boot_conditions(inputs, resolved),
            *driver_conditions(inputs),
            *kernel_conditions(inputs, resolved),
        ]

    async def act(self, action: Action, ports: Ports) -> None:
        if action.verb == "write-module-options":
            await write_options(action.params["text"], ports)
        elif action.verb == EDIT:
            await edit_boot_files(action, ports)
        elif action.verb == SET_TYPE:
            await set_group_type(action, ports)
        else:
            raise TerminalError(f"platform knows no {action.verb}", reason="UnknownVerb")
