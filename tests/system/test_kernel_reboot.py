"""What outlives a reboot, on a real kernel with a disk that is kept. Tests follow one another.

The agent's unit is not enabled in the guest: what the first moments of a boot leave behind is seen without the agent.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.system.guest_agent import UNIT
from tests.system.operating import Operated
from tests.system.vm.machine import AUDIO, GPUS, VirtualMachine

pytestmark = pytest.mark.system

RULES = "/etc/udev/rules.d/50-gpu-host-agent.rules"
CARDS, SOUND = GPUS[:4], AUDIO[:4]
GIVEN = CARDS[2:]
BOUND = {
    **{gpu: "vfio-pci" if gpu in GIVEN else "nvidia" for gpu in CARDS},
    **{audio: "vfio-pci" if audio in SOUND[2:] else "snd_hda_intel" for audio in SOUND},
}
_HOLDER = "metrics.service"


@dataclass
class Booted:
    """The guest, and its agent in the boot that it is in."""

    vm: VirtualMachine
    host: Operated

    def reboot(self, command: str = "systemctl reboot") -> None:
        """The agent is not started."""
        self.vm.reboot(command)
        assert self.vm.run(f"systemctl is-active {UNIT}").out.strip() == "inactive"
        self.host = Operated(self.vm)

    def start_agent(self) -> None:
        self.vm.check(f"systemctl start {UNIT}", timeout=300)

    def kept(self, name: str) -> dict[str, Any]:
        """A file of the agent's state."""
        found: dict[str, Any] = json.loads(self.vm.read(f"/var/lib/gpu-host-agent/{name}.json"))
        return found

    def boot_id(self) -> str:
        return self.vm.read("/proc/sys/kernel/random/boot_id")


@pytest.fixture(scope="module")
def guest() -> Iterator[Booted]:
    with VirtualMachine(iommu="amd", gpus=4, persist=True) as vm:
        booted = Booted(vm, Operated(vm))
        booted.host.start(GIVEN)
        yield booted


def test_B10_after_a_reboot_the_cards_are_bound_before_the_agent_runs_and_it_writes_nothing(guest):
    # Forged: no emulation loses a card.
    guest.vm.forge_kernel_line(f"NVRM: Xid (PCI:{GPUS[0][:-2]}): 79, GPU has fallen off the bus.")
    guest.host.wait_condition("GpusHealthy", "False", "GpuFault", text=GPUS[0])
    assert GPUS[0] in guest.kept("memory")["quarantine"]
    done = guest.host.intents()
    guest.reboot()
    assert guest.vm.links(BOUND) == BOUND
    # Forged, and written before the agent looks: the position in the other boot's log must not hide it.
    guest.vm.forge_kernel_line(
        f"nvidia {GPUS[1]}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0003 address=0x80000040 flags=0x0020]"
    )
    guest.start_agent()
    guest.host.wait_bound(GIVEN)
    guest.host.wait_passes(1)
    assert guest.host.writes() == []
    assert guest.host.intents() == done


def test_B12_a_quarantine_ends_with_the_boot_that_it_was_made_in(guest):
    assert guest.kept("memory")["quarantine"] == {}
    assert guest.host.condition("GpusHealthy")["status"] == "True"


def test_P7_the_new_boots_kernel_log_is_read_from_its_beginning_and_the_old_ones_is_forgotten(guest):
    kept = guest.kept("kernel-log")
    assert kept["cursor"].startswith(f"{guest.boot_id()}:")
    assert [(event["sort"], event["address"]) for event in kept["events"]] == [("page-fault", GPUS[1])]


def test_B10_without_the_rules_all_cards_come_up_on_nvidia_and_the_agent_repairs_both(guest):
    rules = guest.vm.read(RULES)
    guest.vm.check(f"systemctl stop {UNIT}; rm {RULES}")
    guest.reboot()
    assert set(guest.vm.links(CARDS).values()) == {"nvidia"}
    guest.start_agent()
    guest.host.wait_bound(GIVEN)
    assert guest.vm.read(RULES) == rules


def test_B3_a_unit_stopped_for_an_unbind_that_hung_is_started_again_after_the_reboot(guest):
    vm, mine = guest.vm, GPUS[0]
    node = f"/dev/nvidia{guest.host.minors()[mine]}"
    opens = f"[ ! -e {node} ] || exec 3<>{node}; exec sleep infinity"
    vm.put(f"/etc/systemd/system/{_HOLDER}", f"[Service]\nExecStart=/bin/bash -c '{opens}'\n")
    vm.check(f"systemctl daemon-reload; systemctl start {_HOLDER}")
    vm.spawn_code("hold_hidden", node)
    guest.host.edit([mine, *GIVEN], quiesce=[_HOLDER])
    guest.host.wait(lambda: vm.driver(mine) is None, "the unbind to begin")
    assert list(guest.kept("memory")["stopped_units"]) == [_HOLDER]
    assert mine in guest.kept("memory")["unbinding"]
    guest.reboot("sync; echo b > /proc/sysrq-trigger")
    assert vm.links([mine, AUDIO[0]]) == dict.fromkeys((mine, AUDIO[0]), "vfio-pci")
    assert vm.run(f"systemctl is-active {_HOLDER}").out.strip() == "inactive"
    guest.start_agent()
    guest.host.wait_bound([mine, *GIVEN])
    guest.host.wait(lambda: guest.kept("memory")["stopped_units"] == {}, "nothing to be owed to anybody")
    assert vm.check(f"systemctl is-active {_HOLDER}").strip() == "active"
    assert guest.kept("memory")["unbinding"] == {}
