"""What one model cannot see: GPU groups, platform and policy against each other. Pure; every problem at once."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from agent.core.boot_edit import endangered
from agent.core.problem import Path, Problem, show
from agent.core.quantity import UNLOCKED, say_clocks
from agent.core.spec import ByAddress, ByNuma, BySerial, BySlot, ByUuid, GpuSettings, Platform, Selector, Spec
from agent.core.spec_checks_service import check_services

_SNP_LOG = "SNP: IOMMU disabled or configured in passthrough mode, SNP cannot be supported"
_UNTRANSLATED = ("iommu=pt", "iommu=off", "amd_iommu=off", "intel_iommu=off", "iommu.passthrough=1")
_SHORTEST_RESYNC = 1.0  # seconds; a pass takes about that long


def cross_check(spec: Spec) -> list[Problem]:
    return [*_check_policy(spec), *_check_platform(spec), *_check_groups(spec), *check_services(spec)]


def _check_policy(spec: Spec) -> Iterator[Problem]:
    if spec.policy.resync < _SHORTEST_RESYNC:
        text = f"found {spec.policy.resync:g} seconds, expected at least {_SHORTEST_RESYNC:g} second"
        yield Problem(("spec", "policy", "resync"), text)


def _check_platform(spec: Spec) -> Iterator[Problem]:
    platform = spec.platform
    here: Path = ("spec", "platform")
    if platform.sev_snp == "enabled" and platform.iommu in {"passthrough", "off"}:
        text = (
            f"found {platform.iommu} together with sevSnp: enabled, expected translated: the kernel says"
            f' "{_SNP_LOG}" and turns SNP off'
        )
        yield Problem((*here, "iommu"), text, uses=((*here, "sevSnp"),))
    for number, argument in enumerate(platform.kernel_args.require):
        path: Path = (*here, "kernelArgs", "require", number)
        yield from _check_argument(path, argument, platform)
        if argument.startswith(("vfio-pci.ids=", "vfio_pci.ids=")):
            yield from _check_ids(path, argument, spec)
    if spec.policy.boot_files == "edit":
        yield from _check_edit(platform.kernel_args.forbid)
    for module, parameters in platform.modules.items():
        if module.replace("-", "_") == "vfio_pci" and "ids" in parameters:
            yield from _check_ids((*here, "modules", module, "ids"), parameters["ids"], spec)


def _check_edit(forbid: Iterable[str]) -> Iterator[Problem]:
    """What is only reported may be as wide as it likes; what is edited must leave a machine that boots."""
    for number, pattern in enumerate(forbid):
        if word := endangered(pattern):
            text = (
                f"found {show(pattern)} with bootFiles: edit, expected a pattern that leaves {word} alone:"
                " without that word the next boot may fail, or nobody may reach it"
            )
            path: Path = ("spec", "platform", "kernelArgs", "forbid", number)
            yield Problem(path, text, uses=(("spec", "policy", "bootFiles"),))


def _check_argument(path: Path, argument: str, platform: Platform) -> Iterator[Problem]:
    here = path[:2]
    found = show(argument)
    if not argument.strip() or not argument.isprintable() or " " in argument:
        yield Problem(path, f"found {found}, expected one kernel argument, such as pcie_aspm=off")
        return
    if _untranslated(argument):
        if platform.sev_snp == "enabled":
            text = f'found {found} with sevSnp: enabled, expected it left out: the kernel says "{_SNP_LOG}" and turns SNP off'
            yield Problem(path, text, uses=((*here, "sevSnp"),))
        if platform.iommu == "translated":
            text = f"found {found} with iommu: translated, expected it left out: it turns translation off"
            yield Problem(path, text, uses=((*here, "iommu"),))
    for number, pattern in enumerate(platform.kernel_args.forbid):
        if fnmatchcase(argument, pattern):
            text = f"found {found}, expected it under require or under forbid, not both: forbid[{number}] is {show(pattern)}"
            yield Problem(path, text, uses=((*here, "kernelArgs", "forbid"),))


def _untranslated(argument: str) -> bool:
    """The argument takes the IOMMU out of translation: iommu=pt, also in a list such as iommu=pt,nomerge."""
    name, _, values = argument.partition("=")
    return any(f"{name}={value}" in _UNTRANSLATED for value in values.split(","))


def _check_ids(path: Path, value: object, spec: Spec) -> Iterator[Problem]:
    drivers = {group.driver for group in spec.gpus.values()}
    if len(drivers) > 1:
        text = (
            f"found {show(value)} while GPU groups have different drivers, expected it left out:"
            " an id names all identical cards, so vfio-pci would take those meant for nvidia too"
        )
        yield Problem(path, text, uses=(("spec", "gpus"),))


def _check_groups(spec: Spec) -> Iterator[Problem]:
    places: dict[str, Path] = {}
    slots: dict[str, tuple[Path, str]] = {}
    for name, group in spec.gpus.items():
        here: Path = ("spec", "gpus", name)
        if group.driver != "nvidia" and group.settings != GpuSettings():
            text = f"found settings on a group that is on {group.driver}, expected none: they are set through NVML, which sees only nvidia"
            yield Problem((*here, "settings"), text, uses=((*here, "driver"),))
        else:
            yield from _check_settings((*here, "settings"), name, spec)
        if isinstance(group.select, ByNuma):
            key = f"the first GPUs of NUMA node {group.select.numa_node}"
            yield from _check_once(key, (*here, "select"), places)
            continue
        for number, selector in enumerate(group.select):
            path: Path = (*here, "select", number)
            yield from _check_function(selector, path, name, slots)
            yield from _check_once(_card(selector), path, places)


def _check_settings(here: Path, group: str, spec: Spec) -> Iterator[Problem]:
    settings = spec.gpus[group].settings
    locks = {
        "lockedGraphicsClocks": settings.locked_graphics_clocks,
        "lockedMemoryClocks": settings.locked_memory_clocks,
    }
    for key, clocks in locks.items():
        if clocks not in (None, UNLOCKED) and not settings.persistence_mode:
            text = (
                f"found {say_clocks(clocks)} without persistenceMode: true, expected both:"
                " without persistence mode the driver forgets the lock of a GPU that nobody uses"
            )
            yield Problem((*here, key), text)
    for service in (name for name, s in spec.services.items() if s.gpus == group):
        uses: Path = ("spec", "services", service, "gpus")
        if settings.compute_mode == "prohibited":
            text = f"found prohibited on the GPUs of service {service}, expected another mode: nothing could compute there"
            yield Problem((*here, "computeMode"), text, uses=(uses,))
        if settings.mig:
            text = f"found true on the GPUs of service {service}, expected false: without instances CUDA finds no GPU there"
            yield Problem((*here, "mig"), text, uses=(uses,))


def _card(selector: Selector) -> str:
    if isinstance(selector, ByUuid):
        return f"uuid {selector.uuid.lower()}"
    if isinstance(selector, BySerial):
        return f"serial {selector.serial.lower()}"
    if isinstance(selector, BySlot):
        return f"slot {selector.slot}"
    return selector.address if isinstance(selector, ByAddress) else selector


def _check_once(card: str, path: Path, places: dict[str, Path]) -> Iterator[Problem]:
    first = places.setdefault(card, path)
    if first != path:
        yield Problem(
            path,
            f"found {card} again, expected each GPU once: group {first[2]} selects it already",
            uses=(first,),
        )


def _check_function(
    selector: Selector, path: Path, group: str, slots: dict[str, tuple[Path, str]]
) -> Iterator[Problem]:
    """A card is one slot with all its functions; the group's driver gets all of them."""
    address = _card(selector)
    if not isinstance(selector, str | ByAddress):
        return
    slot, _, function = address.rpartition(".")
    other_path, other = slots.setdefault(slot, (path, function))
    if other != function and other_path[2] != group:
        text = (
            f"found {address}, a function of the card {slot} that group {other_path[2]} selects as {slot}.{other},"
            f" expected all functions of a card in one group: select only {slot}.0"
        )
        yield Problem(path, text, uses=(other_path,))
    elif function != "0":
        yield Problem(
            path, f"found {address}, expected {slot}.0: the other functions of the card come with it"
        )
