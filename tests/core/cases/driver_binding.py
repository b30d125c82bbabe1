"""Golden cases of driver binding: who goes where, what is let go of first, and what forbids it."""

from typing import Any

from agent.core.fact import Absent, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.memory import Quarantine
from agent.core.observation import NOT_READ, Holder
from agent.kinds.rebind import UDEV_RULES
from tests.core import build
from tests.core.build import (
    BOOT,
    FIRST,
    GPUS,
    LAST,
    NIC,
    NOW,
    Change,
    audio_of,
    serial_of,
    service,
    spec,
    type_host,
    uuid_of,
)
from tests.core.faults import EXPORTER, PERSISTENCED
from tests.core.verdicts import converged, rules_written
from tests.core.worlds import shifted

CARD = LAST[0]
ONE: dict[str, Any] = {"confidential": {"select": [CARD], "driver": "vfio-pci"}}


def one(*changes: Change, quiesce: tuple[str, ...] = (), gpus: dict[str, Any] | None = None) -> Inputs:
    """One idle card to vfio-pci, so that only what is said about it differs."""
    every = [a for gpu in GPUS for a in (gpu, audio_of(gpu))]
    host = spec(policy={"quiesce": list(quiesce)}, gpus=gpus or ONE)
    return type_host(host, build.idle(*every), *changes)


def selected(*selectors: object) -> dict[str, Any]:
    return {"confidential": {"select": list(selectors), "driver": "vfio-pci"}}


def node(number: int, count: int) -> dict[str, Any]:
    return {"confidential": {"select": {"numaNode": number, "count": count}, "driver": "vfio-pci"}}


def unit(name: str) -> Holder:
    return Holder("process", "/dev/nvidia3", 912, name.partition(".")[0], name)


def quarantine(boot: str) -> Change:
    entry = Quarantine(
        address=CARD,
        reason="RebootRequired",
        message=f"the unbind of {CARD} has not returned for 60 s",
        boot_id=boot,
        at=NOW,
    )
    return build.with_memory(quarantine={CARD: entry})


BACK: dict[str, Any] = {"inference": {"select": [FIRST[0]], "driver": "nvidia"}}
GROUP = (CARD, audio_of(CARD), LAST[1], audio_of(LAST[1]))

