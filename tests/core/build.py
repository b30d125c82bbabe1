"""The type host as plain data: eight two-function GPUs, a network card, one container with a service.

``type_host()`` is the host as it was found: every GPU on nvidia, the service on all of them with P2P on. Everything
else is made from it by small functions from inputs to inputs, applied in order by ``made``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.memory import Identity, Memory, Promoted
from agent.core.observation import (
    NOT_TOLD,
    Gpu,
    Holder,
    IommuGroup,
    Module,
    Nvml,
    Observation,
    Pci,
    PciFunction,
    Platform,
    Process,
    ServiceFacts,
    TargetFacts,
    Unit,
)  # fmt: skip
from agent.core.resolve import resolve
from agent.core.revision import Revision
from agent.core.spec import GpuHost, target_name

BUSES = ("01", "11", "61", "71", "81", "91", "e1", "f1")
GPUS = tuple(f"0000:{bus}:00.0" for bus in BUSES)
FIRST, LAST = GPUS[:4], GPUS[4:]
NIC = "0000:41:00.0"
BOOT = "5b1c7c2e-8f0e-4d59-9f0b-6f1f0c3d7a11"
NOW = 1_760_000_000.0
DRIVER = "590.48.01"
UNIT, TARGET, CONTAINER = "sglang-qwen.service", "lxc:129", "129"
FREE: Fact[tuple[Holder, ...]] = Known(())
NOT_SET = Unknown("NVML does not tell it, and it was not set here", NOT_TOLD)

Change = Callable[[Inputs], Inputs]


def uuid_of(address: str) -> str:
    return f"GPU-{GPUS.index(address) + 1:08x}-0000-4000-8000-000000000000"


def serial_of(address: str) -> str:
    return f"48b02d00000000a{GPUS.index(address) + 1}"


def audio_of(address: str) -> str:
    return address[:-1] + "1"


SERVICE: dict[str, Any] = {
    "runtime": "sglang",
    "target": {"lxc": 129},
    "unit": UNIT,
    "gpus": "inference",
    "python": "/opt/ml-env/bin/python3",
    "args": {"model-path": "/models/qwen", "tensor-parallel-size": 4, "port": 30000},
    "nccl": {"NCCL_IB_DISABLE": "1"},
}
SPLIT: dict[str, Any] = {
    "inference": {"select": list(FIRST), "driver": "nvidia"},
    "confidential": {"select": list(LAST), "driver": "vfio-pci"},
}


def spec(**sections: Any) -> GpuHost:
    """A spec with these sections, as written in a file."""
    head = {"apiVersion": "gpu-host/v1", "kind": "GpuHost", "metadata": {"name": "esc8000a"}}
    return GpuHost.model_validate({**head, "spec": sections})


def service(**changes: Any) -> dict[str, Any]:
    return {"qwen": {**SERVICE, **changes}}


def pci(gpus: tuple[str, ...] = GPUS) -> Pci:
    functions: dict[str, PciFunction] = {}
    groups: dict[int, IommuGroup] = {}
    for index, address in enumerate(gpus):
        card = _card(address, 44 + index)
        functions |= card
        groups[44 + index] = IommuGroup(44 + index, Known("DMA-FQ"), (address, audio_of(address)))
    functions[NIC] = PciFunction(
        NIC, 0x8086, 0x1572, 0x020000, driver=Known("i40e"), iommu_group=Known(52), numa_node=Known(0)
    )
    groups[52] = IommuGroup(52, Known("DMA-FQ"), (NIC,))
    return Pci(functions, groups)


def _card(address: str, group: int) -> dict[str, PciFunction]:
    index = GPUS.index(address)
    bridge = f"0000:{int(address[5:7], 16) & 0xF0:02x}:01.1"
    serial, slot, node = Known(serial_of(address)), Known(str(index + 1)), Known(index // 4)
    gpu = PciFunction(
        address, 0x10DE, 0x2BB5, 0x030200, driver=Known("nvidia"), iommu_group=Known(group), numa_node=node,
        slot=slot, serial=serial, bridges=(bridge,), virtual_functions=Known(0),
    )  # fmt: skip
    audio = replace(
        gpu, address=audio_of(address), device_id=0x22E8, class_code=0x040300, driver=Known("snd_hda_intel"),
        virtual_functions=Absent("no SR-IOV"),
    )  # fmt: skip
    port = PciFunction(bridge, 0x1022, 0x14AB, 0x060400, driver=Known("pcieport"), acs_ctl=Known(0x1D))
    return {address: gpu, audio.address: audio, bridge: port}


def gpu(address: str) -> Gpu:
    """One idle GPU as NVML shows it; minors run against the bus order on purpose."""
    index = GPUS.index(address)
    return Gpu(
        address, index, Known(7 - index), Known(uuid_of(address)), Known("RTX PRO 6000"),
        serial=Known(f"17942400000{index + 11}"), persistence_mode=Known(value=False), power_limit=Known(600),
        power_limit_range=Known((300, 600)), memory_used=Known(0), utilization=Known(0), pids=Known(()),
        recovery_action=Known("none"), locked_graphics_clocks=NOT_SET, locked_memory_clocks=NOT_SET,
        ecc_mode=Known(value=True), ecc_pending=Known(value=True), compute_mode=Known("default"),
        mig_mode=Known(value=False), mig_pending=Known(value=False),
    )  # fmt: skip


def serving(address: str, unit: str = UNIT, container: str = CONTAINER) -> Holder:
    return Holder("process", f"/dev/nvidia{7 - GPUS.index(address)}", 4242, "python3", unit, container)


PLATFORM = Platform(
    boot_id=Known(BOOT), kernel_release=Known("6.14.11-4-pve"), cmdline=Known(("ro", "quiet")),
    modules=Known({m: Module(m) for m in ("nvidia", "nvidia_uvm")}), module_options=Known(()), sev_snp=Known(value=True), nvidia_driver=Known(DRIVER),
    systemd=Known("257"),
)  # fmt: skip


def type_host(host: GpuHost | None = None, *changes: Change) -> Inputs:
    """As found: all eight GPUs on nvidia, one unproved service on all of them, P2P on, no verdict."""
    host = host or spec(gpus=SPLIT, services=service())
    nvml = Nvml(driver_version=Known(DRIVER), gpus={a: Known(gpu(a)) for a in GPUS})
    by_function = [a for pair in ((g, audio_of(g)) for g in GPUS) for a in pair]
    target = TargetFacts(
        reachable=Known(value=True), user_driver=Known(DRIVER), nvml=Known("ok"), shm_bytes=Known(64 << 30),
        device_nodes=Known(()), sglang_version=Known("0.5.10"),
    )  # fmt: skip
    obs = Observation(
        platform=PLATFORM, pci=Known(pci()), nvml=Known(nvml),
        holders=dict.fromkeys(by_function, FREE),
        targets={"host": target, **{target_name(s.target): target for s in host.spec.services.values()}},
        services={n: stopped_facts(s.unit) for n, s in host.spec.services.items()},
        host_files=dict.fromkeys(HOST_FILES, Absent()),
        kernel_events=Known(()),
    )  # fmt: skip
    identities = {
        a: Identity(
            address=a, uuid=uuid_of(a), serial=serial_of(a), board=f"17942400000{i + 11}", slot=str(i + 1)
        )
        for i, a in enumerate(GPUS)
    }
    inputs = Inputs(host, 1, obs, Memory(generation=1, identities=identities), NOW)
    if host.spec.services:
        inputs = made(inputs, running_by_hand(*host.spec.services))
    return made(inputs, *changes)


HOST_FILES = ("/etc/udev/rules.d/50-gpu-host-agent.rules", "/etc/modprobe.d/gpu-host-agent.conf")


def made(inputs: Inputs, *changes: Change) -> Inputs:
    for change in changes:
        inputs = change(inputs)
    return inputs


def stopped_facts(unit: str, state: str = "inactive") -> ServiceFacts:
    return ServiceFacts(
        Known(Unit(unit, "loaded", state)),
        Known({}),
        Absent("no main process"),
        Known(value=True),
        Absent("no"),
    )


def running_by_hand(*names: str) -> Change:
    """Started by people, on every GPU, with a command that is not the spec's: P2P on."""

    def change(inputs: Inputs) -> Inputs:
        for name in names:
            unit = inputs.spec.services[name].unit
            process = Process(4242, ("/opt/ml-env/bin/python3", "-m", "sglang.launch_server"), {})
            facts = replace(
                stopped_facts(unit, "active"),
                unit=Known(Unit(unit, "loaded", "active", "running", 4242, pids=(4242,))),
                process=Known(process), health=Known("ok"),
            )  # fmt: skip
            inputs = with_obs(inputs, services={**inputs.obs.services, name: facts})
        return made(inputs, *(held(a, serving(a)) for a in GPUS))

    return change


