"""The kernel ring's own ground: the guest boots, its cards look and behave as the agent's tests need them to."""

import json
from collections.abc import Iterator

import pytest

from tests.system.vm.machine import AUDIO, EDU_ROOT, GPUS, PCI, VirtualMachine

pytestmark = pytest.mark.system

SPEC = """\
apiVersion: gpu-host/v1
kind: GpuHost
metadata: {name: guest}
spec:
  policy: {mode: observe}
  gpus:
    all: {select: GPUS, driver: nvidia}
""".replace("GPUS", str(list(GPUS)))
ON_NVIDIA = {**dict.fromkeys(GPUS, "nvidia"), **dict.fromkeys(AUDIO, "snd_hda_intel")}


@pytest.fixture(scope="module")
def vm() -> Iterator[VirtualMachine]:
    with VirtualMachine(iommu="amd") as machine:
        yield machine


@pytest.fixture(scope="module")
def pci(vm: VirtualMachine) -> dict[str, dict[str, dict[str, object]]]:
    """What the agent says of the PCI bus."""
    seen = json.loads(vm.check("agent observe --host real -o json"))
    assert seen["simulated"] == ""
    known: dict[str, dict[str, dict[str, object]]] = seen["pci"]["known"]
    return known


def test_systemd_comes_up_whole_and_udev_gives_every_function_its_driver(vm):
    assert vm.check("systemctl is-system-running").strip() == "running"
    vm.wait_for(lambda: vm.links() == ON_NVIDIA, "nvidia and snd_hda_intel on eight cards")


def test_the_guest_has_no_network_but_loopback(vm):
    assert vm.names("/sys/class/net/*") == ["/sys/class/net/lo"]


def test_the_kernel_matches_and_announces_the_cards_by_their_new_identity(vm):
    for address in GPUS:
        uevent = dict(line.split("=", 1) for line in vm.read(f"{PCI}/{address}/uevent").splitlines())
        assert uevent["PCI_ID"] == "10DE:2BB5"
        assert uevent["MODALIAS"] == vm.read(f"{PCI}/{address}/modalias")
        assert uevent["MODALIAS"].startswith("pci:v000010DEd00002BB5") and "bc03" in uevent["MODALIAS"]


def test_the_agent_sees_eight_cards_with_their_audio_function_slot_and_link(pci):
    for bus, (gpu, audio) in enumerate(zip(GPUS, AUDIO, strict=True), 1):
        card, sound = pci["functions"][gpu], pci["functions"][audio]
        assert (card["vendor_id"], card["device_id"]) == (0x10DE, 0x2BB5)
        assert card["driver"] == {"known": "nvidia"}
        assert sound["driver"] == {"known": "snd_hda_intel"}
        assert card["slot"] == sound["slot"] == {"known": str(bus)}
        assert card["power_state"] == {"known": "D0"}
        assert card["link_width"] == {"known": 1}
    assert {a for a, f in pci["functions"].items() if f["vendor_id"] == 0x10DE} == set(GPUS)


def test_the_agent_sees_one_translated_group_for_each_slot(vm, pci):
    for gpu, audio in zip(GPUS, AUDIO, strict=True):
        number = vm.group(gpu)
        assert pci["functions"][gpu]["iommu_group"] == {"known": int(number)}
        group = pci["groups"][number]
        assert sorted(group["members"]) == [gpu, audio]
        assert group["type"] == {"known": "DMA"}


def test_the_agent_reads_the_acs_bits_that_the_kernel_set_on_every_root_port(vm, pci):
    for gpu in GPUS:
        (port,) = pci["functions"][gpu]["bridges"]
        # setpci finds the capability by itself; the control register is at offset 6.
        expected = int(vm.check(f"setpci -s {port} ECAP_ACS+6.w"), 16)
        assert expected & 0x1C, "the kernel asked for no peer-to-peer redirection at all"
        assert pci["functions"][port]["acs_ctl"] == {"known": expected}


def test_a_card_that_is_removed_and_found_again_is_a_card_again(vm):
    for address in (GPUS[1], AUDIO[1]):
        vm.write(f"{PCI}/{address}/remove", "1")
    assert vm.links([GPUS[1], AUDIO[1]]) == {GPUS[1]: None, AUDIO[1]: None}
    vm.write("/sys/bus/pci/rescan", "1")
    vm.wait_for(lambda: vm.links() == ON_NVIDIA, "the card to be back on its drivers")
    assert vm.group(GPUS[1]) == vm.group(AUDIO[1])


