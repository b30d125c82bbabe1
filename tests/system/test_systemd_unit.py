"""The shipped unit under a real systemd: readiness, reload, stop, restart, watchdog, and its order among others."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.agent_unit import NAME, AgentUnit
from tests.system.booted_systemd import BootedSystemd
from tests.system.requirements import need

pytestmark = pytest.mark.system
GATE = """[Service]
ExecStart=
ExecStart=/bin/sh -c "until [ -e /run/go ]; do sleep 0.1; done; exec agent run --host real"
"""
IMPATIENT = "[Service]\nTimeoutStopSec=3s\n"  # so that a unit that waits for a child fails soon
SAVED = "apiVersion: gpu-host/v1\nkind: GpuHost\nmetadata: {name: ring}\nspec: {policy: {resync: 20s}}\n"


def test_the_unit_file_has_nothing_that_systemd_objects_to(unit: AgentUnit) -> None:
    assert unit.ring.run(["systemd-analyze", "verify", NAME]) == (0, "")


def test_the_unit_can_be_enabled_and_disabled(unit: AgentUnit) -> None:
    unit.systemctl("enable")
    assert NAME in unit.show_of("multi-user.target")["Wants"]
    unit.systemctl("disable")
    assert NAME not in unit.show_of("multi-user.target")["Wants"]


@pytest.mark.parametrize(
    "later", ["pve-guests.service", "libvirtd.service", "libvirt-guests.service", "virtqemud.service"]
)
def test_guests_start_only_after_the_agent_is_ready(unit: AgentUnit, later: str) -> None:
    unit.drop_in(GATE)
    unit.ring.put(
        f"/etc/systemd/system/{later}", "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
    )
    unit.ring.do("systemctl", "daemon-reload")
    try:
        unit.ring.do("systemctl", "start", "--no-block", NAME, later)
        unit.until(lambda found: found["MainPID"] != "0")
        assert unit.show_of(later)["ActiveState"] == "inactive"
        assert unit.show_of(later)["Job"] != "0", "it waits, and was not forgotten"
        unit.ring.do("touch", "/run/go")
        unit.until(lambda _: unit.show_of(later)["ActiveState"] == "active")
        assert unit.show()["ActiveState"] == "active"
    finally:
        unit.ring.run(["systemctl", "stop", later])
        unit.ring.do("rm", "-f", f"/etc/systemd/system/{later}", "/run/go")


def test_the_unit_is_active_only_when_the_agent_has_said_so(unit: AgentUnit) -> None:
    unit.drop_in(GATE)
    unit.ring.do("systemctl", "start", "--no-block", NAME)
    assert unit.until(lambda found: found["MainPID"] != "0")["ActiveState"] == "activating"
    unit.ring.do("touch", "/run/go")
    try:
        found = unit.until(lambda found: found["ActiveState"] == "active")
        assert found["SubState"] == "running"
    finally:
        unit.ring.do("rm", "/run/go")


def test_on_a_host_without_gpus_the_agent_comes_up_ready_inside_its_sandbox(unit: AgentUnit) -> None:
    unit.systemctl("start")
    status = unit.status()
    assert {c["type"]: c["status"] for c in status["conditions"] if c["status"] != "True"} == {}
    assert status["ready"] == "True"
    assert status["host"]["simulated"] == ""
    assert unit.show()["StatusText"] == "Converged: nothing to do."


def test_a_reload_is_a_pass_and_the_same_process_goes_on(unit: AgentUnit) -> None:
    unit.systemctl("start")
    pid = unit.pid()
    unit.systemctl("reload")
    found = unit.until(lambda found: found["ActiveState"] == "active")
    assert found["ReloadResult"] == "success"
    assert int(found["MainPID"]) == pid
    unit.until(lambda _: '"trigger": "SIGHUP"' in unit.journal())


def test_a_saved_spec_is_read_without_a_reload(unit: AgentUnit) -> None:
    unit.systemctl("start")
    before = unit.status()["spec"]["generation"]
    unit.ring.put("/etc/gpu-host-agent/spec.yaml", SAVED)
    unit.until(lambda _: unit.status()["spec"]["generation"] == before + 1)


def test_a_stop_is_clean_and_the_status_says_that_nobody_watches(unit: AgentUnit) -> None:
    unit.systemctl("start")
    unit.systemctl("stop")
    found = unit.show()
    assert (found["ActiveState"], found["Result"], found["ExecMainStatus"]) == ("inactive", "success", "0")
    status, out = unit.ring.run(["agent", "status", "--host", "real"])
    assert status == 4
    assert "NOT WATCHED" in out
    assert "agent stopped" in unit.journal()


def test_a_killed_agent_is_started_again_and_knows_what_it_knew(unit: AgentUnit) -> None:
    unit.systemctl("start")
    first, before = unit.pid(), unit.status()
    history = unit.ring.read("/var/lib/gpu-host-agent/journal.jsonl")
    unit.ring.do("kill", "-KILL", str(first))
    assert unit.ring.read("/run/gpu-host-agent/status.json"), "the status outlives the agent"
    found = unit.until(
        lambda found: found["ActiveState"] == "active" and int(found["MainPID"]) not in (0, first)
    )
    assert found["NRestarts"] == "1"
    after = unit.status()
    assert after["pid"] == int(found["MainPID"])
    assert after["spec"] == before["spec"]
    assert unit.ring.read("/var/lib/gpu-host-agent/journal.jsonl").startswith(history)


def test_an_agent_that_gives_no_sign_of_life_is_killed_and_started_again(unit: AgentUnit) -> None:
    unit.drop_in("[Service]\nWatchdogSec=2s\n")
    unit.systemctl("start")
    first = unit.pid()
    unit.ring.do("kill", "-STOP", str(first))
    found = unit.until(
        lambda found: found["ActiveState"] == "active" and int(found["MainPID"]) not in (0, first)
    )
    assert int(found["NRestarts"]) >= 1
    assert "Watchdog timeout (limit 2s)!" in unit.journal()
    assert unit.ring.run(["test", "-e", f"/proc/{first}"])[0] == 1


def test_an_agent_that_lives_is_not_killed_by_the_watchdog(unit: AgentUnit) -> None:
    unit.drop_in("[Service]\nWatchdogSec=3s\n")
    unit.systemctl("start")
    pid, fed = unit.pid(), "WatchdogTimestampMonotonic"
    first = int(unit.show()[fed])
    found = unit.until(lambda found: int(found[fed]) > first + 6_000_000)
    assert (int(found["MainPID"]), found["NRestarts"]) == (pid, "0")


def test_B1_a_child_that_ignores_every_request_to_end_does_not_hold_up_a_restart(
    unit: AgentUnit, capsys: pytest.CaptureFixture[str]
) -> None:
    unit.drop_in(IMPATIENT)
    unit.systemctl("start")
    first = unit.pid()
    child = child_of_the_unit(unit, "trap '' TERM HUP INT; while :; do sleep 1; done")
    try:
        seconds = restarted(unit, first)
        assert alive(unit, child)
    finally:
        unit.ring.do("kill", "-KILL", str(child))
    with capsys.disabled():
        print(f"\nrestart beside a child that ignores SIGTERM: {seconds:.2f} s")


def test_B1_a_child_that_not_even_SIGKILL_ends_does_not_hold_up_a_restart(
    unit: AgentUnit, capsys: pytest.CaptureFixture[str]
) -> None:
    """A frozen process stands for one that hangs in a driver: the kernel delivers no signal to either."""
    need(
        "freezer" in Path("/proc/cgroups").read_text(), "needs the cgroup v1 freezer in this machine's kernel"
    )
    unit.drop_in(IMPATIENT)
    unit.systemctl("start")
    first = unit.pid()
    child = child_of_the_unit(unit, "while :; do sleep 1; done")
    with frozen(unit.ring, child):
        unit.ring.do("kill", "-KILL", str(child))
        seconds = restarted(unit, first)
        assert alive(unit, child), "it was not frozen, so this proves nothing"
        assert unit.status()["ready"] == "True"
    with capsys.disabled():
        print(f"\nrestart beside a child that SIGKILL does not end: {seconds:.2f} s")


def test_the_agents_memory_is_bounded_and_a_child_that_is_ended_for_it_does_not_stop_the_agent(
    unit: AgentUnit,
) -> None:
    found = unit.show()
    assert (found["MemoryMax"], found["OOMPolicy"]) == (str(2 << 30), "continue")


def restarted(unit: AgentUnit, first: int) -> float:
    """Restart it; how many seconds it took until the new process was ready."""
    began = time.monotonic()
    unit.systemctl("restart", timeout=300)
    seconds = time.monotonic() - began
    assert unit.show()["ActiveState"] == "active"
    assert unit.pid() != first
    told = unit.journal()
    assert "left-over process" in told, "systemd saw no other process, so this proves nothing"
    assert "timed out" not in told, "systemd waited for the child"
    assert "still around" not in told, "systemd waited for the child"
    return seconds


def child_of_the_unit(unit: AgentUnit, script: str) -> int:
    """A process in the unit's cgroup, as a child of the agent would be."""
    procs = f"/sys/fs/cgroup{unit.show()['ControlGroup']}/cgroup.procs"
    inside = f"echo $$ >{procs}; {script}"
    started = unit.ring.do("sh", "-c", 'sh -c "$0" >/dev/null 2>&1 & echo $!', inside)
    pid = int(started)
    unit.until(lambda _: str(pid) in unit.ring.read(procs).split())
    return pid


