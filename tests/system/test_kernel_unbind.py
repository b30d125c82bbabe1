"""The unbind that never returns, on a real kernel: the agent is the guest's service. Tests follow one another.

A card is held where no look at the processes finds it: its open file is under way in a socket. So the agent takes it
for free, and the driver's remove() sleeps until that file is closed.
"""

import json
import re
from collections.abc import Iterator

import pytest

from tests.system.guest_agent import UNIT
from tests.system.operating import Operated, Write
from tests.system.vm.machine import AUDIO, GPUS, PCI, VirtualMachine

pytestmark = pytest.mark.system

STUCK, MOVES, RESTARTED, FOREIGN = GPUS[:4]
_CGROUP = "/gpu.slice/gpu-host.slice/gpu-host-agent.slice/gpu-host-agent-unbind.slice"
_IN = " in, seconds to stop and to start, on an emulated processor"
_MEMORY = "/var/lib/gpu-host-agent/memory.json"


@pytest.fixture(scope="module")
def host() -> Iterator[Operated]:
    with VirtualMachine(iommu="amd", gpus=4, persist=True) as vm:
        # As the trace's clock, and so comparable with what the agent writes down.
        vm.write("/sys/kernel/tracing/trace_clock", "mono")
        operated = Operated(vm)
        operated.start()
        yield operated


def hide(host: Operated, *paths: str) -> int:
    """A process that keeps these open and shows none of them: its pid."""
    pid = host.vm.spawn_code("hold_hidden", *paths)
    shown = host.vm.check(f"ls -l /proc/{pid}/fd")
    assert "nvidia" not in shown
    assert "vfio" not in shown
    return pid


def node(host: Operated, gpu: str) -> str:
    return f"/dev/nvidia{host.minors()[gpu]}"


def unbind_unit(gpu: str) -> str:
    return f"gpu-host-agent-unbind-{gpu}.service"


def unbinder(host: Operated, gpu: str) -> int:
    """The pid of the process that unbinds it; 0 where there is none."""
    try:
        return int(host.vm.read(f"/sys/fs/cgroup{_CGROUP}/{unbind_unit(gpu)}/cgroup.procs") or 0)
    except FileNotFoundError:
        return 0


def wait_until_stuck(host: Operated, gpu: str, where: tuple[str, str] = ("D", "msleep")) -> int:
    """Until the agent's unbind of it sleeps there: its pid."""
    host.wait(lambda: host.vm.task_state(unbinder(host, gpu)) == where, f"the unbind of {gpu} to sleep")
    return unbinder(host, gpu)


def unbinds(host: Operated, gpu: str) -> int:
    return host.writes().count(Write("unbind", gpu))


def assert_left_alone(host: Operated, gpu: str) -> None:
    """One unbind was ever written, the driver was asked once, and nothing touches the device afterwards."""
    written = [write for write in host.writes() if write.device == gpu]
    assert written[-1] == Write("unbind", gpu)
    assert written.count(Write("unbind", gpu)) == 1
    attempts = [line for line in host.vm.kernel_log() if "non-zero usage count" in line and gpu in line]
    assert len(attempts) == 1
    started = host.vm.check(f"journalctl -b --no-pager -o cat -u {unbind_unit(gpu)}").count("Starting ")
    assert started == 1


def note(host: Operated, gpu: str) -> str:
    return str(next(g["note"] for g in host.status()["gpus"] if g["address"] == gpu))


def restart_seconds(host: Operated) -> tuple[float, float]:
    """Restart the agent: what its end and what its start took, by systemd's clock."""
    host.restart()
    names = ("ActiveExit", "InactiveEnter", "InactiveExit", "ActiveEnter")
    shown = host.vm.check(f"systemctl show {UNIT}" + "".join(f" -p {n}TimestampMonotonic" for n in names))
    at = dict(line.split("TimestampMonotonic=") for line in shown.splitlines())
    leaves, gone, starts, ready = (int(at[name]) / 1e6 for name in names)
    assert leaves < gone <= starts < ready
    return gone - leaves, ready - starts


def test_B1_an_unbind_of_a_card_held_out_of_sight_is_journalled_first_and_hangs_outside_the_agent(
    host, record_property
):
    host.wait_passes(1)
    record_property("the agent restarts" + _IN, restart_seconds(host))
    hide(host, node(host, STUCK))
    host.forget_writes()
    host.edit([STUCK])
    pid = wait_until_stuck(host, STUCK)
    assert host.vm.driver(STUCK) is None, "the driver link goes first"
    assert host.vm.check(f"systemctl show -P ActiveState {unbind_unit(STUCK)}").strip() == "activating"
    assert host.vm.read(f"/proc/{pid}/cgroup") == f"0::{_CGROUP}/{unbind_unit(STUCK)}"
    noted = json.loads(host.vm.read(_MEMORY))["unbinding"][STUCK]["at"]
    assert f"driver-binding/bind/{STUCK}" in host.intents()
    trace = host.vm.check("cat /sys/kernel/tracing/trace")
    written = re.search(r" (\d+\.\d+): unbind:", trace)
    assert written is not None, trace
    ahead = float(host.vm.python("import time; print(time.time() - time.monotonic())"))
    assert noted < float(written[1]) + ahead


def test_B1_after_its_deadline_the_card_waits_for_a_reboot_and_the_blocked_task_is_named(host):
    found = host.wait_condition("DriversBound", "False", "RebootRequired", text="state D in msleep")
    assert STUCK in found["message"]
    assert "echo b > /proc/sysrq-trigger" in found["next_step"]
    assert STUCK in json.loads(host.vm.read(_MEMORY))["quarantine"]
    assert "RebootRequired" in note(host, STUCK)
    health = host.condition("GpusHealthy")
    assert (health["status"], health["reason"]) == ("False", "GpuFault")


