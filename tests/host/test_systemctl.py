"""SystemctlManager with a systemctl and a systemd-run of our own, written in sh: real processes, a fake systemd."""

import errno
from pathlib import Path

import pytest

from agent.host.manager import TransientCommand
from agent.host.systemctl import SystemctlManager

# Units are files whose lines are what ``show`` prints; a unit without a file is not there.
SYSTEMCTL = """#!/bin/sh
cd "$UNITS" || exit 1
echo "systemctl $*" >>"$UNITS/calls"
verb=$1; shift
for unit; do :; done
case $verb in
  show) [ -f "$unit" ] && cat "$unit" || printf 'Id=%s\\nLoadState=not-found\\nActiveState=inactive\\n' "$unit" ;;
  start) [ -f "$unit" ] || { echo "Failed to start $unit: Unit $unit not found." >&2; exit 5; } ;;
  stop) rm -f "$unit" ;;
  kill) [ -f "$unit" ] || { echo "Failed to kill unit $unit: Unit $unit not loaded." >&2; exit 1; } ;;
  reset-failed) [ -f "$unit" ] || { echo "Failed to reset failed state: Unit $unit not loaded." >&2; exit 1; }
    rm "$unit" ;;
  daemon-reload) echo "Failed to reload daemon: Access denied" >&2; exit 1 ;;
esac
"""
SYSTEMD_RUN = """#!/bin/sh
echo "systemd-run $*" >>"$UNITS/calls"
printf 'Id=once.service\\nLoadState=loaded\\nActiveState=activating\\nSubState=start\\n' >"$UNITS/once.service"
"""
COMMAND = TransientCommand("once.service", ("/bin/echo", "a $HOME"), "Say it", {"Slice": "a.slice"})


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bin").mkdir()
        (root / "units").mkdir()
        for name, text in (("systemctl", SYSTEMCTL), ("systemd-run", SYSTEMD_RUN)):
            path = root / "bin" / name
            path.write_text(text)
            path.chmod(0o755)
        prefix = ("env", f"PATH={root}/bin:/usr/bin:/bin", f"UNITS={root}/units")
        self.manager = SystemctlManager(prefix, root)

    def unit(self, name: str, active: str, sub: str, more: str = "") -> None:
        text = f"Id={name}\nLoadState=loaded\nActiveState={active}\nSubState={sub}\n{more}"
        (self.root / "units" / name).write_text(text)

    def calls(self) -> list[str]:
        return [c for c in (self.root / "units/calls").read_text().splitlines() if " show " not in c]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


async def test_a_unit_is_read_behind_the_prefix_with_its_processes(machine: Machine):
    (machine.root / "sys/fs/cgroup/a.slice").mkdir(parents=True)
    (machine.root / "sys/fs/cgroup/cgroup.controllers").write_text("")
    (machine.root / "sys/fs/cgroup/a.slice/cgroup.procs").write_text("7\n")
    machine.unit("a.service", "active", "running", "MainPID=7\nControlGroup=/a.slice\nNeedDaemonReload=yes\n")
    unit = await machine.manager.unit("a.service")
    assert (unit.name, unit.active_state, unit.main_pid, unit.pids) == ("a.service", "active", 7, (7,))
    assert unit.needs_reload
    assert (await machine.manager.unit("none.service")).load_state == "not-found"


async def test_jobs_are_queued_and_not_waited_for(machine: Machine):
    machine.unit("a.service", "inactive", "dead")
    await machine.manager.start("a.service")
    await machine.manager.kill("a.service")
    await machine.manager.stop("a.service")
    assert machine.calls() == [
        "systemctl start --no-block -- a.service",
        "systemctl kill --signal=SIGKILL -- a.service",
        "systemctl stop --no-block -- a.service",
    ]


async def test_errors_have_systemctls_words_and_an_errno(machine: Machine):
    with pytest.raises(FileNotFoundError, match=r"Unit none\.service not found"):
        await machine.manager.start("none.service")
    with pytest.raises(PermissionError, match="Access denied"):
        await machine.manager.reload()


async def test_what_there_is_nothing_to_do_for_is_no_error(machine: Machine):
    await machine.manager.kill("none.service")
    await machine.manager.reset_failed("none.service")


async def test_a_command_is_handed_to_pid_1_word_for_word(machine: Machine):
    await machine.manager.run(COMMAND)
    (call,) = machine.calls()
    options, _, argv = call.partition(" -- ")
    assert argv == "/bin/echo a $$HOME"
    assert "--unit=once.service --description=Say it --service-type=oneshot" in options
    assert options.endswith("--remain-after-exit -p Slice=a.slice")


async def test_a_command_that_still_runs_is_not_started_again(machine: Machine):
    await machine.manager.run(COMMAND)
    with pytest.raises(OSError, match="still runs") as raised:
        await machine.manager.run(COMMAND)
    assert raised.value.errno == errno.EBUSY
    assert len([c for c in machine.calls() if c.startswith("systemd-run")]) == 1


@pytest.mark.parametrize("end", [("active", "exited"), ("failed", "failed")])
async def test_one_that_has_ended_makes_room(machine: Machine, end: tuple[str, str]):
    machine.unit("once.service", *end)
    await machine.manager.run(COMMAND)
    assert (await machine.manager.unit("once.service")).active_state == "activating"


async def test_a_machine_that_cannot_be_asked_is_an_error(tmp_path: Path):
    with pytest.raises(OSError):
        await SystemctlManager(("false",), tmp_path).unit("a.service")


@pytest.mark.parametrize(
    "said",
    [
        "Failed to start transient service unit: Connection timed out",
        "Failed to start transient service unit: Connection reset by peer",
        "Failed to start transient service unit: Transport endpoint is not connected",
    ],
)
async def test_where_systemd_run_got_no_answer_it_is_open_whether_the_command_starts(
    machine: Machine, said: str
):
    (machine.root / "bin/systemd-run").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    with pytest.raises(TimeoutError, match="Failed to start transient"):
        await machine.manager.run(COMMAND)


async def test_a_queued_command_of_which_systemd_then_says_nothing_may_have_started(machine: Machine):
    text = "#!/bin/sh\nprintf '#!/bin/sh\\necho no >&2; exit 1\\n' >\"$UNITS/../bin/systemctl\"\n"
    (machine.root / "bin/systemd-run").write_text(text)
    with pytest.raises(TimeoutError, match="nothing tells whether it started"):
        await machine.manager.run(COMMAND)
