"""The kernel log as the agent reads it, where the agent is the guest's own service.

What emulation cannot bring about is forged here: the stand-in driver writes the line, so it comes from the kernel, whose
wording is Linux's or NVIDIA's. Page faults that really happened are in test_kernel_iommu.py.

The tests follow one another: cards are lost one by one, and the guest reboots in the end.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.guest_agent import GUEST_CODE, GuestAgent, spec
from tests.system.vm.machine import AUDIO, GPUS, PCI, VirtualMachine

pytestmark = pytest.mark.system

FIRST, SECOND, THIRD, FOURTH = GPUS[:4]
FLOOD = (GUEST_CODE / "flood.py").read_text()
LINES = 6000
MAX_RECORDS = 400
SPEC = spec(f"""\
  gpus:
    pair: {{select: [{FIRST}, {SECOND}], driver: nvidia}}
    others: {{select: [{THIRD}, {FOURTH}], driver: nvidia}}
  services:
    pair:
      runtime: sglang
      target: host
      unit: pair.service
      gpus: pair
      python: /usr/bin/python3
      args: {{model-path: /models/none, tensor-parallel-size: 2, port: 30000}}
""")


@pytest.fixture(scope="module")
def vm() -> Iterator[VirtualMachine]:
    with VirtualMachine(iommu="amd", gpus=4, persist=True) as machine:
        yield machine


@pytest.fixture(scope="module")
def agent(vm: VirtualMachine) -> Iterator[GuestAgent]:
    daemon = GuestAgent(vm)
    daemon.put_spec(SPEC)
    daemon.systemctl("start")
    yield daemon
    vm.run("systemctl stop gpu-host-agent", timeout=180)


def fault(source: str, address: int) -> str:
    """The line of a page fault, as AMD's driver words it for a device on nvidia."""
    return f"nvidia {source}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x002c address={address:#x} flags=0x0030]"


def records(agent: GuestAgent, sort: str, address: str) -> list[dict[str, Any]]:
    """What is saved of that sort about that device."""
    return [e for e in agent.saved_events() if (e["sort"], e["address"]) == (sort, address)]


def count(agent: GuestAgent, sort: str, address: str) -> int:
    return sum(e["count"] for e in records(agent, sort, address))


def mark(vm: VirtualMachine, agent: GuestAgent) -> None:
    """Forge a harmless line and wait until it is counted: all lines before it have then been read."""
    before = count(agent, "aer-corrected", AUDIO[3])
    line = f"pcieport {AUDIO[3]}: AER: PCIe Bus Error: severity=Correctable, type=Physical Layer"
    vm.forge_kernel_line(line)
    agent.until(lambda: count(agent, "aer-corrected", AUDIO[3]) == before + 1, "the mark to be read")


def healthy(agent: GuestAgent) -> str:
    return str(agent.condition("GpusHealthy")["status"])


def inside_bar(vm: VirtualMachine, gpu: str) -> int:
    """An address inside the card's real BAR, by the kernel."""
    first, last = (int(word, 0) for word in vm.read(f"{PCI}/{gpu}/resource").split()[:2])
    assert last > first > 0
    return first + (last - first) // 2


def test_P7_forged_peer_faults_are_counted_by_the_pair_whose_bar_the_address_is_in(vm, agent):
    address = inside_bar(vm, SECOND)
    for _ in range(3):
        vm.forge_kernel_line(fault(FIRST, address))
    vm.forge_kernel_line("amd_iommu_report_page_fault: 4000 callbacks suppressed")
    vm.forge_kernel_line(fault(FIRST, address))
    agent.until(lambda: count(agent, "page-fault", FIRST) == 4004, "4004 faults to be counted")
    (record,) = records(agent, "page-fault", FIRST)
    assert record["peer"] == SECOND
    said = f"IOMMU page faults at least: {FIRST} into {SECOND} 4,004"
    agent.until(lambda: said in agent.condition("P2PVerified/pair")["message"], "the status to name the pair")
    assert healthy(agent) == "True", "the cards themselves are well"


def test_lines_that_programs_write_to_the_kernel_log_are_not_believed(vm, agent):
    line = f"NVRM: Xid (PCI:{FOURTH[:-2]}): 79, pid=1, GPU has fallen off the bus."
    for priority in ("", "<0>", "<3>"):  # the kernel makes each of these a line of facility "user"
        vm.check(f"echo '{priority}{line}' > /dev/kmsg")
    assert sum(line in said for said in vm.kernel_log()) == 3
    mark(vm, agent)
    assert not [e for e in agent.saved_events() if e["sort"] in {"bus-lost", "xid"}]
    assert healthy(agent) == "True"