CASES: dict[str, Inputs] = {
    "nothing-to-do": converged(),
    "as-found-held-by-the-service-P2P-on": type_host(),
    "one-free-card": one(),
    "B2-persistence-mode-goes-off-first": one(build.gpu_with(CARD, persistence_mode=Known(value=True))),
    "B2-persistence-mode-unreadable": one(build.gpu_with(CARD, persistence_mode=Unknown("not supported"))),
    "nvml-fails": one(
        lambda i: build.with_obs(i, nvml=Unknown("driver/library version mismatch", "NvmlVersionMismatch"))
    ),
    "B3-held-by-units-that-may-be-stopped": one(
        build.held(CARD, unit(PERSISTENCED), unit(EXPORTER)), quiesce=(EXPORTER, PERSISTENCED)
    ),
    "B3-held-by-a-unit-that-may-not-be-stopped": one(build.held(CARD, unit(EXPORTER))),
    "B3-held-by-a-process-in-a-container": one(
        build.held(CARD, Holder("process", "/dev/nvidia3", 77, "python3", "jupyter.service", "131"))
    ),
    "B7-held-by-a-virtual-machine": one(
        build.on("vfio-pci", FIRST[0]), build.held(FIRST[0], Holder("vm", "VM 101")), gpus=BACK
    ),
    "holders-unknown": one(build.holders_are(CARD, Unknown("permission denied"))),
    "sound-device-held": one(
        build.held(audio_of(CARD), Holder("process", "/dev/snd/controlC1", 80, "pipewire"))
    ),
    "console": one(build.function(CARD, boot_vga=Known(value=True))),
    "virtual-functions": one(build.function(CARD, virtual_functions=Known(4))),
    "virtual-functions-unreadable": one(
        build.function(CARD, virtual_functions=Unknown("Input/output error", "Unreadable"))
    ),
    "virtual-functions-not-looked-for": one(build.function(CARD, virtual_functions=NOT_READ)),
    "virtual-functions-of-a-card-that-stays": one(build.function(FIRST[0], virtual_functions=Known(4))),
    "a-service-that-cannot-start-again-keeps-its-cards": type_host(
        None, build.target(user_driver=Known("565.57.01"))
    ),
    "B4-group-shared-with-a-network-card": one(build.in_group(52, NIC, CARD, audio_of(CARD))),
    "B4-group-of-two-cards-moves-whole": one(build.in_group(99, *GROUP), gpus=selected(CARD, LAST[1])),
    "B4-group-of-two-cards-of-which-one-is-held": one(
        build.in_group(99, *GROUP), build.held(LAST[1], unit(EXPORTER)), gpus=selected(CARD, LAST[1])
    ),
    "B4-group-stays-with-a-guest": one(
        build.on("vfio-pci", FIRST[0], CARD),
        build.in_group(99, FIRST[0], audio_of(FIRST[0]), CARD, audio_of(CARD)),
        gpus=BACK,
    ),
    "no-iommu-group": one(build.function(CARD, iommu_group=Absent("IOMMU off"))),
    "split-by-uuid": one(gpus=selected({"uuid": uuid_of(CARD)}, {"uuid": uuid_of(LAST[2])})),
    "split-by-serial": one(gpus=selected({"serial": serial_of(CARD)}, {"serial": "1794240000018"})),
    "split-by-slot": one(gpus=selected({"slot": "5"}, {"slot": "8"})),
    "split-by-numa-node": one(gpus=node(1, 2)),
    "numa-node-with-too-few-cards": one(gpus=node(1, 5)),
    "numa-node-of-one-card-unreadable": one(
        build.function(CARD, numa_node=Unknown("it did not answer")), gpus=node(1, 2)
    ),
    "card-not-there": one(gpus=selected("0000:c1:00.0")),
    "uuid-not-there": one(gpus=selected({"uuid": "GPU-ffffffff-0000-4000-8000-000000000000"})),
    "one-card-in-two-groups": one(
        gpus={**ONE, "inference": {"select": [{"uuid": uuid_of(CARD)}], "driver": "nvidia"}}
    ),
    "B11-buses-shifted-by-address": shifted(one(gpus=selected(*LAST))),
    "B11-buses-shifted-by-uuid": shifted(one(gpus=selected(*({"uuid": uuid_of(a)} for a in LAST)))),
    "B11-buses-shifted-and-nothing-to-tell-cards-by": shifted(
        one(
            build.on("vfio-pci", *LAST),
            *(build.function(a, serial=Absent(), slot=Absent()) for a in GPUS),
            gpus=selected(*({"uuid": uuid_of(a)} for a in LAST)),
        )
    ),
    "B1-pending-unbind": one(build.pending(CARD), build.function(CARD, driver=Absent())),
    "B1-stuck-in-this-boot": one(quarantine(BOOT)),
    "B1-stuck-in-an-earlier-boot": one(quarantine("another boot")),
    "B8-stale-override": one(
        build.on("vfio-pci", CARD),
        rules_written,
        build.function(FIRST[0], driver_override=Known("vfio-pci")),
        gpus={**ONE, **BACK},
    ),
    "B8-no-driver-at-all": one(build.without_driver(CARD), build.function(audio_of(CARD), driver=Absent())),
    "B5-only-the-sound-device-is-on-vfio-pci": one(
        build.function(audio_of(FIRST[0]), driver=Known("vfio-pci")), gpus=BACK
    ),
    "card-comes-back-and-its-uuid-was-never-seen": type_host(
        spec(gpus=BACK, services=service(gpus="inference", args={"model-path": "/models/qwen"})),
        build.stopped(),
        build.on("vfio-pci", *GPUS),
        build.with_memory(identities={}),
    ),
    "B10-rules-missing": one(build.on("vfio-pci", CARD)),
    "rules-no-longer-wanted": one(build.files({UDEV_RULES: "# old\n"}), gpus=BACK),
    "a-unit-that-was-stopped-before-a-crash": one(
        build.on("vfio-pci", CARD),
        rules_written,
        build.with_memory(stopped_units={EXPORTER: "driver change"}),
    ),
    "failed-before-and-waiting": one(
        build.held(CARD, unit(EXPORTER)),
        build.with_memory(
            retry_after={f"driver-binding/bind/{CARD}": NOW + 40}, failures={f"driver-binding/bind/{CARD}": 2}
        ),
        quiesce=(EXPORTER,),
    ),
    "failed-for-good": one(
        build.with_memory(terminal={f"driver-binding/bind/{CARD}": "bind: no such device"})
    ),
    "pci-tree-unreadable": build.with_obs(one(), pci=Unknown("it did not answer within 15 s", "Timeout")),
}
