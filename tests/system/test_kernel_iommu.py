"""What the agent makes of a real kernel's IOMMU: its modes, the types of its groups, ACS, and what the boot loader says.

Real GRUB is not in the guest: only its files are, as grub-mkconfig writes them.
"""

import contextlib
import errno
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.guest_agent import GUEST_CODE, STATE, GuestAgent, Step, drift, refusal, spec
from tests.system.vm.machine import AUDIO, EDU_PORT, EDU_ROOT, GPUS, GROUPS, PCI, VirtualMachine

pytestmark = pytest.mark.system

P2P_FACTS = (GUEST_CODE / "p2p_facts.py").read_text()
TWO = f"  gpus:\n    two: {{select: {list(GPUS[:2])}, driver: nvidia}}\n"
PAIR = f"""{TWO}  services:
    pair:
      runtime: sglang
      target: host
      unit: pair.service
      gpus: two
      python: /usr/bin/python3
      args: {{model-path: /models/none, tensor-parallel-size: 2, port: 30000}}
"""


def wanted(platform: str) -> str:
    return spec(f"  platform: {platform}\n{TWO}")


def types_of(seen: dict[str, Any]) -> set[str]:
    """Of the groups of the first two cards."""
    pci = seen["pci"]["known"]
    numbers = [pci["functions"][gpu]["iommu_group"]["known"] for gpu in GPUS[:2]]
    return {pci["groups"][str(number)]["type"]["known"] for number in numbers}


# AMD, as it comes


@pytest.fixture(scope="module")
def amd() -> Iterator[VirtualMachine]:
    with VirtualMachine(iommu="amd", gpus=3, faults=True, edu_cards=True) as machine:
        machine.wait_for(lambda: machine.driver(EDU_ROOT) == "nvidia", "the card that can do DMA to be bound")
        yield machine


@pytest.fixture(scope="module")
def agent(amd: VirtualMachine) -> GuestAgent:
    return GuestAgent(amd)


def test_amd_translates_and_only_another_wish_is_a_finding(agent):
    assert types_of(agent.observation()) == {"DMA"}
    asked = ("{iommu: translated}", "{iommu: passthrough}", "{iommu: 'off'}")
    translated, passthrough, off = agent.plans([Step(wanted(p)) for p in asked])
    assert not translated["drifts"]
    assert drift(passthrough, "iommu")["observed"] == "translated"
    assert "iommu=pt" in refusal(passthrough, "iommu")["nextStep"]
    assert drift(off, "iommu")["observed"] == "translated"
    assert "amd_iommu=off" in refusal(off, "iommu")["nextStep"]


def grub(configured: str, following: str) -> dict[str, str]:
    """What an operator wrote, and what update-grub last made of it."""
    entry = f"menuentry 'Debian' --class debian {{\n\tlinux /boot/vmlinuz root=/dev/vda {following}\n}}\n"
    return {
        "/etc/default/grub": f'GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX="{configured}"\n',
        "/boot/grub/grub.cfg": f'set default="0"\n{entry}',
    }


def test_a_kernel_argument_is_applied_pending_not_applied_or_not_kept_by_grubs_own_files(amd, agent):
    require = wanted("{kernelArgs: {require: [pcie_aspm=off]}}")
    steps = [
        Step(require),
        Step(require, grub("quiet", "quiet")),
        Step(require, grub("pcie_aspm=off", "quiet")),
        Step(require, grub("pcie_aspm=off", "quiet pcie_aspm=off")),
        Step(wanted("{kernelArgs: {require: [nokaslr]}}"), grub("nokaslr", "nokaslr")),
        Step(wanted("{kernelArgs: {forbid: [iommu=pt]}}"), grub("iommu=pt", "iommu=pt")),
    ]
    try:
        plans = agent.plans(steps)
    finally:
        amd.check("rm -rf /boot/grub /etc/default/grub")
    unknown_loader, not_applied, not_refreshed, pending = (
        refusal(p, "kernelArgs pcie_aspm=off") for p in plans[:4]
    )
    assert unknown_loader["reason"] == not_applied["reason"] == not_refreshed["reason"] == "KernelArgs"
    assert unknown_loader["nextStep"] == "put pcie_aspm=off on the kernel command line and reboot"
    assert "add pcie_aspm=off to GRUB_CMDLINE_LINUX in /etc/default/grub" in not_applied["nextStep"]
    assert not_refreshed["nextStep"].startswith("run update-grub")
    assert pending["reason"] == "RebootPending"
    assert not plans[4]["drifts"], "in this boot's command line and in the next one's"
    not_kept = refusal(plans[5], "kernelArgs iommu=pt")
    assert not_kept["reason"] == "NotKept"
    assert "remove iommu=pt from /etc/default/grub" in not_kept["nextStep"]