def with_obs(inputs: Inputs, **changes: Any) -> Inputs:
    return replace(inputs, obs=replace(inputs.obs, **changes))


def with_memory(**changes: Any) -> Change:
    return lambda inputs: replace(inputs, memory=inputs.memory.model_copy(update=changes))


def known_pci(inputs: Inputs) -> Pci:
    assert isinstance(inputs.obs.pci, Known)
    return inputs.obs.pci.value


def function(address: str, **changes: Any) -> Change:
    """One PCI function differently."""

    def change(inputs: Inputs) -> Inputs:
        tree = known_pci(inputs)
        other = replace(tree.functions[address], **changes)
        return with_obs(inputs, pci=Known(replace(tree, functions={**tree.functions, address: other})))

    return change


def on(driver: str, *addresses: str) -> Change:
    """These cards bound to a driver, as after a clean rebind: nvidia with NVML's sight of it, or vfio-pci without."""

    def change(inputs: Inputs) -> Inputs:
        for address in addresses:
            vfio = driver == "vfio-pci"
            audio: Fact[str] = Known("vfio-pci") if vfio else Known("snd_hda_intel")
            override: Fact[str] = Known("vfio-pci") if vfio else Absent()
            inputs = made(
                inputs,
                function(address, driver=Known(driver), driver_override=override),
                function(audio_of(address), driver=audio, driver_override=override),
                nvml_of(address, None if driver != "nvidia" else Known(gpu(address))),
            )
        return inputs

    return change