def test_an_agent_that_was_killed_or_stopped_counts_no_line_twice_and_loses_none_that_came_meanwhile(
    vm, agent
):
    address = inside_bar(vm, FIRST)
    vm.forge_kernel_line(fault(SECOND, address))
    agent.until(lambda: count(agent, "page-fault", SECOND) == 1, "the fault to be counted")
    before = agent.status()["pid"]
    agent.systemctl("kill -s KILL")
    mark(vm, agent)
    assert agent.status()["pid"] != before, "systemd has started another one"
    assert count(agent, "page-fault", SECOND) == 1
    agent.systemctl("stop")
    vm.forge_kernel_line(fault(SECOND, address))
    vm.forge_kernel_line(fault(SECOND, address))
    agent.systemctl("start")
    mark(vm, agent)
    assert count(agent, "page-fault", SECOND) == 3
    assert count(agent, "page-fault", FIRST) == 4004


def test_a_flood_leaves_few_records_and_a_daemon_that_still_answers(vm, agent):
    """6,000 forged Xids and faults with as many addresses and codes; the kernel's ring holds some 2,000 of them."""

    def size() -> int:
        pid = agent.status()["pid"]
        found = [ln for ln in vm.read(f"/proc/{pid}/status").splitlines() if ln.startswith("VmRSS:")]
        return int(found[0].split()[1])

    before = size()
    vm.python(FLOOD, THIRD, str(LINES), timeout=120)
    mark(vm, agent)
    events = agent.saved_events()
    assert len(events) <= MAX_RECORDS
    assert sum(e["count"] for e in events if e["address"] == THIRD) > LINES / 20, "it has read some of them"
    assert size() - before < 32 << 10, "KiB of memory for a flood of 6,000 lines"
    assert agent.condition("GpusHealthy")["status"] == "True", "none of these lines is a card's fault"


def test_a_forged_attempt_to_remove_a_card_in_use_is_a_record_of_its_own(vm, agent):
    vm.forge_kernel_line(f"NVRM: Attempting to remove device {THIRD} with non-zero usage count!")
    agent.until(lambda: count(agent, "in-use", THIRD) == 1, "the attempt to be counted")
    assert healthy(agent) == "True"


def test_D8_a_forged_surprise_link_down_at_the_bridge_above_names_the_kernel_arguments(vm, agent):
    port = vm.check(f"basename $(dirname $(readlink -f {PCI}/{FOURTH}))").strip()
    vm.forge_kernel_line(f"pcieport {port}: AER: aer_uncor_status: 0x00000020, aer_uncor_mask: 0x00000000")
    agent.until(lambda: healthy(agent) == "False", "the agent to say so")
    said = agent.condition("GpusHealthy")
    assert f"{port} above {FOURTH}: PCIe link went down by surprise" in said["message"]
    assert "pcie_aspm=off pcie_port_pm=off" in said["next_step"]


@pytest.mark.parametrize(
    ("lost", "line", "meaning"),
    [
        pytest.param(
            FIRST,
            "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "does not answer on PCIe any more",
            id="D4-xid-79",
        ),
        pytest.param(
            SECOND,
            f"vfio-pci {SECOND}: Unable to change power state from D3cold to D0, device inaccessible",
            "could not be woken",
            id="B12-d3cold",
        ),
        pytest.param(
            THIRD,
            f"vfio-pci {THIRD}: not ready 65535ms after FLR; giving up",
            "did not come back from a reset",
            id="B13-flr",
        ),
    ],
)
def test_B12_B13_D4_a_forged_loss_quarantines_that_card_and_keeps_the_others(vm, agent, lost, line, meaning):
    def notes() -> dict[str, str]:
        return {g["address"]: g["note"] for g in agent.status()["gpus"]}

    before = notes()
    vm.forge_kernel_line(line)
    agent.until(lambda: notes()[lost] != before[lost], f"{lost} to be quarantined")
    after = notes()
    assert meaning in after[lost]
    assert {a: n for a, n in after.items() if a != lost} == {a: n for a, n in before.items() if a != lost}
    said = agent.condition("GpusHealthy")
    assert lost in said["message"]
    assert meaning in said["message"]
    assert said["next_step"].startswith("power-cycle the host")


def test_another_boot_starts_anew_and_its_lines_from_before_the_agent_are_counted_once(vm, agent):
    vm.reboot()
    vm.forge_kernel_line(fault(FIRST, inside_bar(vm, SECOND)))
    old = agent.saved_events()
    assert sum(e["count"] for e in old if e["sort"] == "page-fault") > 4000, "the file outlasted the reboot"
    agent.systemctl("start")
    mark(vm, agent)
    faults = [
        (e["address"], e["peer"], e["count"]) for e in agent.saved_events() if e["sort"] == "page-fault"
    ]
    assert faults == [(FIRST, SECOND, 1)]
    assert not [
        e for e in agent.saved_events() if e["sort"] in {"bus-lost", "d3cold", "flr-failed", "in-use"}
    ]
    assert healthy(agent) == "True", "quarantines end with the boot"