def test_B1_the_other_cards_are_managed_beside_it_and_the_status_stays_fresh(host):
    host.edit([STUCK, MOVES])
    host.wait(
        lambda: host.vm.links([MOVES, AUDIO[1]]) == dict.fromkeys((MOVES, AUDIO[1]), "vfio-pci"),
        "another card to move",
    )
    first = host.status()["published_at"]
    host.wait_passes(2)
    status = host.status()
    assert status["published_at"] > first
    said = {gpu["address"]: gpu["driver"] for gpu in status["gpus"]}
    assert said[MOVES] == "vfio-pci"
    assert said[STUCK].startswith("none")
    assert_left_alone(host, STUCK)


def test_B1_beside_the_hung_unbind_the_agent_restarts_and_still_knows(host, record_property):
    before = unbinder(host, STUCK)
    host.wait_passes(1)
    record_property("the agent restarts beside a hung unbind" + _IN, restart_seconds(host))
    assert host.condition("DriversBound")["reason"] == "RebootRequired"
    assert "state D in msleep" in note(host, STUCK)
    assert unbinder(host, STUCK) == before
    host.wait_passes(2)
    assert_left_alone(host, STUCK)


def test_B1_an_agent_restarted_while_it_waits_for_an_unbind_does_not_write_it_again(host, record_property):
    hide(host, node(host, RESTARTED))
    host.edit([STUCK, MOVES, RESTARTED])
    wait_until_stuck(host, RESTARTED)
    record_property("the agent restarts while it waits for an unbind" + _IN, restart_seconds(host))
    host.wait(lambda: "RebootRequired" in note(host, RESTARTED), "the next agent to know of the unbind")
    assert "state D in msleep" in note(host, RESTARTED)
    host.wait_passes(2)
    assert_left_alone(host, RESTARTED)


def test_B1_an_unbind_that_somebody_else_wrote_is_seen_named_and_waited_for(host):
    holder = hide(host, node(host, FOREIGN))
    host.forget_writes()
    shell = host.vm.start_unbind(FOREIGN)
    host.vm.wait_for(lambda: host.vm.task_state(shell) == ("D", "msleep"), "the shell to sleep in remove()")
    host.wait(lambda: "has not returned" in note(host, FOREIGN), "the agent to see it")
    assert FOREIGN in host.condition("GpusHealthy")["message"]
    host.wait_passes(2)
    assert [w for w in host.writes() if w.device == FOREIGN] == [Write("unbind", FOREIGN)], "the shell's own"
    host.vm.release(holder)
    host.wait(lambda: host.vm.driver(FOREIGN) == "nvidia", "the agent to bind it again")
    host.wait(lambda: note(host, FOREIGN) == "", "nothing more to be said of it")


def test_B7_a_card_whose_vfio_device_is_open_is_refused_and_its_holder_named(host):
    holder = host.vm.hold_vfio(MOVES)
    host.forget_writes()
    host.edit([STUCK, RESTARTED])
    host.wait(
        lambda: f"pid {holder} " in host.status().get("plan", {}).get("text", ""), "the holder to be named"
    )
    host.wait_passes(2)
    assert not [w for w in host.writes() if w.device in (MOVES, AUDIO[1])]
    before = host.status()["spec"]["generation"]
    host.edit([STUCK, MOVES, RESTARTED])
    host.wait(lambda: host.status()["spec"]["generation"] > before, "the spec to be in force")
    host.vm.release(holder)


def test_B1_a_vfio_card_opened_in_the_last_moment_moves_once_it_is_let_go_whatever_befell_the_agent(host):
    holder = hide(host, f"vfio:{MOVES}")
    host.forget_writes()
    host.edit([STUCK, RESTARTED])
    pid = wait_until_stuck(host, MOVES, ("S", "vfio_unregister_group_dev"))
    host.vm.check(f"systemctl kill -s KILL {UNIT}")
    host.wait(
        lambda: "state S in vfio_unregister_group_dev" in note(host, MOVES), "the next agent to know of it"
    )
    assert unbinder(host, MOVES) == pid
    assert unbinds(host, MOVES) == 1
    host.vm.release(holder)
    host.wait(lambda: host.vm.driver(MOVES) == "nvidia", "the card to move after all")
    host.wait(lambda: host.vm.driver(AUDIO[1]) == "snd_hda_intel", "and the rest of it")
    host.wait(lambda: note(host, MOVES) == "", "nothing more to be said of it")
    assert host.vm.override(MOVES) == ""
    assert unbinds(host, MOVES) == 1


def test_B1_the_reboot_that_the_agent_asks_for_works_and_ends_the_quarantine(host):
    """By the next step's own words: the kernel's orderly way down may wait for the device."""
    host.edit([STUCK, RESTARTED, MOVES])
    host.wait(lambda: host.vm.driver(AUDIO[1]) == "vfio-pci", "the rules to be written, and a card to move")
    host.vm.reboot("sync; echo b > /proc/sysrq-trigger", timeout=60)
    given = [STUCK, MOVES, RESTARTED]
    links = host.vm.links()
    assert {a for a, driver in links.items() if driver == "vfio-pci"} == {*given, *AUDIO[:3]}
    assert host.vm.read(f"{PCI}/{STUCK}/driver_override") == "vfio-pci"
    host.vm.check(f"systemctl start {UNIT}", timeout=300)
    host.wait_bound(given)
    assert json.loads(host.vm.read(_MEMORY))["quarantine"] == {}