def without_driver(address: str) -> Change:
    return lambda inputs: made(inputs, function(address, driver=Absent()), nvml_of(address, None))


def nvml_of(address: str, fact: Fact[Gpu] | None) -> Change:
    """What NVML says of one GPU; None takes it out of sight, and the last one takes NVML with it."""

    def change(inputs: Inputs) -> Inputs:
        if not isinstance(inputs.obs.nvml, Known):
            return inputs
        rest = {a: g for a, g in inputs.obs.nvml.value.gpus.items() if a != address}
        gpus = rest if fact is None else {**rest, address: fact}
        nvml: Fact[Nvml] = Known(replace(inputs.obs.nvml.value, gpus=gpus)) if gpus else Absent("not opened")
        return with_obs(inputs, nvml=nvml)

    return change


def gpu_with(address: str, **changes: Any) -> Change:
    return nvml_of(address, Known(replace(gpu(address), **changes)))


def held(address: str, *holders: Holder) -> Change:
    return holders_are(address, Known(holders))


def holders_are(address: str, fact: Fact[tuple[Holder, ...]]) -> Change:
    return lambda inputs: with_obs(inputs, holders={**inputs.obs.holders, address: fact})


def idle(*addresses: str) -> Change:
    return lambda inputs: with_obs(inputs, holders={**inputs.obs.holders, **dict.fromkeys(addresses, FREE)})


