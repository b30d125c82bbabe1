"""What of the platform differs from the spec, and what an operator does about it.

Sources: Documentation/admin-guide/kernel-parameters.txt, Documentation/ABI/testing/sysfs-kernel-iommu_groups.
"""

import re

from agent.core.boot import (
    Wish,
    explicit_wishes,
    iommu_wishes,
    next_step,
    snp_wishes,
    state_of,
)
from agent.core.boot_edit import endangered
from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.core.inputs import Inputs
from agent.core.p2p_decision import SNP_REFUSAL
from agent.core.resolve import Resolved
from agent.kinds.boot_files import editing, owed
from agent.kinds.group_types import MODES, obstacle, wrong_groups
from agent.kinds.module_options import option_findings
from agent.kinds.platform_finding import Finding

REASONS = {"pending": "RebootPending", "not-kept": "NotKept", "not-applied": "KernelArgs"}


def findings_of(inputs: Inputs, resolved: Resolved) -> list[Finding]:
    return [
        *_iommu(inputs, resolved),
        *_sev_snp(inputs),
        *_arguments(inputs),
        *_not_kept(inputs),
        *_identical_cards(inputs, resolved),
        *_driver(inputs),
        *option_findings(inputs),
    ]


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
    observed = iommu_mode(inputs, resolved)
    reason, step = _after_boot(iommu_wishes(inputs.spec.platform), inputs, ("IommuMode", steps[wanted]))
    obstacles = [
        f"group {g.number}: {o}"
        for g in wrong_groups(inputs, resolved)
        if (o := obstacle(g, inputs, resolved))
    ]
    if obstacles and _as_wished(inputs):
        step = f"reboot, or end what keeps the kernel from changing the type now: {'; '.join(obstacles)}"
    if wanted == "passthrough" and inputs.obs.platform.sev_snp == Known(value=True):
        step = f'choose: iommu: translated, or sevSnp: disabled and a reboot; SEV-SNP is on, and in passthrough the kernel says "{SNP_REFUSAL}"'
    off = isinstance(observed, Known) and "off" in observed.value
    mended = bool(wrong_groups(inputs, resolved)) and not obstacles and not off
    return [Finding("iommu", wanted, observed, reason, step, mended=mended)]


def _as_wished(inputs: Inputs) -> bool:
    """The command line of this boot is not what made the groups' types."""
    words = value_or(inputs.obs.platform.cmdline, None)
    return words is not None and all(w.met(words) for w in iommu_wishes(inputs.spec.platform))


def _after_boot(wishes: tuple[Wish, ...], inputs: Inputs, otherwise: tuple[str, str]) -> tuple[str, str]:
    """Reason and step where the command line is what stands in the way, and the next boot's is known."""
    platform = inputs.obs.platform
    words = value_or(platform.cmdline, None)
    if words is None or not isinstance(platform.next_cmdline, Known):
        return otherwise
    wrong = [w for w in wishes if not w.met(words)]
    if not wrong:
        return otherwise
    step = next_step(wrong, words, platform, editing=editing(inputs), owed=owed(inputs))
    pending = all(state_of(w, words, platform) == "pending" for w in wrong)
    return ("RebootPending" if pending else otherwise[0]), step


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
    wishes = snp_wishes(inputs.spec.platform)
    wishes += iommu_wishes(inputs.spec.platform) if wanted == "enabled" else ()
    reason, step = _after_boot(wishes, inputs, ("SevSnp", step))
    return [Finding("sevSnp", wanted, observed, reason, step)]


def _arguments(inputs: Inputs) -> list[Finding]:
    wishes = explicit_wishes(inputs.spec.platform)
    cmdline = inputs.obs.platform.cmdline
    if not isinstance(cmdline, Known):
        reason = cmdline.reason or "it was not read"
        none = Unknown(f"the kernel command line cannot be read: {reason}")
        return [Finding("kernelArgs", "as specified", none, "KernelArgs", "")] if wishes else []
    return [_argument(wish, cmdline.value, inputs) for wish in wishes]


def _argument(wish: Wish, words: tuple[str, ...], inputs: Inputs) -> Finding:
    """One argument in this boot and in the next one."""
    state = state_of(wish, words, inputs.obs.platform)
    desired = "present" if wish.present else "absent"
    observed = ("present" if wish.present else " ".join(wish.found(words))) if wish.found(words) else "absent"
    if state == "not-kept":
        following: tuple[str, ...] = value_or(inputs.obs.platform.next_cmdline, ())
        then = " ".join(wish.found(following)) or "absent"
        observed = f"{desired} in this boot, {then} in the next one"
    step = next_step([wish], words, inputs.obs.platform, editing=editing(inputs), owed=owed(inputs))
    if needed := [w for w in wish.found(words) if endangered(w)] if not wish.present else []:
        step = f"forbid less than {wish.argument}: it means {needed[0]} too, and a boot may need that"
    return Finding(
        f"kernelArgs {wish.argument}", desired, Known(observed), REASONS.get(state, "KernelArgs"), step
    )


def _not_kept(inputs: Inputs) -> list[Finding]:
    """What iommu and sevSnp mean for the command line is right in this boot and will be wrong in the next one."""
    platform, spec = inputs.obs.platform, inputs.spec.platform
    words = value_or(platform.cmdline, None)
    if words is None:
        return []
    said = {w.argument for w in explicit_wishes(spec)}
    following: tuple[str, ...] = value_or(platform.next_cmdline, ())
    found = []
    for field, wishes in (("iommu", iommu_wishes(spec)), ("sevSnp", snp_wishes(spec))):
        wrong = [w for w in wishes if w.argument not in said and state_of(w, words, platform) == "not-kept"]
        if not wrong:
            continue
        then = [w.argument if w.present else " ".join(w.found(following)) for w in wrong]
        how = "without" if wrong[0].present else "with"
        step = next_step(wrong, words, platform, editing=editing(inputs), owed=owed(inputs))
        observed = Known(f"{how} {' '.join(dict.fromkeys(then))}")
        name = f"{field} in the next boot"
        found.append(Finding(name, "as specified", observed, "NotKept", step))
    return found


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
    following = value_or(inputs.obs.platform.next_cmdline, ())
    found = [text for text in dict.fromkeys((*words, *following, *options)) if _vfio_ids(text) & ours]
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
