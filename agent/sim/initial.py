"""From a profile to the state of a host: as found, and as it comes up again after a boot."""

import fnmatch
import re
import time
import uuid

from agent.sim.profile import Card, Device, GpuModel, Profile
from agent.sim.state import FunctionState, GpuState, GroupState, LogLine, ModuleState, WorldState

SNP_REFUSED = "AMD-Vi: SNP: IOMMU disabled or configured in passthrough mode, SNP cannot be supported."


def initial_state(profile: Profile) -> WorldState:
    """The host as found."""
    now = time.time()
    state = WorldState(
        profile=profile.name,
        boot_id=profile.boot_id,
        kernel_release=profile.kernel_release,
        cmdline=list(profile.cmdline),
        modules={name: module.model_copy(deep=True) for name, module in profile.modules.items()},
        installed_modules=list(profile.installed_modules),
        module_options=list(profile.module_options),
        sev_snp=profile.sev_snp,
        driver_version=profile.nvidia_driver,
        cuda_version=profile.cuda_version,
        systemd=profile.systemd,
        functions=_functions(profile),
        groups={},
        gpus={f"{slot}.0": _gpu(card, profile.gpu_model) for slot, card in profile.gpus.items()},
        holders=[holder.model_copy() for holder in profile.holders],
        vms={name: vm.model_copy(deep=True) for name, vm in profile.vms.items()},
        targets={name: target.model_copy(deep=True) for name, target in profile.targets.items()},
        kernel_log=[
            LogLine(at=now - line.age, text=line.text, count=line.count) for line in profile.kernel_log
        ],
        epoch_real=now,
        factor=profile.time_factor,
    )
    set_boot_domains(state)
    return state


def _functions(profile: Profile) -> dict[str, FunctionState]:
    functions = {address: _device(device) for address, device in profile.devices.items()}
    for slot, card in profile.gpus.items():
        functions[f"{slot}.0"] = _card_function(card, profile.gpu_model)
        if profile.gpu_model.audio_device is not None:
            functions[f"{slot}.1"] = _audio_function(card, profile.gpu_model, profile.gpu_model.audio_device)
    return functions


def _device(device: Device) -> FunctionState:
    return FunctionState(
        vendor=device.vendor,
        device=device.device,
        class_code=device.class_code,
        native=device.driver,
        driver=device.driver,
        group=device.group,
        numa_node=device.numa_node,
        boot_vga=device.boot_vga,
        acs_ctl=device.acs_ctl,
        bars=list(device.bars),
        bridges=list(device.bridges),
    )


def _card_function(card: Card, model: GpuModel) -> FunctionState:
    return FunctionState(
        vendor=model.vendor,
        device=model.device,
        class_code=model.class_code,
        native="nvidia",
        driver="nvidia",
        group=card.group,
        numa_node=card.numa_node,
        slot=card.slot,
        serial=card.serial,
        bridges=list(card.bridges),
        bars=list(card.bars),
        link_speed=model.link_speed,
        link_width=model.link_width,
        max_link_speed=model.link_speed,
        max_link_width=model.link_width,
    )


def _audio_function(card: Card, model: GpuModel, device: int) -> FunctionState:
    return FunctionState(
        vendor=model.vendor,
        device=device,
        class_code=0x040300,
        native="snd_hda_intel",
        driver="snd_hda_intel",
        group=card.group,
        numa_node=card.numa_node,
        slot=card.slot,
        serial=card.serial,
        bridges=list(card.bridges),
    )


def _gpu(card: Card, model: GpuModel) -> GpuState:
    return GpuState(
        minor=card.minor,
        uuid=card.uuid,
        name=model.name,
        serial=card.nvml_serial,
        power_limit=model.power_range[1],
        power_range=model.power_range,
        memory_total=model.memory_total,
        link_gen=model.link_gen,
        max_link_gen=model.link_gen,
        link_width=model.link_width,
    )


def boot_domain(cmdline: list[str]) -> str | None:
    """The group type that a boot with this command line gives; None: no IOMMU groups."""
    words = set(cmdline)
    if words & {"amd_iommu=off", "iommu=off", "intel_iommu=off"}:
        return None
    return "identity" if words & {"iommu=pt", "iommu.passthrough=1"} else "DMA"


def set_boot_domains(state: WorldState) -> None:
    domain = boot_domain(state.cmdline)
    if domain is None:
        state.groups = {}
        for function in state.functions.values():
            function.group = None
        return
    numbers = {f.group for f in state.functions.values() if f.group is not None}
    state.groups = {number: GroupState(type=domain) for number in sorted(numbers)}