def alive(unit: AgentUnit, pid: int) -> bool:
    return unit.ring.run(["grep", "-q", "^State:.[^Z]", f"/proc/{pid}/status"])[0] == 0


FREEZE = """
set -eu
mount -t cgroup -o freezer freezer "$1"
mkdir "$1/$2"
echo "$3" >"$1/$2/cgroup.procs"
echo FROZEN >"$1/$2/freezer.state"
until grep -q FROZEN "$1/$2/freezer.state"; do sleep 0.05; done
echo frozen
read _ || :
echo THAWED >"$1/$2/freezer.state"
until rmdir "$1/$2" 2>/dev/null; do sleep 0.05; done
"""


@contextlib.contextmanager
def frozen(ring: BootedSystemd, pid: int) -> Iterator[None]:
    """A process of the ring that no signal reaches. It is thawed at the end, even if this test is killed."""
    (ring.work / "freezer").mkdir(exist_ok=True)
    script = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", FREEZE, "sh"]
    with subprocess.Popen(
        [*script, str(ring.work / "freezer"), ring.name, str(pid_on_machine(ring, pid))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdin is not None
        try:
            assert keeper.stdout.readline() == b"frozen\n"
            yield
        finally:
            keeper.stdin.close()
            assert keeper.wait(30) == 0


def pid_on_machine(ring: BootedSystemd, pid: int) -> int:
    """What this machine calls a process of the ring."""
    space = Path(f"/proc/{ring.pid}/ns/pid").readlink()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            line = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:"))
            if line.split()[-1] == str(pid) and (status.parent / "ns/pid").readlink() == space:
                return int(status.parent.name)
    raise AssertionError(f"no process {pid} in the ring")