# The types of groups


def refused(vm: VirtualMachine, address: str, kind: str) -> str:
    """The name of the kernel's errno; "" where it took the type."""
    try:
        vm.write(f"{GROUPS}/{vm.group(address)}/type", kind)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def test_the_kernel_changes_the_type_of_a_group_on_nvidia_only_from_dma_to_dma_fq(amd):
    gpu = GPUS[2]
    assert refused(amd, gpu, "identity") == "EPERM"
    assert refused(amd, gpu, "nonsense") == "EINVAL"
    assert refused(amd, gpu, "DMA-FQ") == ""
    assert amd.group_type(gpu) == "DMA-FQ"
    assert refused(amd, gpu, "DMA") == "EPERM"


@pytest.fixture(scope="module")
def daemon(amd: VirtualMachine, agent: GuestAgent) -> Iterator[GuestAgent]:
    """The agent as the guest's own service, in its sandbox, with the second card on vfio-pci."""
    agent.put_spec(on_vfio("translated"))
    agent.systemctl("start")
    agent.until(lambda: on_driver(amd, "vfio-pci") and converged(agent), "the card on vfio-pci, all done")
    yield agent
    amd.run("systemctl stop gpu-host-agent", timeout=180)


def on_vfio(iommu: str) -> str:
    group = f"  gpus:\n    vm: {{select: [{GPUS[1]}], driver: vfio-pci}}\n"
    return spec(f"  platform: {{iommu: {iommu}}}\n{group}", mode="enforce")


def on_driver(vm: VirtualMachine, name: str) -> bool:
    return vm.links([GPUS[1], AUDIO[1]]) == {GPUS[1]: name, AUDIO[1]: name}


def converged(agent: GuestAgent) -> bool:
    return bool(agent.status()["last_pass"]["sentence"] == "Converged: nothing to do.")


def type_actions(vm: VirtualMachine) -> int:
    """How often the agent's journal says that it did set a type."""
    journal = [json.loads(line) for line in vm.read(f"{STATE}/journal.jsonl").splitlines()]
    return sum(r["event"] == "intent" and "set-group-type" in r["action"] for r in journal)


def test_the_agent_sets_the_type_of_a_group_on_unopened_vfio_pci_from_within_its_sandbox(amd, daemon):
    assert amd.group_type(GPUS[1]) == "DMA"
    daemon.put_spec(on_vfio("passthrough"))
    daemon.until(lambda: amd.group_type(GPUS[1]) == "identity", "the group to pass through")
    daemon.until(lambda: converged(daemon), "the agent to be done")
    assert on_driver(amd, "vfio-pci")


def test_a_type_that_a_removal_and_rescan_lost_is_noticed_and_set_again(amd, daemon):
    before = type_actions(amd)
    assert amd.group_type(GPUS[1]) == "identity", "as the test before this one left it"
    for address in (GPUS[1], AUDIO[1]):
        amd.write(f"{PCI}/{address}/remove", "1")
    amd.write("/sys/bus/pci/rescan", "1")
    daemon.until(lambda: type_actions(amd) > before, "the agent to set the type again")
    daemon.until(
        lambda: on_driver(amd, "vfio-pci") and amd.group_type(GPUS[1]) == "identity", "all as specified"
    )


def test_a_group_whose_device_a_process_has_open_keeps_its_type_and_the_process_is_named(amd, daemon):
    daemon.until(lambda: converged(daemon), "the agent to be done")
    before = type_actions(amd)
    holder = amd.hold_vfio(GPUS[1])
    try:
        assert refused(amd, GPUS[1], "DMA") == "EPERM", "the kernel's own word"
        daemon.put_spec(on_vfio("translated"))
        daemon.until(lambda: daemon.condition("PlatformReady")["status"] == "False", "the agent to say so")
        said = daemon.condition("PlatformReady")
        assert "iommu is passthrough, wanted translated" in said["message"]
        assert f"pid {holder} " in said["next_step"]
        assert type_actions(amd) == before
        assert amd.group_type(GPUS[1]) == "identity"
    finally:
        amd.release(holder)
    daemon.until(lambda: amd.group_type(GPUS[1]) == "DMA", "the group to be translated once it is let go")


