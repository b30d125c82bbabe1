"""What the kernel's own words come to in conditions and verdicts."""

import pytest

from agent.core.condition import Condition
from agent.core.fact import Known, Unknown
from agent.core.gpu_health import gpu_health
from agent.core.inputs import Inputs
from agent.core.observation import Holder, KernelEvent
from agent.core.p2p_decision import standing
from agent.core.report import gpu_statuses
from agent.core.resolve import resolve
from tests.core import build
from tests.core.build import FIRST, NOW, SPLIT, Change, spec, type_host
from tests.core.verdicts import converged

GPU = FIRST[1]
VM = Holder("vm", "/dev/vfio/45", 4242, "qemu-system-x86", "machine-101.scope")
BLOCKED = KernelEvent(
    "vfio-blocked", GPU, 1, NOW - 9, NOW - 9, f"vfio-pci {GPU}: Relaying device request to user (#0)"
)


def logged(*events: KernelEvent) -> Change:
    return lambda inputs: build.with_obs(inputs, kernel_events=Known(events))


def host(*changes: Change) -> Inputs:
    return type_host(spec(gpus=SPLIT), *changes)


def health(inputs: Inputs) -> Condition:
    return gpu_health(inputs, resolve(inputs))


def note_of(inputs: Inputs, address: str) -> str:
    return next(g.note for g in gpu_statuses(inputs, resolve(inputs)) if g.address == address)


def test_B2_an_unbind_that_waits_for_a_vfio_user_names_who_is_awaited() -> None:
    inputs = host(build.pending(GPU), build.held(GPU, VM), logged(BLOCKED))
    found = health(inputs)
    assert found.status == "False"
    assert "pid 4242 (qemu-system-x86), unit machine-101.scope holds /dev/vfio/45" in found.message
    assert "reboot" not in found.next_step
    assert "pid 4242 (qemu-system-x86)" in note_of(inputs, GPU)


@pytest.mark.parametrize(
    "changes",
    [
        (build.held(GPU, VM),),  # the kernel does not say that it waits for that one
        (logged(BLOCKED),),  # nobody is seen to hold it any more
        (logged(BLOCKED), build.holders_are(GPU, Unknown("it cannot be seen"))),
        (
            build.held(GPU, VM),
            logged(KernelEvent("in-use", GPU, 1, NOW, NOW, "NVRM: Attempting to remove device")),
        ),
    ],
)
def test_an_unbind_that_waits_for_nobody_in_sight_needs_a_reboot(changes: tuple[Change, ...]) -> None:
    inputs = host(build.pending(GPU), *changes)
    assert "reboot the host" in health(inputs).next_step
    assert note_of(inputs, GPU).startswith("RebootRequired")


def test_a_wait_that_is_over_is_not_reported() -> None:
    inputs = host(build.held(GPU, VM), logged(BLOCKED))
    assert health(inputs).status == "True"
    assert note_of(inputs, GPU) == ""


def test_lines_that_were_lost_are_said_and_a_log_that_cannot_be_read_to_its_end_is_not_health() -> None:
    lost = build.with_obs(host(), kernel_gaps=1)
    assert health(lost).status == "True"
    assert "overwritten" in health(lost).message
    flooded = build.with_obs(host(), kernel_unread=True)
    assert health(flooded).status == "Unknown"
    assert health(host()).message == "no fault is known"


def test_a_fault_is_not_hidden_by_a_flood() -> None:
    event = KernelEvent("xid", GPU, 1, NOW, NOW, "NVRM: Xid (PCI:0000:11:00): 119, x", 119)
    assert health(build.with_obs(host(logged(event)), kernel_unread=True)).status == "False"


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (KernelEvent("aer-corrected", GPU, 900, NOW, NOW, "PCIe Bus Error: severity=Correctable"), "True"),
        (KernelEvent("aer", GPU, 1, NOW, NOW, "error status/mask=00000020", 0x20), "False"),
        (KernelEvent("init-failed", GPU, 1, NOW, NOW, "rm_init_adapter failed"), "False"),
        (
            KernelEvent("recovery-action", GPU, 1, NOW, NOW, "154, ... to 0x2 (Node Reboot Required)", 2),
            "False",
        ),
        (KernelEvent("recovery-action", GPU, 2, NOW, NOW, "154, ... to 0x0 (None)", 0), "True"),
        (KernelEvent("iotlb-timeout", GPU, 1, NOW, NOW, "IOTLB_INV_TIMEOUT"), "False"),
    ],
)
def test_D8_only_what_is_the_devices_own_fault_is_one(event: KernelEvent, status: str) -> None:
    assert health(host(logged(event))).status == status


def test_P5_a_revoked_verdict_names_the_pairs_that_faulted() -> None:
    faults = tuple(
        KernelEvent("page-fault", FIRST[1], n, NOW - 100, NOW - 50, "IO_PAGE_FAULT", code, peer)
        for n, code, peer in ((3, 0x20, FIRST[0]), (2, 0x30, FIRST[0]), (1, 0x20, ""))
    )
    inputs = converged(None, logged(*faults), result="good")
    verdict = inputs.memory.verdicts[0]
    revoked = standing(verdict, inputs.obs, verdict.gpus)
    assert revoked is not None
    assert revoked.revoked == f"6 page faults on {FIRST[1]} to {FIRST[0]}, {FIRST[1]} since the test"
