"""The unit's sandbox: what the agent needs works in it, everything else is refused, and the score says so too."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.agent_unit import NAME, AgentUnit
from tests.system.booted_systemd import TREE
from tests.system.requirements import need
from tests.system.sandbox_probe import HOME, needed, refused

pytestmark = pytest.mark.system
HIGHEST = 4.0  # exposure by systemd-analyze security: 0 is none, 10 is all
CAPABILITIES = {"sys_admin": 21, "sys_rawio": 17, "sys_ptrace": 19, "dac_read_search": 2, "syslog": 34}
OUT = "/run/probe.json"
PYTHON = (
    "/usr/bin/python3"  # the probe needs nothing else, and that of the tests may be in a home that is hidden
)
PROBE = """[Service]
Type=oneshot
WatchdogSec=0
Restart=no
ExecStart=
ExecStart={python} {tree}/tests/system/sandbox_probe.py {holder}
StandardOutput=truncate:{out}
"""
READ_ONLY = {
    "write a program", "write a library", "write the accounts", "write the spec", "write a boot file",
    "write a home", "write another's state", "make a cgroup",
}  # fmt: skip
NO_FAMILY = {"raw packets", "another address family"}
BY_THE_RING = {"load a module", "unload a module"}  # it has no such capability itself
NOT_OWNED = {"write another user's file"}


@pytest.fixture
def holder(unit: AgentUnit) -> Iterator[int]:
    """A process of another user with a file open, and a file that only that user may read."""
    need(Path(PYTHON).exists(), f"needs {PYTHON}: apt-get install python3")
    unit.ring.do("install", "-o", "nobody", "-m", "600", "/dev/null", "/etc/systemd/system/of-nobody.conf")
    command = ["sh", "-c", "exec sleep 1000 3</etc/hostname"]
    unit.ring.do("systemd-run", "--unit=holder", "--property=User=nobody", "--service-type=exec", *command)
    try:
        yield int(unit.ring.show("holder.service")["MainPID"])
    finally:
        unit.ring.run(["systemctl", "stop", "holder.service"])
        unit.ring.do("rm", "/etc/systemd/system/of-nobody.conf")


def probed(unit: AgentUnit, holder: int, more: str = "") -> dict[str, dict[str, str]]:
    unit.ring.do("mkdir", "-p", "/boot", "/lib/modules/probe", f"{HOME}/probed")
    unit.ring.put("/dev/kmsg", "6,1,1,-;a line of the kernel\n")
    unit.drop_in(PROBE.format(python=PYTHON, tree=TREE, holder=holder, out=OUT) + more)
    unit.systemctl("start")
    found: dict[str, dict[str, str]] = json.loads(unit.ring.read(OUT))
    unit.ring.do("rm", OUT)
    return found


def expected_refusal(attempt: str) -> str:
    if attempt in READ_ONLY:
        return "EROFS"
    if attempt in NO_FAMILY:
        return "EAFNOSUPPORT"
    return "EACCES" if attempt in NOT_OWNED else "EPERM"


def test_the_sandbox_allows_what_the_agent_needs_and_refuses_the_rest(unit: AgentUnit, holder: int) -> None:
    found = probed(unit, holder)
    assert found["needed"] == dict.fromkeys(needed(0), "ok")
    assert found["refused"] == {attempt: expected_refusal(attempt) for attempt in refused(0)}


def test_the_sandbox_leaves_exactly_the_capabilities_that_the_unit_gives_reasons_for(
    unit: AgentUnit, holder: int
) -> None:
    status = probed(unit, holder)["status"]
    assert int(status["CapEff"], 16) == sum(1 << number for number in CAPABILITIES.values())
    assert status["CapBnd"] == status["CapPrm"] == status["CapEff"]
    assert status["NoNewPrivs"] == "1"


@pytest.mark.parametrize(
    ("setting", "lost", "error"),
    [
        ("ProtectKernelTunables=yes", "write to a bus in sysfs", "EROFS"),
        ("ProtectKernelLogs=yes", "read the kernel log", "ENODATA"),
        ("ProtectKernelModules=yes", "list the modules that there are", "ENODATA"),
        ("ProtectHome=yes", "read a home", "ENODATA"),
        ("CapabilityBoundingSet=~CAP_SYS_PTRACE", "read another user's open files", "EACCES"),
        ("CapabilityBoundingSet=~CAP_DAC_READ_SEARCH", "read another user's file", "EACCES"),
        ("RestrictAddressFamilies=~AF_NETLINK", "hear uevents", "EAFNOSUPPORT"),
    ],
)
def test_every_relaxation_is_needed_because_without_it_the_agent_loses_something(
    unit: AgentUnit, holder: int, setting: str, lost: str, error: str
) -> None:
    found = probed(unit, holder, f"{setting}\n")["needed"]
    assert found[lost] == error


def test_nothing_the_sandbox_refuses_would_be_refused_anyway(unit: AgentUnit, holder: int) -> None:
    """Without this the refusals prove nothing: the same attempts, with the sandbox taken off."""
    found = probed(unit, holder, OPEN)["refused"]
    assert {
        attempt: outcome for attempt, outcome in found.items() if attempt not in BY_THE_RING
    } == dict.fromkeys(set(refused(0)) - BY_THE_RING, "ok")


def test_the_exposure_that_systemd_computes_is_at_most_four(
    unit: AgentUnit, capsys: pytest.CaptureFixture[str]
) -> None:
    out = unit.ring.do("systemd-analyze", "security", "--no-pager", NAME)
    match = re.search(r"Overall exposure level for \S+: ([0-9.]+)", out)
    assert match, out
    with capsys.disabled():
        print(f"\nsystemd-analyze security: {match[1]}")
    assert float(match[1]) <= HIGHEST, out


OPEN = """ProtectSystem=no
ReadWritePaths=
ProtectHome=no
PrivateTmp=no
PrivateMounts=no
ProtectControlGroups=no
ProtectClock=no
ProtectHostname=no
CapabilityBoundingSet=
CapabilityBoundingSet=~
NoNewPrivileges=no
RestrictAddressFamilies=
RestrictNamespaces=no
RestrictRealtime=no
RestrictSUIDSGID=no
LockPersonality=no
SystemCallFilter=
SystemCallArchitectures=
"""
