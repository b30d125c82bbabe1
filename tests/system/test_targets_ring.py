"""The contract of targets in front of a real systemd, by every way the agent has to reach one."""

from collections.abc import AsyncIterator, Iterator

import pytest

from agent.host.command_target import CommandTarget
from agent.host.local_target import LocalTarget
from agent.host.systemctl import SystemctlManager
from agent.host.systemd_bus import BusManager
from agent.host.target_names import BY_PID_1
from agent.ports import TargetPort
from tests.contract.target_contract import FOLDER, UNIT_FILE, FilesContract, Place, UnitsContract
from tests.system.booted_systemd import BootedSystemd
from tests.system.test_command_target_ring import entering
from tests.system.test_manager_ring import root_of

pytestmark = pytest.mark.system
UNIT = "contract-ring.service"
WAYS = ["host by D-Bus", "host by systemctl", "container", "container by PID 1"]


@pytest.fixture(params=WAYS)
async def target(ring: BootedSystemd, request: pytest.FixtureRequest) -> AsyncIterator[TargetPort]:
    bus = BusManager(root_of(ring))
    ways: dict[str, TargetPort] = {
        "host by D-Bus": LocalTarget(root_of(ring), manager=bus),
        "host by systemctl": LocalTarget(
            root_of(ring), manager=SystemctlManager(entering(ring), root_of(ring))
        ),
        "container": CommandTarget("lxc:1", entering(ring)),
        "container by PID 1": CommandTarget("lxc:1", (*entering(ring), *BY_PID_1)),
    }
    yield ways[request.param]
    await bus.close()
    ring.do("rm", "-rf", FOLDER)


class TestFilesInTheRing(FilesContract):
    pass


class TestUnitsInTheRing(UnitsContract):
    @pytest.fixture
    def place(self, ring: BootedSystemd, target: TargetPort) -> Iterator[Place]:
        ring.put(f"/etc/systemd/system/{UNIT}", UNIT_FILE)
        ring.do("systemctl", "daemon-reload")
        ring.do("systemctl", "enable", UNIT)
        yield Place(target, UNIT)
        for verb in (("kill", "--signal=KILL"), ("stop",), ("reset-failed",), ("disable",)):
            ring.run(["systemctl", *verb, UNIT])
        ring.do("rm", "-rf", f"/etc/systemd/system/{UNIT}", f"/etc/systemd/system/{UNIT}.d")
        ring.do("systemctl", "daemon-reload")
