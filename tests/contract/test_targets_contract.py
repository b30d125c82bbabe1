"""The contract of targets, on the places that need neither root nor another systemd."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.host.local_target import LocalTarget
from agent.ports import TargetPort
from tests.contract.hosts import simulated
from tests.contract.target_contract import UNIT_FILE, FilesContract, Place, UnitsContract
from tests.host.target_places import place as shell_place

FILES = ["simulated host", "simulated container", "local", "shell-busybox", "shell-dash", "shell-bash"]
UNIT = "target-contract.service"


@asynccontextmanager
async def made(kind: str, folder: Path) -> AsyncIterator[TargetPort]:
    sort, _, rest = kind.replace(" ", "-").partition("-")
    if sort == "simulated":
        async with simulated(folder) as subject:
            yield subject.ports.targets("host" if rest == "host" else "lxc:129")
    elif sort == "local":
        yield LocalTarget(folder)
    else:
        yield shell_place("tree", rest, folder).target()


class TestFiles(FilesContract):
    @pytest.fixture(params=FILES)
    async def target(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TargetPort]:
        async with made(request.param, tmp_path) as port:
            yield port


class TestUnits(UnitsContract):
    @pytest.fixture(params=["simulated host", "simulated container"])
    async def place(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
        async with made(request.param, tmp_path) as port:
            await port.write_file(f"/etc/systemd/system/{UNIT}", UNIT_FILE)
            await port.daemon_reload()
            yield Place(port, UNIT)