def test_a_card_that_is_pulled_and_pushed_in_again_is_a_card_again(vm):
    vm.unplug(7)
    vm.plug(7)
    vm.wait_for(lambda: vm.links() == ON_NVIDIA, "the card to be back on its drivers")


def test_an_unbind_of_a_card_in_use_sleeps_in_the_kernel_until_its_holder_ends(vm):
    gpu = GPUS[0]
    holder = vm.hold("/dev/nvidia0")
    writer = vm.start_unbind(gpu)
    vm.wait_for(lambda: vm.task_state(writer) == ("D", "msleep"), "the writer to sleep in remove()")
    attempt = f"NVRM: Attempting to remove device {gpu} with non-zero usage count!"
    assert attempt in vm.kernel_log()
    vm.run(f"kill -KILL {writer}")
    assert vm.task_state(writer)[0] == "D", "SIGKILL ended what must not end"
    assert vm.driver(gpu) is None, "the link is gone before remove() returns"
    vm.release(holder)
    vm.wait_for(lambda: vm.output(writer)[0] is not None, "the unbind to return")
    vm.write("/sys/bus/pci/drivers_probe", gpu)
    assert vm.links() == ON_NVIDIA


def test_persistence_mode_holds_a_card_with_no_open_file_to_be_seen(vm):
    persistence = f"/proc/driver/nvidia/gpus/{GPUS[2]}/persistence"
    vm.write(persistence, "1")
    writer = vm.start_unbind(GPUS[2])
    vm.wait_for(lambda: vm.task_state(writer) == ("D", "msleep"), "the writer to sleep in remove()")
    vm.write(persistence, "0")
    vm.wait_for(lambda: vm.output(writer)[0] is not None, "the unbind to return")
    vm.write("/sys/bus/pci/drivers_probe", GPUS[2])
    assert vm.driver(GPUS[2]) == "nvidia"


def test_a_driver_that_is_loaded_waits_for_a_pending_unbind_whose_override_names_it(vm):
    """Why vfio-pci must be loaded before anything is unbound: afterwards modprobe may never return."""
    gpu = GPUS[3]
    vm.check("modprobe -r vfio-pci")
    holder = vm.hold("/dev/nvidia3")
    vm.write(f"{PCI}/{gpu}/driver_override", "vfio-pci")
    unbind = vm.start_unbind(gpu)
    vm.wait_for(lambda: vm.task_state(unbind)[1] == "msleep", "the writer to sleep in remove()")
    loader = vm.spawn(["/sbin/modprobe", "vfio-pci"])
    vm.wait_for(lambda: vm.task_state(loader)[0] == "D", "modprobe to wait for the card")
    vm.write(f"{PCI}/{gpu}/driver_override", "\n")
    vm.release(holder)
    for pid in (unbind, loader):
        vm.wait_for(lambda pid=pid: vm.output(pid)[0] is not None, f"pid {pid} to return")
    vm.write("/sys/bus/pci/drivers_probe", gpu)
    assert vm.links() == ON_NVIDIA


def test_a_probe_that_fails_is_seen_in_the_driver_link_alone(vm):
    gpu = GPUS[4]
    vm.write(f"{PCI}/{gpu}/driver/unbind", gpu)
    vm.module_parameter("fail_probe", "5")
    try:
        vm.write("/sys/bus/pci/drivers_probe", gpu)
        assert vm.driver(gpu) is None
    finally:
        vm.module_parameter("fail_probe", "0")
    vm.write("/sys/bus/pci/drivers_probe", gpu)
    assert vm.driver(gpu) == "nvidia"


def test_an_open_vfio_device_blocks_its_unbind_with_the_link_gone_already(vm):
    gpu, audio = GPUS[5], AUDIO[5]
    vm.check("modprobe vfio-pci")
    for address in (gpu, audio):
        vm.bind(address, "vfio-pci")
    holder = vm.hold_vfio(gpu)
    writer = vm.start_unbind(gpu)
    vm.wait_for(lambda: vm.task_state(writer)[1] == "vfio_unregister_group_dev", "the writer to wait")
    assert vm.driver(gpu) is None
    vm.release(holder)
    vm.wait_for(lambda: vm.output(writer)[0] == 0, "the unbind to return")
    vm.bind(audio, "snd_hda_intel")
    vm.bind(gpu, "nvidia")
    for address in (gpu, audio):
        vm.write(f"{PCI}/{address}/driver_override", "\n")
    assert vm.links() == ON_NVIDIA
    assert vm.override(gpu) == ""


