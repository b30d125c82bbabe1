from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.agent_unit import AgentUnit
from tests.system.booted_systemd import BootedSystemd, need_booted_systemd


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Figures that tests took down, and did not judge."""
    passed = terminalreporter.stats.get("passed", ())
    figures = [(name, value) for report in passed for name, value in report.user_properties]
    if figures:
        terminalreporter.section("figures")
    for name, value in figures:
        terminalreporter.write_line(f"{name}: {value}")


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
