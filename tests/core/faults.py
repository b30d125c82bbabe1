"""What can be different on a host: one small change each, named, so that a shrunk example reads as a list.

Every fault takes a GPU's address and a variant from 0 to 3.
"""

from collections.abc import Callable
from dataclasses import replace

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.memory import Promoted, Quarantine, Rejected, TrialRecord
from agent.core.observation import Holder, KernelEvent, Pci
from agent.core.resolve import resolve, trial_key
from agent.core.verdict import PairResult
from agent.kind import plan_all
from agent.kinds import ALL
from agent.kinds.rebind import UDEV_RULES
from tests.core import build
from tests.core.build import (
    BOOT,
    GPUS,
    NIC,
    NOW,
    Change,
    audio_of,
    function,
    held,
    made,
    with_memory,
    with_obs,
)
from tests.core.verdicts import verdict

EXPORTER, PERSISTENCED = "dcgm-exporter.service", "nvidia-persistenced.service"
LOST = Unknown("it does not answer", "Timeout")
Fault = Callable[[str, int], Change]


def nothing(inputs: Inputs) -> Inputs:
    return inputs


def _present(address: str, change: Change) -> Change:
    def guarded(inputs: Inputs) -> Inputs:
        tree = inputs.obs.pci
        return change(inputs) if isinstance(tree, Known) and address in tree.value.functions else inputs

    return guarded


def driver(address: str, variant: int) -> Change:
    found: Fact[str] = (Known("vfio-pci"), Absent(), Known("nouveau"), LOST)[variant]
    return _present(address, lambda i: made(i, function(address, driver=found), build.nvml_of(address, None)))


def audio_driver(address: str, variant: int) -> Change:
    found: Fact[str] = (Known("vfio-pci"), Absent(), Known("snd_hda_intel"), LOST)[variant]
    return _present(address, function(audio_of(address), driver=found))


def override(address: str, variant: int) -> Change:
    found: Fact[str] = (Known("vfio-pci"), Known("nvidia"), Absent("not set"), LOST)[variant]
    return _present(address, function(address, driver_override=found))


def audio_override(address: str, variant: int) -> Change:
    found: Fact[str] = (Known("vfio-pci"), Known("snd_hda_intel"), Absent("not set"), LOST)[variant]
    return _present(address, function(audio_of(address), driver_override=found))


def holder(address: str, variant: int) -> Change:
    """Somebody else: a foreign process, a virtual machine, the module, a container's unit with a familiar name."""
    return held(
        address,
        (
            Holder("process", "/dev/nvidia0", 77, "jupyter"),
            Holder("vm", "VM 101"),
            Holder("module", "nvidia_drm"),
            Holder("process", "/dev/nvidia0", 78, "python3", build.UNIT, "130"),
        )[variant],
    )


def own_holder(address: str, variant: int) -> Change:
    """What the agent may stop: units of policy.quiesce, its services, persistence mode."""
    if variant == 2:
        return held(address, Holder("persistence", "persistence mode"))
    if variant == 3:
        return held(address, build.serving(address))
    unit = (EXPORTER, PERSISTENCED)[variant]
    return held(address, Holder("process", "/dev/nvidia0", 79, unit.partition(".")[0], unit))


def holders_unread(address: str, variant: int) -> Change:
    def change(inputs: Inputs) -> Inputs:
        which = (address, audio_of(address))[variant % 2]
        if variant < 2:
            return build.holders_are(which, LOST)(inputs)
        return with_obs(inputs, holders={a: f for a, f in inputs.obs.holders.items() if a != which})

    return change


def audio_holder(address: str, variant: int) -> Change:
    return held(audio_of(address), Holder("process", "/dev/snd/controlC1", 80, "pipewire"))


def console(address: str, variant: int) -> Change:
    found: Fact[bool] = (Known(value=True), LOST, Known(value=False), Absent())[variant]
    return _present(address, function(address, boot_vga=found))


def nvml_gpu(address: str, variant: int) -> Change:
    if variant == 0:
        return _sighted(address, build.nvml_of(address, Unknown("GPU is lost", "GpuLost")))
    if variant == 1:
        return build.nvml_of(address, None)
    mode: Fact[bool] = Known(value=True) if variant == 2 else LOST
    return _sighted(address, build.gpu_with(address, persistence_mode=mode))


def _sighted(address: str, change: Change) -> Change:
    """Only a GPU on nvidia is in NVML's sight."""

    def guarded(inputs: Inputs) -> Inputs:
        found = inputs.obs.function(address)
        return change(inputs) if found is not None and found.driver == Known("nvidia") else inputs

    return guarded