def test_a_group_on_nvidia_keeps_its_type_and_the_driver_is_named(amd, daemon):
    gpu = f"  gpus:\n    one: {{select: [{GPUS[0]}], driver: nvidia}}\n"
    daemon.put_spec(spec(f"  platform: {{iommu: passthrough}}\n{gpu}", mode="enforce"))
    daemon.until(
        lambda: "iommu is translated, wanted passthrough" in daemon.condition("PlatformReady")["message"],
        "the agent to take up the spec",
    )
    assert "iommu=pt" in daemon.condition("PlatformReady")["next_step"]
    assert amd.group_type(GPUS[0]) == "DMA"
    assert amd.driver(GPUS[0]) == "nvidia"


# ACS


@contextlib.contextmanager
def acs_of_root_ports(vm: VirtualMachine, ports: set[str], value: str) -> Iterator[None]:
    """ACS control of these bridges, written to their config space, and put back."""
    before = {port: vm.check(f"setpci -s {port} ECAP_ACS+6.w").strip() for port in ports}
    try:
        for port in ports:
            vm.check(f"setpci -s {port} ECAP_ACS+6.w={value}")
        yield
    finally:
        for port, was in before.items():
            vm.check(f"setpci -s {port} ECAP_ACS+6.w={was}")


def p2p_facts(vm: VirtualMachine) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(vm.python(P2P_FACTS, *GPUS[:2], timeout=120).splitlines()[-1])
    return facts


def test_P3_bridges_that_redirect_peer_traffic_are_named_and_others_are_not(amd):
    facts = p2p_facts(amd)
    first, second = (facts["bridges"][gpu] for gpu in GPUS[:2])
    assert len(first) == len(second) == 1
    assert f"ACS sends peer traffic through the root complex at {first[0]}, {second[0]}" in facts["explained"]
    with acs_of_root_ports(amd, set(first), "0"):
        cleared = p2p_facts(amd)["explained"]
    assert f"root complex at {second[0]};" in cleared
    assert first[0] not in cleared


def test_P16_acs_bits_that_come_back_void_a_verdict(amd, agent):
    amd.run("systemctl stop gpu-host-agent", timeout=180)
    bridges = {port for found in p2p_facts(amd)["bridges"].values() for port in found}
    try:
        with acs_of_root_ports(amd, bridges, "0"):
            amd.put(f"{STATE}/memory.json", json.dumps({"verdicts": [p2p_facts(amd)["good_verdict"]]}))
            assert not drift(agent.plan(spec(PAIR)), "verdict"), "the verdict speaks about this host"
        stale = drift(agent.plan(spec(PAIR)), "verdict")
    finally:
        amd.check(f"rm -f {STATE}/memory.json")
    assert stale["observed"] == "stale"
    assert "the host has changed since the P2P self-test" in stale["why"]


# Faults


def counted_by_the_kernel(vm: VirtualMachine, line: str, suppressed: str) -> int:
    """Lines about it, and those that the kernel says it left out."""
    log = vm.kernel_log()
    left_out = [int(said.split()[1]) for said in log if said.startswith(suppressed)]
    return sum(line in said for said in log) + sum(left_out)


def fault_until_lines_are_suppressed(vm: VirtualMachine, gpu: str, target: int) -> None:
    """Bursts of faults, until the kernel has said how many lines it left out: it does with the first of a later burst."""

    def burst() -> bool:
        vm.dma(gpu, target, "read", 12)
        return any("callbacks suppressed" in said for said in vm.kernel_log())

    vm.wait_for(burst, "the kernel to leave lines out")


def test_P7_real_page_faults_of_an_amd_iommu_are_one_record_with_the_kernels_count(amd, agent):
    bar = int(amd.read(f"{PCI}/{GPUS[0]}/resource").split()[0], 0)
    fault_until_lines_are_suppressed(amd, EDU_ROOT, bar)
    # By now the burst is over: no line comes between the two counts.
    line = f"nvidia {EDU_ROOT}: AMD-Vi: Event logged [IO_PAGE_FAULT"
    expected = counted_by_the_kernel(amd, line, "amd_iommu_report_page_fault: ")
    (event,) = [e for e in agent.observation()["kernel_events"]["known"] if e["sort"] == "page-fault"]
    assert (event["address"], event["count"]) == (EDU_ROOT, expected)
    assert event["code"] == 0x9, "a read of what is not mapped"
    assert event["sample"].startswith(line)