def in_group(number: int, *addresses: str) -> Change:
    """These functions in one IOMMU group, and in no other."""

    def change(inputs: Inputs) -> Inputs:
        for address in addresses:
            inputs = function(address, iommu_group=Known(number))(inputs)
        tree = known_pci(inputs)
        rest = {
            n: replace(g, members=tuple(m for m in g.members if m not in addresses))
            for n, g in tree.groups.items()
        }
        members = tuple(dict.fromkeys([*rest[number].members, *addresses])) if number in rest else addresses
        rest[number] = IommuGroup(number, Known("DMA-FQ"), members)
        return with_obs(inputs, pci=Known(replace(tree, groups=rest)))

    return change


def group_type(kind: Fact[str], *addresses: str) -> Change:
    def change(inputs: Inputs) -> Inputs:
        tree = known_pci(inputs)
        groups = {
            n: replace(g, type=kind) if set(g.members) & set(addresses) else g for n, g in tree.groups.items()
        }
        return with_obs(inputs, pci=Known(replace(tree, groups=groups)))

    return change


def pending(*addresses: str) -> Change:
    return lambda inputs: with_obs(inputs, pci=Known(replace(known_pci(inputs), pending_unbinds=addresses)))


def platform(**changes: Any) -> Change:
    return lambda inputs: with_obs(inputs, platform=replace(inputs.obs.platform, **changes))


def target(name: str = TARGET, **changes: Any) -> Change:
    return lambda inputs: with_obs(
        inputs, targets={**inputs.obs.targets, name: replace(inputs.obs.targets[name], **changes)}
    )


def facts(name: str = "qwen", **changes: Any) -> Change:
    return lambda inputs: with_obs(
        inputs, services={**inputs.obs.services, name: replace(inputs.obs.services[name], **changes)}
    )


def files(texts: Mapping[str, str]) -> Change:
    return lambda inputs: with_obs(
        inputs, host_files={**inputs.obs.host_files, **{p: Known(t) for p, t in texts.items()}}
    )


def desired(inputs: Inputs, name: str = "qwen") -> Revision:
    found = resolve(inputs).services[name].desired
    assert found is not None
    return found


def running(name: str = "qwen", revision: Revision | None = None) -> Change:
    """The unit runs a revision (the one that the spec means now), and holds exactly its GPUs."""

    def change(inputs: Inputs) -> Inputs:
        what = revision or desired(inputs, name)
        unit = Unit(what.unit, "loaded", "active", "running", 4242, pids=(4242,))
        now = ServiceFacts(
            Known(unit),
            Known(what.files),
            Known(Process(4242, what.argv, what.env)),
            Known(value=True),
            Known("ok"),
        )
        container = what.target.removeprefix("lxc:") if what.target.startswith("lxc:") else ""
        inputs = with_obs(inputs, services={**inputs.obs.services, name: now})
        return made(inputs, *(held(a, serving(a, what.unit, container)) for a in what.gpus))

    return change


def stopped(name: str = "qwen", state: str = "inactive") -> Change:
    def change(inputs: Inputs) -> Inputs:
        unit = inputs.spec.services[name].unit
        holders = {
            a: Known(tuple(h for h in f.value if h.unit != unit)) if isinstance(f, Known) else f
            for a, f in inputs.obs.holders.items()
        }
        services = {**inputs.obs.services, name: stopped_facts(unit, state)}
        return with_obs(inputs, services=services, holders=holders)

    return change


def promoted(name: str = "qwen", revision: Revision | None = None) -> Change:
    """A revision (the one that the spec means now) was proved and is the last good one."""

    def change(inputs: Inputs) -> Inputs:
        what = revision or desired(inputs, name)
        record = Promoted(revision=what, generation=1, at=NOW - 3600, benchmark=None)
        return with_memory(promoted={**inputs.memory.promoted, name: record})(inputs)

    return change
