"""Platform: IOMMU mode, SEV-SNP, kernel arguments, module options, driver version.

Almost all of it changes only with a reboot, which the agent never does: it says exactly what to do and waits.
Sources: Documentation/admin-guide/kernel-parameters.txt, Documentation/ABI/testing/sysfs-kernel-iommu_groups.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from agent.core.condition import Condition
from agent.core.errors import TransientError
from agent.core.fact import Absent, Fact, Known, Unknown, say, value_or
from agent.core.gpu_health import gpu_health
from agent.core.inputs import Inputs
from agent.core.observation import Module
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage
from agent.core.preflight import driver_versions
from agent.core.resolve import Resolved
from agent.ports import Ports

MODPROBE_CONF = "/etc/modprobe.d/gpu-host-agent.conf"
WORD = re.compile(r"[A-Za-z0-9_.,:/=+-]+")
MODES = {"DMA": "translated", "DMA-FQ": "translated", "identity": "passthrough"}
SNP_REASON = "AMD-Vi: SNP: IOMMU disabled or configured in passthrough mode, SNP cannot be supported."


@dataclass(frozen=True, slots=True)
class Finding:
    """One platform property: what was found, what was wanted, and how an operator mends it."""

    field: str
    desired: str
    observed: Fact[str]
    reason: str
    next_step: str

    @property
    def wrong(self) -> bool:
        return not isinstance(self.observed, Unknown) and self.observed != Known(self.desired)


class PlatformKind:
    name = "platform"

    def findings(self, inputs: Inputs, resolved: Resolved) -> list[Finding]:
        return [
            *_iommu(inputs, resolved),
            *_sev_snp(inputs),
            *_arguments(inputs),
            *_identical_cards(inputs, resolved),
            *_driver(inputs),
            *_modules(inputs),
        ]

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        drifts = [
            Drift(self.name, "host", f.field, f.desired, say(f.observed), "platform")
            for f in self.findings(inputs, resolved)
            if f.wrong
        ]
        wanted = modprobe_conf(inputs)
        if _conf_differs(inputs):
            drifts.append(
                Drift(
                    self.name,
                    "host",
                    MODPROBE_CONF,
                    "as rendered" if wanted else "none",
                    "different",
                    "platform.modules",
                )
            )
        return drifts

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        refusals = [
            Refusal(
                self.name, f.field, f.reason, f"{f.field}: {say(f.observed)}, wanted {f.desired}", f.next_step
            )
            for f in self.findings(inputs, resolved)
            if f.wrong
        ]
        refusals += [
            Refusal(
                self.name, f.field, "NotObserved", f"{f.field}: {say(f.observed)}", "wait for the next pass"
            )
            for f in self.findings(inputs, resolved)
            if isinstance(f.observed, Unknown)
        ] + _conf_refusals(inputs)
        actions = []
        if _conf_differs(inputs):
            text = modprobe_conf(inputs)
            actions.append(
                Action(
                    self.name, "write-module-options", "host", f"{'write' if text else 'remove'} {MODPROBE_CONF}",
                    Stage.PREPARE, Disruption.NONE, params={"text": text}, undo="put back what was there",
                    why="module options must hold when the modules are next loaded", optional=True,
                )
            )  # fmt: skip
        return actions, refusals

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        text = action.params["text"]
        files = {**inputs.obs.host_files, MODPROBE_CONF: Known(text) if text else Absent()}
        return replace(inputs, obs=replace(inputs.obs, host_files=files))

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        findings = self.findings(inputs, resolved)
        wrong = [f for f in findings if f.wrong]
        unknown = [f for f in findings if isinstance(f.observed, Unknown)]
        conditions = [_summary(wrong, unknown, len(findings))]
        return [*conditions, *_driver_conditions(inputs), *_kernel_conditions(inputs, resolved)]

    async def act(self, action: Action, ports: Ports) -> None:
        host, text = ports.targets("host"), action.params["text"]
        await (host.write_file(MODPROBE_CONF, text) if text else host.remove_file(MODPROBE_CONF))
        if (await host.read_file(MODPROBE_CONF) or "") != text:
            raise TransientError(
                f"{MODPROBE_CONF} reads back different from what was written", reason="ReadBackFailed"
            )


def _summary(wrong: list[Finding], unknown: list[Finding], count: int) -> Condition:
    if wrong:
        first = wrong[0]
        message = "; ".join(f"{f.field} is {say(f.observed)}, wanted {f.desired}" for f in wrong)
        return Condition(
            type="PlatformReady",
            status="False",
            reason=first.reason,
            message=message,
            next_step=first.next_step,
        )
    if unknown:
        message = "; ".join(f"{f.field}: {say(f.observed)}" for f in unknown)
        return Condition(type="PlatformReady", status="Unknown", reason="NotObserved", message=message)
    return Condition(
        type="PlatformReady", status="True", reason="AsSpecified", message=f"{count} properties as specified"
    )


def iommu_mode(inputs: Inputs, resolved: Resolved) -> Fact[str]:
    """What the IOMMU does with the selected GPUs' DMA: the groups' types, never the command line."""
    if not isinstance(inputs.obs.pci, Known):
        return Unknown(inputs.obs.pci.reason or "the PCI tree was not read")
    pci = inputs.obs.pci.value
    modes: set[str] = set()
    for slot in resolved.slots:
        function = pci.functions[slot.gpu]
        if isinstance(function.iommu_group, Unknown):
            return Unknown(f"the IOMMU group of {slot.gpu} cannot be read: {function.iommu_group.reason}")
        group = (
            pci.groups.get(function.iommu_group.value) if isinstance(function.iommu_group, Known) else None
        )
        if group is not None and isinstance(group.type, Unknown):
            return Unknown(f"the type of IOMMU group {group.number} cannot be read: {group.type.reason}")
        modes.add(MODES.get(value_or(group.type, ""), "unheard of") if group is not None else "off")
    if not modes:
        return Unknown("no GPU is selected")
    return Known(modes.pop()) if len(modes) == 1 else Known("mixed: " + ", ".join(sorted(modes)))


def _iommu(inputs: Inputs, resolved: Resolved) -> list[Finding]:
    wanted = inputs.spec.platform.iommu
    if wanted == "any":
        return []
    steps = {
        "translated": "remove iommu=pt, amd_iommu=off and iommu=off from the kernel command line and reboot",
        "passthrough": "put iommu=pt on the kernel command line and reboot",
        "off": "put amd_iommu=off (AMD) or intel_iommu=off (Intel) on the kernel command line and reboot",
    }
    return [Finding("iommu", wanted, iommu_mode(inputs, resolved), "IommuMode", steps[wanted])]


def _sev_snp(inputs: Inputs) -> list[Finding]:
    wanted = inputs.spec.platform.sev_snp
    if wanted == "any":
        return []
    fact = inputs.obs.platform.sev_snp
    observed: Fact[str] = (
        fact if not isinstance(fact, Known) else Known("enabled" if fact.value else "disabled")
    )
    if isinstance(observed, Absent):
        observed = Known("disabled")
    step = (
        "remove iommu=pt, amd_iommu=off and iommu=off from the kernel command line, enable SNP in the firmware, and reboot"
        if wanted == "enabled"
        else "put kvm_amd.sev_snp=0 on the kernel command line and reboot"
    )
    return [Finding("sevSnp", wanted, observed, "SevSnp", step)]


def _arguments(inputs: Inputs) -> list[Finding]:
    wanted, cmdline = inputs.spec.platform.kernel_args, inputs.obs.platform.cmdline
    if not isinstance(cmdline, Known):
        reason = cmdline.reason or "it was not read"
        none = Unknown(f"the kernel command line cannot be read: {reason}")
        return (
            [Finding("kernelArgs", "as specified", none, "KernelArgs", "")]
            if wanted.require or wanted.forbid
            else []
        )
    words = cmdline.value
    findings = [
        Finding(f"kernelArgs {a}", "present", Known("present" if a in words else "absent"), "KernelArgs",
                f"put {a} on the kernel command line and reboot")
        for a in wanted.require
    ]  # fmt: skip
    for pattern in wanted.forbid:
        found = [w for w in words if fnmatchcase(w, pattern)]
        observed = Known(" ".join(found) or "absent")
        step = f"remove {' '.join(found) or pattern} from the kernel command line and reboot"
        findings.append(Finding(f"kernelArgs {pattern}", "absent", observed, "KernelArgs", step))
    return findings


def _identical_cards(inputs: Inputs, resolved: Resolved) -> list[Finding]:
    """ids= takes every identical card, also those that the spec keeps on nvidia."""
    pci = inputs.obs.pci.value if isinstance(inputs.obs.pci, Known) else None
    kept = {f.address for s in resolved.slots if s.driver == "nvidia" for f in s.functions} if pci else set()
    ours = (
        {f"{f.vendor_id:04x}:{f.device_id:04x}" for a, f in pci.functions.items() if a in kept}
        if pci
        else set()
    )
    words = value_or(inputs.obs.platform.cmdline, ())
    options = value_or(inputs.obs.platform.module_options, ())
    found = [text for text in (*words, *options) if _vfio_ids(text) & ours]
    if not found:
        return []
    step = f"remove {found[0]!r}: the agent's udev rules bind by address, and reboot"
    return [Finding("vfio-pci ids", "none", Known("; ".join(found)), "IdenticalCards", step)]


VFIO_IDS = re.compile(r"(?:^vfio[-_]pci\.|^options vfio[-_]pci .*\b)ids=(\S+)")


def _vfio_ids(text: str) -> set[str]:
    """vendor:device of every id given to vfio-pci, on the command line or in modprobe.d; dashes are underscores there."""
    match = VFIO_IDS.search(text)
    given = match[1].strip('"').lower().split(",") if match else []
    return {":".join(word.split(":")[:2]) for word in given}


def _driver(inputs: Inputs) -> list[Finding]:
    wanted = inputs.spec.platform.nvidia_driver
    needed = any(g.driver == "nvidia" for g in inputs.spec.gpus.values())
    if wanted is None or not needed:
        return []
    step = f"install NVIDIA driver {wanted} on the host and in every target"
    return [Finding("nvidiaDriver", wanted, inputs.obs.platform.nvidia_driver, "DriverVersion", step)]


def _modules(inputs: Inputs) -> list[Finding]:
    modules = inputs.obs.platform.modules
    findings = []
    for name, options in inputs.spec.platform.modules.items():
        for parameter, value in options.items():
            observed = _parameter(modules, name, parameter)
            if isinstance(observed, Absent):
                continue  # not loaded: the file that the agent writes decides when it is
            step = f"unload and load {name}, or reboot: {MODPROBE_CONF} has the option"
            findings.append(
                Finding(
                    f"{name}.{parameter}",
                    _module_value(str(value), observed),
                    observed,
                    "ModuleOptions",
                    step,
                )
            )
    return findings


def _parameter(modules: Fact[Mapping[str, Module]], name: str, parameter: str) -> Fact[str]:
    if not isinstance(modules, Known):
        return Unknown(modules.reason or "modules were not read")
    module = modules.value.get(name.replace("-", "_"))  # the kernel's own spelling
    if module is None:
        return Absent("not loaded")
    found = module.parameters.get(parameter.replace("-", "_"))
    return Known(found) if found is not None else Unknown(f"{name} shows no parameter {parameter}")


def _module_value(wanted: str, observed: Fact[str]) -> str:
    """Boolean parameters read back as Y and N whatever was written."""
    if observed in (Known("Y"), Known("N")):
        return {"1": "Y", "0": "N", "y": "Y", "n": "N"}.get(wanted, wanted)
    return wanted


def modprobe_conf(inputs: Inputs) -> str:
    modules = inputs.spec.platform.modules
    if not modules:
        return ""
    lines = ["# Written by gpu-host-agent from the spec; edits here are drift and will be taken back."]
    lines += [
        f"options {m} " + " ".join(f"{k}={v}" for k, v in sorted(o.items()))
        for m, o in sorted(modules.items())
    ]
    return "\n".join(lines) + "\n"


def _conf_differs(inputs: Inputs) -> bool:
    observed = inputs.obs.host_files.get(MODPROBE_CONF)
    wanted = modprobe_conf(inputs)
    if not isinstance(observed, Known | Absent) or _unwritable(inputs):
        return False
    return value_or(observed, "") != wanted or (not wanted and isinstance(observed, Known))


def _unwritable(inputs: Inputs) -> list[str]:
    """Names and values that would not be one word of modprobe.d: a newline in one could run a command as root."""
    words = [w for m, o in inputs.spec.platform.modules.items() for w in (m, *o, *map(str, o.values()))]
    return [w for w in words if not WORD.fullmatch(w)]


def _conf_refusals(inputs: Inputs) -> list[Refusal]:
    if bad := _unwritable(inputs):
        message = f"{bad[0][:40]!r} cannot be written to {MODPROBE_CONF}"
        step = "give modules, parameters and values in platform.modules as single words"
        return [Refusal("platform", "host", "NotRenderable", message, step, terminal=True)]
    observed = inputs.obs.host_files.get(MODPROBE_CONF)
    if isinstance(observed, Unknown):
        message = f"{MODPROBE_CONF} cannot be read: {observed.reason}"
        return [Refusal("platform", "host", "NotObserved", message, "wait for the next pass")]
    return []


def _driver_conditions(inputs: Inputs) -> list[Condition]:
    """One NVIDIA driver version everywhere: the kernel module's and the user space's of every target; and NVML works."""
    targets = sorted(inputs.obs.targets.items())
    if not targets:
        return []
    differ = {place: d for place, facts in targets if (d := driver_versions(facts, inputs)) is not None}
    lost = {
        place: facts.nvml.reason
        for place, facts in targets
        if place != "host" and isinstance(facts.nvml, Unknown) and facts.nvml.code.startswith("Nvml")
    }
    if isinstance(inputs.obs.nvml, Unknown) and inputs.obs.nvml.code.startswith("Nvml"):
        lost["host"] = inputs.obs.nvml.reason
    if differ or lost:
        return [_drivers_disagree(differ, lost)]
    version = inputs.obs.platform.nvidia_driver
    seen = all(isinstance(f.user_driver, Known) for _, f in targets) and isinstance(version, Known)
    if seen and not isinstance(inputs.obs.nvml, Unknown):
        message = f"{say(version)} everywhere"
        return [Condition(type="DriverVersionsAgree", status="True", reason="Agree", message=message)]
    message = "not every place shows its driver version" if not seen else f"NVML: {say(inputs.obs.nvml)}"
    return [Condition(type="DriverVersionsAgree", status="Unknown", reason="NotObserved", message=message)]


def _drivers_disagree(differ: Mapping[str, tuple[str, str]], lost: Mapping[str, str]) -> Condition:
    parts = [f"user space {u} {_where(p)}, kernel module {k} on the host" for p, (u, k) in differ.items()]
    parts += [f"NVML fails {_where(place)}: {reason}" for place, reason in lost.items()]
    if differ:
        places = " and ".join(_where(p) for p in differ)
        step = f"install user-space driver {next(iter(differ.values()))[1]} {places}"
    elif "host" in lost:
        step = "look at nvidia-smi and the kernel log on the host; reload the driver, or reboot"
    else:
        step = f"restart {' and '.join(lost)} so that it gets its devices back"
    return Condition(
        type="DriverVersionsAgree", status="False", reason="DriverMismatch" if differ else "NvmlFails",
        message="; ".join(parts), next_step=step,
    )  # fmt: skip


def _where(place: str) -> str:
    return "on the host" if place == "host" else f"in {place}"


def _kernel_conditions(inputs: Inputs, resolved: Resolved) -> list[Condition]:
    """Health of the selected GPUs by the kernel's own words and NVML's recovery action."""
    events = value_or(inputs.obs.kernel_events, ())
    refused = []
    if inputs.spec.platform.sev_snp == "enabled" and any(e.sort == "snp-refused" for e in events):
        step = "remove iommu=pt, amd_iommu=off and iommu=off from the kernel command line and reboot"
        refused = [
            Condition(
                type="SnpPossible", status="False", reason="SnpRefused", message=SNP_REASON, next_step=step
            )
        ]
    health = gpu_health(inputs, resolved)
    if health.status == "True" and isinstance(inputs.obs.kernel_events, Unknown):
        message = f"the kernel log cannot be read: {inputs.obs.kernel_events.reason}"
        health = Condition(type="GpusHealthy", status="Unknown", reason="KernelLogUnknown", message=message)
    return [*refused, health]