def test_nvml_of_the_stand_in_driver_lists_the_cards_to_the_agent(vm):
    seen = json.loads(vm.check("agent observe --host real -o json"))
    gpus = seen["nvml"]["known"]["gpus"]
    assert sorted(gpus) == sorted(GPUS)
    assert seen["nvml"]["known"]["driver_version"] == {"known": "590.48.01"}


def test_the_agent_as_the_guests_service_says_that_the_host_is_as_specified(vm):
    vm.put("/etc/gpu-host-agent/spec.yaml", SPEC)
    vm.check("systemctl start gpu-host-agent", timeout=180)
    status = json.loads(vm.check("agent status -o json"))
    vm.check("systemctl stop gpu-host-agent")
    assert status["host"]["simulated"] == ""
    assert status["last_pass"]["sentence"] == "Converged: nothing to do."
    assert vm.links() == ON_NVIDIA


def hang_an_unbind(vm: VirtualMachine) -> None:
    vm.write(f"/proc/driver/nvidia/gpus/{GPUS[0]}/persistence", "1")
    unbind = vm.start_unbind(GPUS[0])
    vm.wait_for(lambda: vm.task_state(unbind) == ("D", "msleep"), "the writer to sleep in remove()")


def test_nothing_but_an_emergency_restart_ends_a_machine_with_a_hung_unbind():
    """The kernel's way down asks each device to shut down, under the lock that the unbind has; SysRq's does not."""
    with VirtualMachine(iommu="amd", gpus=1) as vm:
        assert vm.leave("reboot -ff", timeout=60), "without a hung unbind this does it"
        vm.start()
        hang_an_unbind(vm)
        assert vm.leave("echo b > /proc/sysrq-trigger", timeout=60)
        vm.start()
        hang_an_unbind(vm)
        assert not vm.leave("reboot -ff", timeout=15)


def test_an_amd_iommu_reports_dma_that_it_refuses_with_the_driver_as_prefix():
    with VirtualMachine(iommu="amd", gpus=1, faults=True, edu_cards=True) as vm:
        vm.wait_for(lambda: vm.driver(EDU_ROOT) == "nvidia", "the card that can do DMA to be bound")
        vm.dma(EDU_ROOT, int(vm.read(f"{PCI}/{GPUS[0]}/resource").split()[0], 0), "read")
        line = f"nvidia {EDU_ROOT}: AMD-Vi: Event logged [IO_PAGE_FAULT domain="
        vm.wait_for(lambda: any(line in said for said in vm.kernel_log()), "a page fault to be logged")


def test_an_intel_iommu_names_the_address_that_was_refused():
    with VirtualMachine(iommu="intel", gpus=1, edu_cards=True) as vm:
        bar = int(vm.read(f"{PCI}/{GPUS[0]}/resource").split()[0], 0)
        vm.dma(EDU_ROOT, bar, "write")
        line = f"[DMA Write NO_PASID] Request device [00:09.0] fault addr {bar:#x}"
        vm.wait_for(lambda: any(line in said for said in vm.kernel_log()), "a page fault to be logged")


def test_a_disk_that_persists_survives_a_reboot_and_a_power_cut_and_the_command_line_may_change():
    with VirtualMachine(iommu="amd", gpus=1, persist=True) as vm:
        vm.put("/var/lib/kept", "before the reboot")
        vm.reboot(append="iommu=pt")
        assert vm.read("/var/lib/kept") == "before the reboot"
        assert vm.group_type(GPUS[0]) == "identity"
        vm.check("sync")
        vm.stop()
        vm.start()
        assert vm.read("/var/lib/kept") == "before the reboot"


def test_a_card_can_be_the_boot_console():
    with VirtualMachine(iommu="amd", gpus=2, console_card=True) as vm:
        assert vm.read(f"{PCI}/{GPUS[0]}/boot_vga") == "1"
        vm.wait_for(lambda: vm.driver(GPUS[0]) == "nvidia", "the console's card to be on nvidia")


def test_without_an_iommu_there_are_no_groups():
    with VirtualMachine(iommu=None, gpus=1) as vm:
        assert vm.group(GPUS[0]) is None