def nvml(address: str, variant: int) -> Change:
    return lambda inputs: with_obs(inputs, nvml=Unknown("driver/library version mismatch", "NvmlMismatch"))


def power(address: str, variant: int) -> Change:
    values: tuple[Fact[int], ...] = (Known(300), LOST, Absent("not supported"), Known(450))
    limits = Known((300, 400)) if variant == 3 else Known((300, 600))
    return _sighted(address, build.gpu_with(address, power_limit=values[variant], power_limit_range=limits))


def iommu_group(address: str, variant: int) -> Change:
    neighbour = GPUS[(GPUS.index(address) + 1) % len(GPUS)]
    both = (address, audio_of(address))
    shared = build.in_group(99, *both, neighbour, audio_of(neighbour))
    return (
        _present(address, _present(neighbour, shared)),
        _present(address, build.in_group(52, NIC, *both)),
        _present(address, function(address, iommu_group=Absent())),
        _present(address, function(address, iommu_group=LOST)),
    )[variant]


def group_type(address: str, variant: int) -> Change:
    return build.group_type((Known("identity"), LOST, Known("DMA"), Known("DMA-FQ"))[variant], address)


def pending(address: str, variant: int) -> Change:
    return _present(address, build.pending((address, audio_of(address))[variant % 2]))


def quarantine(address: str, variant: int) -> Change:
    boot = (BOOT, "another boot", "", BOOT)[variant]
    where = audio_of(address) if variant == 3 else address
    entry = Quarantine(
        address=where, reason="GpuLost", message="it has fallen off the bus", boot_id=boot, at=NOW
    )
    return lambda i: with_memory(quarantine={**i.memory.quarantine, where: entry})(i)


def gone(address: str, variant: int) -> Change:
    def change(inputs: Inputs) -> Inputs:
        tree = build.known_pci(inputs)
        left = {a: f for a, f in tree.functions.items() if f.slot_address != address[:-2]}
        groups = {
            n: replace(g, members=tuple(m for m in g.members if m in left)) for n, g in tree.groups.items()
        }
        seen = build.nvml_of(address, None)(inputs)
        return with_obs(seen, pci=Known(Pci(left, groups, tree.pending_unbinds)))

    return change


def identity(address: str, variant: int) -> Change:
    if variant < 2:
        names = (("serial", LOST), ("slot", Absent()))[variant]
        return lambda i: made(i, *(_present(a, function(a, **dict([names]))) for a in GPUS))
    kept = (lambda a: a != address, lambda a: False)[variant - 2]
    return lambda i: with_memory(identities={a: d for a, d in i.memory.identities.items() if kept(a)})(i)


def numa(address: str, variant: int) -> Change:
    found: Fact[int] = (LOST, Absent(), Known(0), Known(1))[variant]
    return _present(address, function(address, numa_node=found))


def platform(address: str, variant: int) -> Change:
    return (
        build.platform(boot_id=LOST),
        build.platform(cmdline=LOST, modules=LOST),
        build.platform(nvidia_driver=Known("580.1")),
        build.platform(cmdline=Known(("iommu=pt", "vfio-pci.ids=10de:2bb5")), sev_snp=Known(value=False)),
    )[variant]


def modules(address: str, variant: int) -> Change:
    return build.platform(modules=(Known({}), LOST, Absent(), Known({}))[variant])


def target(address: str, variant: int) -> Change:
    def change(inputs: Inputs) -> Inputs:
        for name in inputs.obs.targets:
            inputs = (
                build.target(name, reachable=LOST),
                build.target(name, user_driver=Known("565.57")),
                build.target(name, shm_bytes=Known(64 << 20)),
                build.target(name, nvml=Unknown("Unknown Error", "NvmlUnknownError")),
            )[variant](inputs)
        return inputs

    return change


def _service(address: str, make: Callable[[str], Change]) -> Change:
    """The fault hits one of the services, chosen by the address."""

    def change(inputs: Inputs) -> Inputs:
        names = sorted(inputs.spec.services)
        return make(names[GPUS.index(address) % len(names)])(inputs) if names else inputs

    return change


def service_state(address: str, variant: int) -> Change:
    return _service(
        address,
        lambda name: (
            build.stopped(name, "failed"),
            build.stopped(name, "deactivating"),
            build.running_by_hand(name),
            _when_desired(name, build.running(name)),
        )[variant],
    )


def service_unread(address: str, variant: int) -> Change:
    change = ({"unit": LOST}, {"process": LOST}, {"files": LOST}, {"model_present": Known(value=False)})[
        variant
    ]
    return _service(address, lambda name: build.facts(name, **change))