# Other command lines and Intel


def test_amd_in_passthrough_is_a_finding_and_grubs_files_say_whether_a_reboot_ends_it():
    forbidding = wanted("{iommu: translated, kernelArgs: {forbid: [iommu=pt]}}")
    with VirtualMachine(iommu="amd", gpus=2, append="iommu=pt") as vm:
        agent = GuestAgent(vm)
        assert types_of(agent.observation()) == {"identity"}
        now, pending, passthrough = agent.plans(
            [
                Step(forbidding),
                Step(forbidding, grub("quiet", "quiet")),
                Step(wanted("{iommu: passthrough}"), grub("iommu=pt", "iommu=pt")),
            ]
        )
    assert drift(now, "iommu")["observed"] == "passthrough"
    assert drift(now, "kernelArgs iommu=pt")["observed"] == "iommu=pt"
    assert refusal(now, "iommu")["reason"] == "IommuMode"
    assert refusal(now, "iommu")["nextStep"].startswith("remove iommu=pt")
    assert refusal(pending, "iommu")["reason"] == "RebootPending"
    assert refusal(pending, "kernelArgs iommu=pt")["reason"] == "RebootPending"
    assert not passthrough["drifts"]


def test_amd_with_its_iommu_off_has_no_groups_and_that_is_a_finding():
    with VirtualMachine(iommu="amd", gpus=2, append="amd_iommu=off") as vm:
        agent = GuestAgent(vm)
        seen = agent.observation()["pci"]["known"]
        translated, off = agent.plans([Step(wanted("{iommu: translated}")), Step(wanted("{iommu: 'off'}"))])
    assert seen["groups"] == {}
    assert all("absent" in seen["functions"][gpu]["iommu_group"] for gpu in GPUS[:2])
    assert drift(translated, "iommu")["observed"] == "off"
    assert "amd_iommu=off" in refusal(translated, "iommu")["nextStep"]
    assert not off["drifts"]


@pytest.fixture(scope="module")
def intel() -> Iterator[VirtualMachine]:
    with VirtualMachine(iommu="intel", gpus=8, edu_cards=True) as machine:
        machine.wait_for(lambda: machine.driver(EDU_PORT) == "nvidia", "the card that can do DMA to be bound")
        yield machine


def test_intel_translates_and_so_does_a_group_that_flushes_lazily(intel):
    """Bare metal begins with DMA-FQ; where the IOMMU is emulated (caching mode), the kernel takes the strict type."""
    agent = GuestAgent(intel)
    assert types_of(agent.observation()) == {"DMA"}
    assert refused(intel, GPUS[0], "DMA-FQ") == "", "the one change that is allowed while a driver is bound"
    assert types_of(agent.observation()) == {"DMA", "DMA-FQ"}
    translated, passthrough = agent.plans(
        [Step(wanted("{iommu: translated}")), Step(wanted("{iommu: passthrough}"))]
    )
    assert not translated["drifts"]
    assert drift(passthrough, "iommu")["observed"] == "translated"


def test_P7_a_real_fault_of_an_intel_iommu_into_another_cards_bar_names_that_card(intel):
    bar = int(intel.read(f"{PCI}/{GPUS[1]}/resource").split()[0], 0)
    fault_until_lines_are_suppressed(intel, EDU_PORT, bar)
    line = "DMAR: [DMA Read NO_PASID] Request device [09:00.0] fault addr"
    expected = counted_by_the_kernel(intel, line, "dmar_fault: ")
    found = GuestAgent(intel).observation()["kernel_events"]["known"]
    faults = [e for e in found if e["sort"] == "page-fault"]
    assert {e["address"] for e in faults} == {EDU_PORT}
    assert sum(e["count"] for e in faults) == expected
    peers = {e["peer"]: e for e in faults}
    assert GPUS[1] in peers
    assert f"fault addr {bar:#x}" in peers[GPUS[1]]["sample"]


def test_intel_in_passthrough_is_a_finding():
    with VirtualMachine(iommu="intel", gpus=2, append="iommu=pt") as vm:
        agent = GuestAgent(vm)
        assert types_of(agent.observation()) == {"identity"}
        plan = agent.plan(wanted("{iommu: translated}"))
    assert drift(plan, "iommu")["observed"] == "passthrough"
