"""The agent's udev rules beside an unbind that hangs, in a real kernel with a real udev."""

import pytest

from agent.core.binding import FunctionBinding, SlotBinding
from agent.core.fact import Absent, Known
from agent.core.resolve import Resolved
from agent.core.selection import Selection
from agent.core.unbind_unit import SLICE, unit_name
from agent.kinds.rebind import UDEV_RULES
from agent.kinds.udev_rules import udev_rules
from tests.system.vm.machine import GPUS, PCI, VirtualMachine

pytestmark = pytest.mark.system
HUNG, OTHER = GPUS[0], GPUS[1]


def add_events(vm: VirtualMachine) -> None:
    vm.check("udevadm trigger --action=add --subsystem-match=pci && udevadm settle --timeout=30", timeout=60)


def test_B1_an_event_of_the_bus_writes_nothing_to_a_card_whose_unbind_hangs_and_does_once_it_returned():
    with VirtualMachine(iommu="amd", gpus=2) as vm:
        slots = tuple(
            SlotBinding(
                a[:-2], "all", a, "vfio-pci", (FunctionBinding(a, Known("nvidia"), "vfio-pci", Absent()),)
            )
            for a in (HUNG, OTHER)
        )
        vm.put(UDEV_RULES, udev_rules(Resolved(Selection(), slots)))
        vm.check("modprobe vfio-pci && udevadm control --reload")
        persistence = f"/proc/driver/nvidia/gpus/{HUNG}/persistence"
        vm.write(persistence, "1")
        vm.check(
            f"systemd-run --no-block --unit={unit_name(HUNG)} --slice={SLICE} --service-type=oneshot"
            f" --remain-after-exit /bin/sh -c 'echo {HUNG} > {PCI}/{HUNG}/driver/unbind'"
        )
        vm.wait_for(lambda: vm.driver(HUNG) is None, "the unbind to be under way")
        add_events(vm)
        assert (vm.override(HUNG), vm.override(OTHER)) == ("", "vfio-pci")
        vm.write(persistence, "0")
        done = f"systemctl show -P SubState {unit_name(HUNG)}"
        vm.wait_for(lambda: vm.run(done).out.strip() == "exited", "the unbind to return")
        add_events(vm)
        assert (vm.override(HUNG), vm.driver(HUNG)) == ("vfio-pci", "vfio-pci")