def _when_desired(name: str, change: Change) -> Change:
    return lambda i: change(i) if resolve(i).services[name].desired is not None else i


def service_memory(address: str, variant: int) -> Change:
    def make(name: str) -> Change:
        return _when_desired(
            name, (_promoted_now(name), _rejected(name), _unfinished(name), _older_promoted(name))[variant]
        )

    return _service(address, make)


def _promoted_now(name: str) -> Change:
    return build.promoted(name)


def _rejected(name: str) -> Change:
    def change(inputs: Inputs) -> Inputs:
        key = trial_key(build.desired(inputs, name), inputs.spec.services[name].gate)
        entry = Rejected(revision=key, generation=1, reason="SmokeFailed", message="!!!!", at=NOW)
        return with_memory(rejected={**inputs.memory.rejected, name: entry})(inputs)

    return change


def _unfinished(name: str) -> Change:
    def change(inputs: Inputs) -> Inputs:
        record = TrialRecord(service=name, generation=1, revision=build.desired(inputs, name))
        return with_memory(trials={**inputs.memory.trials, name: record})(inputs)

    return change


def _older_promoted(name: str) -> Change:
    def change(inputs: Inputs) -> Inputs:
        now = build.desired(inputs, name)
        old = now.model_copy(update={"argv": (*now.argv, "--log-level", "debug")})
        record = Promoted(revision=old, generation=0, at=NOW - 7200, benchmark=None)
        return with_memory(promoted={**inputs.memory.promoted, name: record})(inputs)

    return change


def remembered_trouble(address: str, variant: int) -> Change:
    if variant == 0:
        return with_memory(starts=(NOW - 60, NOW - 50, NOW - 40))
    if variant == 1:
        return with_memory(stopped_units={EXPORTER: "driver change"})
    return _service(
        address,
        lambda name: (
            lambda i: with_memory(terminal={**i.memory.terminal, f"service/trial/{name}": "wedged"})(i)
        ),
    )


def failed_before(address: str, variant: int) -> Change:
    """An action of the very plan that would be made now has failed and must wait, or wait for a person."""

    def change(inputs: Inputs) -> Inputs:
        actions = plan_all(ALL, inputs).actions
        if not actions:
            return inputs
        key = actions[(GPUS.index(address) * 2 + variant) % len(actions)].key
        if variant % 2:
            return with_memory(terminal={**inputs.memory.terminal, key: "it cannot work"})(inputs)
        return with_memory(
            retry_after={**inputs.memory.retry_after, key: NOW + 1e6},
            failures={**inputs.memory.failures, key: 2},
        )(inputs)

    return change


def tested(address: str, variant: int) -> Change:
    """A self-test of some service's GPUs."""
    result: PairResult = ("good", "corrupt", "hung", "good")[variant]

    def change(inputs: Inputs) -> Inputs:
        for one in resolve(inputs).services.values():
            on_nvidia = all((f := inputs.obs.function(g)) and f.driver == Known("nvidia") for g in one.gpus)
            if len(one.gpus) > 1 and on_nvidia:
                stale = {"fingerprint": "0123456789abcdef"} if variant == 3 else {}
                inputs = verdict(result, one.gpus, **stale)(inputs)
        return inputs

    return change


def page_fault(address: str, variant: int) -> Change:
    if variant == 3:
        return lambda i: with_obs(i, kernel_events=LOST)
    event = KernelEvent(
        "page-fault", address, 7, NOW - 100, NOW - 50, "AMD-Vi: Event logged [IO_PAGE_FAULT ...]", 0x30
    )
    return lambda i: with_obs(i, kernel_events=Known((event,)))


def controls(address: str, variant: int) -> Change:
    return lambda i: with_memory(
        verdicts=tuple(v.model_copy(update={"controls_ok": False}) for v in i.memory.verdicts)
    )(i)


def rules(address: str, variant: int) -> Change:
    found: Fact[str] = (Known("# old\n"), LOST, Absent("no such file"), Known(""))[variant]
    return lambda i: with_obs(i, host_files={**i.obs.host_files, UDEV_RULES: found})


FAULTS: dict[str, Fault] = {
    f.__name__: f
    for f in (
        driver, audio_driver, override, audio_override, holder, own_holder, holders_unread, audio_holder, console,
        nvml_gpu, nvml, power, iommu_group, group_type, pending, quarantine, gone, identity, numa, platform, modules, target,
        service_state, service_unread, service_memory, remembered_trouble, failed_before, tested, page_fault, controls,
        rules,
    )
}  # fmt: skip