def booted(
    state: WorldState, profile: Profile, cmdline: list[str] | None, moved: dict[str, str]
) -> WorldState:
    """The host after a boot: hardware and kernel from the profile, files and command line from the disk.

    ``moved``: buses that this boot numbers anew; udev rules see the new addresses, and virtual machines keep theirs.
    """
    fresh = initial_state(profile)
    buses = {old: moved.get(now, now) for old, now in state.buses.items()}
    renumber(fresh, {**{old: now for old, now in moved.items() if old not in state.buses}, **buses})
    following = state.next_cmdline if state.next_cmdline is not None else state.cmdline
    fresh.cmdline = list(cmdline if cmdline is not None else following)
    fresh.boot_loader, fresh.initramfs_modules = state.boot_loader, list(state.initramfs_modules)
    fresh.modules_load = list(state.modules_load)
    fresh.made_nodes = None if state.made_nodes is None else []
    if cmdline is None:
        fresh.next_cmdline, fresh.boot_words = state.next_cmdline, state.boot_words
    _keep_in_cards(state, fresh)
    fresh.module_options = list(state.module_options)
    fresh.boots = state.boots + 1
    fresh.boot_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{profile.boot_id} {fresh.boots}"))
    fresh.kernel_log = [LogLine(at=time.time(), text="Command line: " + " ".join(fresh.cmdline))]
    fresh.vms = {name: vm.model_copy(update={"running": False}) for name, vm in state.vms.items()}
    fresh.targets = state.targets
    for name in _kept():
        setattr(fresh, name, getattr(state, name))
    set_boot_domains(fresh)
    if fresh.sev_snp and boot_domain(fresh.cmdline) != "DMA":
        fresh.sev_snp = False
        fresh.modules["kvm_amd"].parameters["sev_snp"] = "N"
        fresh.kernel_log.append(LogLine(at=time.time(), text=SNP_REFUSED))
    _claim_at_boot(fresh)
    return fresh


def _keep_in_cards(before: WorldState, fresh: WorldState) -> None:
    """ECC stands in the card itself: what was pending works from the boot on."""
    pending = {gpu.uuid: gpu.ecc_pending for gpu in before.gpus.values()}
    for gpu in fresh.gpus.values():
        gpu.ecc = gpu.ecc_pending = pending.get(gpu.uuid, gpu.ecc_pending)


def _kept() -> tuple[str, ...]:
    """What is no part of the host's hardware or kernel: time, the scenario's progress, the record of writes."""
    return (
        "epoch_real",
        "epoch_sim",
        "factor",
        "next_pid",
        "scenario",
        "writes",
        "calls",
        "fault_hits",
        "added_faults",
        "events_armed",
        "events_done",
        "spec_edits",
        "version",
    )


def renumber(state: WorldState, buses: dict[str, str]) -> None:
    """Cards show up under other bus numbers, as after a card was added: domain and bus, old to new."""

    def moved(address: str) -> str:
        return buses.get(address[:7], address[:7]) + address[7:]

    state.buses = {old: buses.get(now, now) for old, now in state.buses.items()} | {
        old: now for old, now in buses.items() if old not in state.buses
    }
    state.functions = {moved(a): f for a, f in state.functions.items()}
    state.gpus = {moved(a): g for a, g in state.gpus.items()}
    for function in state.functions.values():
        function.bridges = [moved(bridge) for bridge in function.bridges]
    for vm in state.vms.values():
        vm.functions = [moved(address) for address in vm.functions]
    for target in state.targets.values():
        for unit in target.units.values():
            unit.gpus = [moved(address) for address in unit.gpus]


_UDEV_ADDRESS = re.compile(r'KERNEL=="([^"]+)"|ATTR\{\[pci/([^\]]+)\]driver_override\}=')
_UDEV_OVERRIDE = re.compile(r'ATTR\{(?:\[pci/[^\]]+\])?driver_override\}="([^"]*)"')


def _claim_at_boot(state: WorldState) -> None:
    """``vfio-pci.ids=`` takes every card of that id; a udev rule takes one function."""
    for function_id in _vfio_ids(state):
        for function in state.functions.values():
            if f"{function.vendor:04x}:{function.device:04x}" == function_id:
                _bind_at_boot(state, function, "vfio-pci")
    for path, file in state.targets["host"].files.items():
        if path.startswith("/etc/udev/rules.d/"):
            for line in file.text.splitlines():
                _apply_udev_line(state, line)


def _vfio_ids(state: WorldState) -> list[str]:
    ids = [word.partition("=")[2] for word in state.cmdline if word.startswith("vfio-pci.ids=")]
    for option in state.module_options:
        if option.split()[:2] == ["options", "vfio-pci"]:
            ids += [word.partition("=")[2] for word in option.split() if word.startswith("ids=")]
    return [one for group in ids for one in group.split(",")]


def _apply_udev_line(state: WorldState, line: str) -> None:
    address, override = _UDEV_ADDRESS.search(line), _UDEV_OVERRIDE.search(line)
    if line.lstrip().startswith("#") or address is None or override is None:
        return
    for name, function in state.functions.items():
        if fnmatch.fnmatchcase(name, address[1] or address[2]):
            function.override = override[1]
            # Else it was taken before any rule was read; modules-load.d only may come first, and here it does.
            if function.native not in (*state.initramfs_modules, *state.modules_load):
                _bind_at_boot(state, function, override[1])


def _bind_at_boot(state: WorldState, function: FunctionState, driver: str) -> None:
    module = driver.replace("-", "_")
    if module in state.installed_modules:
        state.modules.setdefault(module, ModuleState())
        function.driver = driver
