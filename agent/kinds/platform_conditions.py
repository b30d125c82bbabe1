"""What is said of the platform: the summary, driver versions, the next boot's bindings, and the kernel's own words."""

import re
from collections.abc import Mapping

from agent.core.condition import Condition
from agent.core.fact import Known, Unknown, say, value_or
from agent.core.gpu_health import gpu_health
from agent.core.inputs import Inputs
from agent.core.nvidia_nodes import by_hand
from agent.core.observation import Initramfs, NvidiaNodes
from agent.core.preflight import driver_versions
from agent.core.resolve import Resolved
from agent.kinds.platform_finding import Finding

SNP_REASON = "AMD-Vi: SNP: IOMMU disabled or configured in passthrough mode, SNP cannot be supported."
UDEV_RULES = "/etc/udev/rules.d/50-gpu-host-agent.rules"
# Any of these loads nvidia, under the names that distributions give it.
_TAKER = re.compile(r"nouveau|nvidia(?:_(?:current|open|tesla(?:_\d+)?))?(?:_(?:uvm|drm|modeset|peermem))?")
TAKERS = ("nvidia", "nouveau")  # modules that claim every GPU of theirs as soon as they are loaded


def platform_ready(wrong: list[Finding], unknown: list[Finding], count: int) -> Condition:
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


def boot_conditions(inputs: Inputs, resolved: Resolved) -> list[Condition]:
    """Whether something would undo the bindings before udev reads the rules on the root file system."""
    if not any(s.driver == "vfio-pci" for s in resolved.slots):
        return []
    inside = inputs.obs.platform.initramfs
    if isinstance(inside, Known) and UDEV_RULES in inside.value.files:
        return []  # the overrides are set before the root file system is there
    takers = [m for m in TAKERS if m in inside.value.modules] if isinstance(inside, Known) else []
    if isinstance(inside, Known) and takers:
        return [_taken_early(takers, inside.value)]
    named = [(f, m) for f, m in value_or(inputs.obs.platform.modules_load, ()) if _TAKER.fullmatch(_name(m))]
    if named:
        return [_loaded_early(named)]
    return [_unlisted(inside)] if isinstance(inside, Unknown) and inside.code != "NotObserved" else []


def _name(module: str) -> str:
    return module.replace("-", "_")


def _unlisted(inside: Unknown) -> Condition:
    return Condition(
        type="BindingsHoldAtBoot", status="Unknown", reason="InitramfsUnknown",
        message=f"whether the initramfs has a driver that would take these GPUs first: {inside.reason}",
        next_step="list it by hand (lsinitramfs, lsinitrd) and look for nvidia.ko and nouveau.ko",
    )  # fmt: skip


def _loaded_early(named: list[tuple[str, str]]) -> Condition:
    """Nothing orders systemd-modules-load after udev's first event: either may come first."""
    file = named[0][0]
    names = " and ".join(dict.fromkeys(m for f, m in named if f == file))
    message = (
        f"{file} names {names}: at the next boot systemd-modules-load may load that before udev has set the overrides,"
        " and it would take the GPUs that belong to vfio-pci"
    )
    masked = f"/etc/modules-load.d/{file.rpartition('/')[2]}"
    how = f"remove {names} from {file}" if file.startswith("/etc/") else f"link {masked} to /dev/null"
    step = f"{how}: udev loads the driver for its own cards, and the agent loads nvidia_uvm where a service needs it"
    return Condition(
        type="BindingsHoldAtBoot",
        status="False",
        reason="ModulesLoadTakesGpus",
        message=message,
        next_step=step,
    )


def _taken_early(takers: list[str], inside: Initramfs) -> Condition:
    names = " and ".join(takers)
    message = (
        f"{inside.image} has {names} and not {UDEV_RULES}: at the next boot {names} would take"
        " the GPUs that belong to vfio-pci before any rule is read"
    )
    step = (
        f"keep {names} out of the initramfs (/etc/initramfs-tools/modules, dracut's omit_drivers),"
        f" then run {inside.rebuild}"
    )
    return Condition(
        type="BindingsHoldAtBoot",
        status="False",
        reason="InitramfsTakesGpus",
        message=message,
        next_step=step,
    )


def driver_conditions(inputs: Inputs) -> list[Condition]:
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
        nodes = value_or(inputs.obs.platform.nvidia_nodes, NvidiaNodes())
        return [_drivers_disagree(differ, lost, nodes)]
    version = inputs.obs.platform.nvidia_driver
    seen = all(isinstance(f.user_driver, Known) for _, f in targets) and isinstance(version, Known)
    if seen and not isinstance(inputs.obs.nvml, Unknown):
        message = f"{say(version)} everywhere"
        return [Condition(type="DriverVersionsAgree", status="True", reason="Agree", message=message)]
    message = "not every place shows its driver version" if not seen else f"NVML: {say(inputs.obs.nvml)}"
    return [Condition(type="DriverVersionsAgree", status="Unknown", reason="NotObserved", message=message)]


def _drivers_disagree(
    differ: Mapping[str, tuple[str, str]], lost: Mapping[str, str], nodes: NvidiaNodes
) -> Condition:
    parts = [f"user space {u} {_where(p)}, kernel module {k} on the host" for p, (u, k) in differ.items()]
    parts += [f"NVML fails {_where(place)}: {reason}" for place, reason in lost.items()]
    if differ:
        places = " and ".join(_where(p) for p in differ)
        step = f"install user-space driver {next(iter(differ.values()))[1]} {places}"
    elif "host" in lost and nodes.missing:
        step = by_hand(nodes)
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


def kernel_conditions(inputs: Inputs, resolved: Resolved) -> list[Condition]:
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
