from collections.abc import Iterator

import pytest

from tests.system.agent_unit import AgentUnit
from tests.system.booted_systemd import BootedSystemd, need_booted_systemd


@pytest.fixture(scope="session")
def ring() -> Iterator[BootedSystemd]:
    """A booted systemd, the same for all tests: each leaves it without units of its own."""
    need_booted_systemd()
    booted = BootedSystemd()
    try:
        yield booted
    finally:
        booted.close()


@pytest.fixture
def unit(ring: BootedSystemd) -> Iterator[AgentUnit]:
    """The agent's unit, installed and not started, on a host without GPUs."""
    installed = AgentUnit(ring)
    try:
        yield installed
    finally:
        installed.remove()
