"""Containers and other machines: the real script, run by real shells against real files."""

import asyncio
import base64
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent.core.fact import Absent, Known, Unknown
from agent.host import command_target, target_batch
from agent.host.command_target import NVML_EVERY, CommandTarget
from agent.host.container_network import container_address, shares_network
from agent.host.http_stream import parse_endpoint
from agent.host.real import real_host
from agent.host.target_names import prefix_for
from agent.host.target_script import Part, parts, script
from tests.host.fake_systemd import fake_systemd
from tests.host.target_places import Place, place, program
from tests.host.trees import Tree

T = TypeVar("T")
SHELLS = ("busybox", "dash", "bash")
PLACES = [("tree", shell) for shell in SHELLS] + [("machine", "dash"), ("machine", "bash")]
UNIT = "Id=a.service\nLoadState=loaded\nActiveState=active\nSubState=running\nMainPID=12\nResult=success\nExecMainStatus=0\nNRestarts=3\nNeedDaemonReload=yes\n"
few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each starts processes


@pytest.fixture(params=PLACES, ids="-".join)
def inside(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind, shell = request.param
    return place(kind, shell, tmp_path)


@pytest.fixture(params=SHELLS)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place("tree", request.param, tmp_path)


@pytest.fixture(params=["dash", "bash"])
def own_tools(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A tree whose tools a test can replace: busybox's shell runs its own, whatever PATH says."""
    return place("tree", request.param, tmp_path)


@pytest.fixture
def busybox_tree(tmp_path: Path) -> Place:
    return place("tree", "busybox", tmp_path)


@pytest.fixture
def machine(tmp_path: Path) -> Place:
    return place("machine", "dash", tmp_path)


@pytest.fixture
def tree_of_a_host(tmp_path: Path) -> Tree:
    made = Tree(tmp_path / "host")
    made.file(
        "proc/net/fib_trie", "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 192.0.2.7\n        /32 host LOCAL\n"
    )
    made.file("proc/net/if_inet6", "fd000000000000000000000000000007 04 40 00 82     eth0\n")
    return made


async def answer(read: Awaitable[T]) -> T | OSError:
    try:
        return await read
    except OSError as error:
        return error


# -- files ----------------------------------------------------------------------------------------------------------


async def test_a_file_is_written_whole_for_all_to_read_and_gone_when_removed(inside: Place):
    target, path = inside.target(), f"{inside.home}/new folder/it's a $(file)"
    assert await target.read_file(path) is None
    assert not await target.exists(path)
    await target.write_file(path, "first\n")
    await target.write_file(path, "tëxt\r\n'\"$`\\ \n\n")
    assert await target.read_file(path) == "tëxt\r\n'\"$`\\ \n\n"
    assert await target.exists(path)
    at = inside.at(path)
    assert at.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in at.parent.iterdir()] == [at.name]
    await target.remove_file(path)
    await target.remove_file(path)
    assert not await target.exists(path)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("x" * 300_000)
@example("part-0 0\npart-0 end\n\nEOF\n")
@few
def test_any_text_comes_back_as_it_was_written(text: str):
    with tempfile.TemporaryDirectory() as folder:
        made = place("machine", "dash", Path(folder))

        async def round_trip() -> str | None:
            target = made.target()
            await target.write_file(f"{folder}/file", text)
            return await target.read_file(f"{folder}/file")

        assert asyncio.run(round_trip()) == text


async def test_bytes_that_are_no_text_are_replaced_as_on_the_host(inside: Place):
    inside.write(f"{inside.home}/binary", b"\xff\0\n\x80a")
    assert await inside.target().read_file(f"{inside.home}/binary") == "\ufffd\0\n\ufffda"


async def test_what_is_no_regular_file_or_too_large_is_not_read(inside: Place):
    target, home = inside.target(), inside.home
    os.mkfifo(inside.at(f"{home}/fifo"))
    with inside.write(f"{home}/large", b"").open("r+b") as file:
        file.truncate((4 << 20) + 1)
    for path, words in (
        (home, "not a regular"),
        (f"{home}/fifo", "not a regular"),
        (f"{home}/large", "4 MiB"),
    ):
        with pytest.raises(OSError, match=words):
            await target.read_file(path)
    assert await target.read_file(f"{home}/large/below-a-file") is None


async def test_a_link_at_the_files_place_is_replaced_and_not_followed(inside: Place):
    home = inside.home
    elsewhere = inside.write(f"{home}/elsewhere/precious", "precious")
    inside.at(f"{home}/link").symlink_to(elsewhere.parent)
    await inside.target().write_file(f"{home}/link", "ours")
    assert inside.at(f"{home}/link").read_text() == "ours"
    assert [p.name for p in elsewhere.parent.iterdir()] == ["precious"]
    with pytest.raises(OSError):
        await inside.target().write_file(f"{home}/elsewhere", "a directory is there")
    assert [p.name for p in elsewhere.parent.iterdir()] == ["precious"]


async def test_what_no_argument_can_hold_is_refused_alone(machine: Place):
    target = machine.target()
    machine.write(f"{machine.home}/good", "good")
    answers = await asyncio.gather(
        *(answer(target.read_file(p)) for p in ("relative", "/a\0b", "/\ud800", f"{machine.home}/good"))
    )
    assert [isinstance(a, OSError) for a in answers] == [True, True, True, False]
    with pytest.raises(OSError):
        await target.write_file(f"{machine.home}/new", "\ud800")


# -- secrets --------------------------------------------------------------------------------------------------------


async def test_secrets_are_for_root_alone_and_never_leave_the_target(tmp_path: Path):
    """Everything that goes in or comes out is written down, and so is every argument of every tool."""
    made = place("machine", "dash", tmp_path)
    log = tmp_path / "seen"
    for tool in ("sed", "tr", "head", "wc", "iconv", "chmod", "mv", "mktemp", "base64", "cat"):
        program(
            tmp_path / f"bin/{tool}",
            f'#!/bin/sh\necho "{tool} $*" >>"{log}"\nexec {shutil.which(tool)} "$@"\n',
        )
    streams = f'/usr/bin/tee -a {log} | "$@" 2>&1 | /usr/bin/tee -a {log}'
    target = CommandTarget(
        "lxc:129", (str(program(tmp_path / "spy", f"#!/bin/sh\n{streams}\n")), *made.prefix)
    )
    made.write(f"{made.home}/plain", "s3cret-plain\n")
    made.write(f"{made.home}/quoted", '  s3cret "with" $nasty `words` \\ here \n\n')
    path = f"{made.home}/run/secrets.env"
    await target.install_secrets(path, {"A": f"{made.home}/plain", "B": f"{made.home}/quoted"})
    assert made.at(path).read_text() == (
        'A="s3cret-plain"\nB="  s3cret \\"with\\" \\$nasty \\`words\\` \\\\ here "\n'
    )
    assert made.at(path).stat().st_mode & 0o777 == 0o600
    assert b"sed " in log.read_bytes()
    assert b"s3cret" not in log.read_bytes()


SYSTEMD_READS = Path("/usr/lib/systemd/user-environment-generators/30-systemd-environment-d-generator")


@given(
    st.lists(
        st.sampled_from(["a", "B", " ", "\t", '"', "'", "\\", "`", "$ ", "#", ";", "=", "é", "%"]), min_size=1
    ).map("".join)
)
@example('\\"')
@example("a\\")
@few
def test_systemds_own_parser_reads_a_secret_as_it_stands_in_its_file(value: str):
    """The generator for environment.d has the parser of EnvironmentFile=, and prints what it read, quoted again."""
    if not SYSTEMD_READS.exists():
        pytest.skip(f"{SYSTEMD_READS} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        made = place("machine", "dash", Path(folder))
        made.write(f"{folder}/secret", f"{value}\n")
        asyncio.run(
            made.target().install_secrets(f"{folder}/environment.d/s.conf", {"S3": f"{folder}/secret"})
        )
        env = {"XDG_CONFIG_HOME": folder, "HOME": folder}
        done = subprocess.run([SYSTEMD_READS], env=env, check=True, capture_output=True, text=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("S3="))
    text = line.removeprefix("S3=")
    if text.startswith('"'):
        text = re.sub(r"\\(.)", lambda m: {"t": "\t"}.get(m[1], m[1]), text[1:-1])
    assert text == value


@pytest.mark.parametrize("content", [b"two\nlines\n", b"zero\0byte", b"carriage\rreturn\r\n", b"x" * 20_000])
async def test_a_secret_that_systemd_would_drop_is_refused_and_nothing_is_installed(
    inside: Place, content: bytes
):
    home = inside.home
    inside.write(f"{home}/bad", content)
    inside.write(f"{home}/run/s.env", "OLD=1\n")
    with pytest.raises(OSError, match=f"{home}/bad: "):
        await inside.target().install_secrets(f"{home}/run/s.env", {"A": f"{home}/bad"})
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        await inside.target().install_secrets(f"{home}/run/s.env", {"A": "/nowhere"})
    with pytest.raises(OSError, match="environment variable"):
        await inside.target().install_secrets(f"{home}/run/s.env", {"A=B": f"{home}/bad"})
    assert [(p.name, p.read_text()) for p in inside.at(f"{home}/run").iterdir()] == [("s.env", "OLD=1\n")]


# -- units and processes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hierarchy", ["sys/fs/cgroup", "sys/fs/cgroup/systemd"])
async def test_a_unit_shows_its_state_and_every_process_below_its_cgroup(tree: Place, hierarchy: str):
    group = f"{hierarchy}/system.slice/a.service"
    if hierarchy == "sys/fs/cgroup":
        tree.write("sys/fs/cgroup/cgroup.controllers", "cpu\n")
    tree.write(f"{group}/cgroup.procs", "12\n")
    tree.write(f"{group}/.hidden/cgroup.procs", "")
    tree.write(f"{group}/.hidden/deep er/cgroup.procs", "14\n")
    tree.write(f"{group}/payload/cgroup.procs", "13\n")
    tree.unit("alias.service", f"{UNIT}ControlGroup=/system.slice/a.service\n")
    unit = await tree.target().unit("alias.service")
    assert (unit.name, unit.load_state, unit.active_state, unit.sub_state) == (
        "a.service", "loaded", "active", "running",
    )  # fmt: skip
    assert (unit.main_pid, unit.restarts, unit.needs_reload, unit.pids) == (12, 3, True, (12, 13, 14))


async def test_a_drop_in_that_systemd_has_not_read_needs_a_reload(tree: Place):
    """Of the first drop-in of a loaded unit systemd itself says NeedDaemonReload=no."""
    folder = "/etc/systemd/system/a.service.d"
    text = UNIT.replace("NeedDaemonReload=yes", "NeedDaemonReload=no")
    tree.unit("a.service", f"{text}DropInPaths=\n")
    assert not (await tree.target().unit("a.service")).needs_reload
    tree.write(f"{folder}/50 ours.conf", "[Service]\n")
    tree.write(f"{folder}/empty.conf", "")
    assert (await tree.target().unit("a.service")).needs_reload
    tree.unit("a.service", f"{text}DropInPaths=/run/x.conf {folder}/50 ours.conf\n")
    assert not (await tree.target().unit("a.service")).needs_reload


async def test_a_unit_without_a_cgroup_has_no_processes_unless_its_main_process_lives(tree: Place):
    tree.unit("a.service", f"{UNIT}ControlGroup=/system.slice/a.service\n")
    assert (await tree.target().unit("a.service")).pids == ()
    tree.write("proc/12/cmdline", b"sleep\0")
    with pytest.raises(OSError, match="main process"):
        await tree.target().unit("a.service")


async def test_a_cgroup_that_cannot_be_read_is_not_taken_for_an_empty_one(tree: Place):
    (tree.root / "sys/fs/cgroup/system.slice/a.service/cgroup.procs").mkdir(parents=True)
    tree.unit("a.service", f"{UNIT}ControlGroup=/system.slice/a.service\n")
    with pytest.raises(OSError, match="processes cannot be read"):
        await tree.target().unit("a.service")


async def test_a_unit_that_is_not_there_is_said_to_be_not_found(inside: Place):
    unit = await inside.target().unit("none.service")
    assert (unit.load_state, unit.active_state, unit.main_pid) == ("not-found", "inactive", 0)


async def test_systemctl_is_asked_without_waiting_for_jobs_and_nothing_to_kill_is_no_error(inside: Place):
    inside.unit("a.service", UNIT)
    target = inside.target()
    await target.daemon_reload()
    for verb in (target.start_unit, target.stop_unit, target.kill_unit, target.reset_failed):
        await verb("a.service")
    assert inside.calls() == [
        "systemctl daemon-reload",
        "systemctl start --no-block -- a.service",
        "systemctl stop --no-block -- a.service",
        "systemctl kill --signal=SIGKILL -- a.service",
        "systemctl reset-failed -- a.service",
    ]
    await target.kill_unit("none.service")
    await target.reset_failed("none.service")
    with pytest.raises(OSError, match=r"Unit none\.service not loaded"):
        await target.start_unit("none.service")


async def test_a_kill_that_fails_while_processes_live_is_an_error(tree: Place):
    tree.unit("a.service", f"{UNIT}ControlGroup=/a.service\n")
    tree.write("sys/fs/cgroup/a.service/cgroup.procs", "12\n")
    refusing = '#!/bin/sh\n[ "$1" = show ] && exec cat @/units/a.service\necho Access denied >&2\nexit 1\n'
    tree.tool("systemctl", refusing)
    with pytest.raises(OSError, match="Access denied"):
        await tree.target().kill_unit("a.service")


@pytest.mark.parametrize(
    "name", ["-x", "", "*.service", "a b.service", "a\n.service", "$(id).service", "ü.service"]
)
async def test_what_is_no_name_of_a_unit_never_gets_there(machine: Place, name: str):
    target = machine.target()
    for call in (target.unit(name), target.unit_log(name, 5), target.kill_unit(name)):
        with pytest.raises(OSError, match="no name of a unit"):
            await call
    assert machine.commands() == 0


async def test_the_last_lines_of_a_units_journal_are_given_as_they_are(inside: Place):
    inside.write(f"{inside.home}/journal", b"one\n\x1b[31mtw\xffo\x0b\nthree\n")
    assert await inside.target().unit_log("a.service", 2) == ("\x1b[31mtw\ufffdo\x0b", "three")
    assert inside.calls() == ["journalctl --no-pager --quiet --output=cat --lines=2 --unit=a.service"]


async def test_an_empty_journal_has_no_lines_and_a_broken_one_is_an_error(inside: Place):
    inside.write(f"{inside.home}/journal", "")
    assert await inside.target().unit_log("a.service", 2) == ()
    inside.tool("journalctl", "#!/bin/sh\necho half a line\necho Cannot open journal >&2\nexit 1\n")
    with pytest.raises(OSError, match="Cannot open journal"):
        await inside.target().unit_log("a.service", 2)


async def test_a_process_shows_what_it_was_started_with_and_a_dead_one_is_none(machine: Place):
    words = ["-c", "input()", "", "a b", "\n", "é'\"", ""]
    env = {"A": "1=2", "B": "", "NASTY": "line\nline '$`\" é"}
    with subprocess.Popen([sys.executable, *words], env=env, stdin=subprocess.PIPE) as running:
        found = await machine.target().process(running.pid)
        assert found is not None
        assert found.argv == (sys.executable, *words)
        assert {name: found.env[name] for name in env} == env
        running.kill()
        while (await machine.target().process(running.pid)) is not None:  # a zombie is none, too
            await asyncio.sleep(0.01)
        assert Path(f"/proc/{running.pid}").exists()
    assert await machine.target().process(running.pid) is None


@given(argv=st.lists(st.binary().map(lambda b: b.replace(b"\0", b"")), min_size=1), value=st.binary())
@example(argv=[b"", b""], value=b"part-0 0\npart-0 end")
@few
def test_any_bytes_of_an_environment_come_through(busybox_tree: Place, argv: list[bytes], value: bytes):
    value = value.replace(b"\0", b"")
    busybox_tree.write("proc/7/cmdline", b"".join(word + b"\0" for word in argv))
    busybox_tree.write("proc/7/environ", b"V=" + value + b"\0W=1\0")
    found = asyncio.run(busybox_tree.target().process(7))
    assert found is not None
    assert found.argv == tuple(word.decode(errors="replace") for word in argv)
    assert found.env == {"V": value.decode(errors="replace"), "W": "1"}


MANY = "1" * 5000  # digits; int() refuses them with a ValueError


async def test_numbers_that_are_none_make_no_reading_fail(own_tools: Place):
    own_tools.unit("a.service", UNIT.replace("=12", f"={MANY}").replace("NRestarts=3", "NRestarts=\u0663"))
    unit = await own_tools.target().unit("a.service")
    assert (unit.main_pid, unit.restarts, unit.active_state) == (0, 0, "active")
    own_tools.unit("a.service", f"{UNIT}ControlGroup=/a.service\n")
    own_tools.write("sys/fs/cgroup/a.service/cgroup.procs", f"12\n{MANY}\n")
    assert (await own_tools.target().unit("a.service")).pids == (12,)
    own_tools.write("dev/shm/x", "")
    for words in (f"{MANY} 4096", f"1 {MANY}", "1", "\u0663 1"):
        own_tools.tool("stat", f"#!/bin/sh\necho {words}\n")
        shm = (await own_tools.target().facts()).shm_bytes
        assert isinstance(shm, Unknown)
        assert shm.code == "Unparsable"


def test_an_answer_whose_number_or_status_is_none_is_left_out():
    answers = f"part-1 {MANY}\nOgow\npart-1 end\npart-1 \u0663\nOgow\npart-1 end\n"
    status = base64.b64encode(f":\n{MANY}".encode()).decode()
    assert parts("part-1", f"{answers}part-1 1\n{status}\npart-1 end\npart-1 2\nOgow\npart-1 end\n", "") == {
        2: Part(0, b":")
    }


async def test_an_answer_too_large_to_be_one_is_an_error(own_tools: Place):
    own_tools.unit("a.service", UNIT + "DropInPaths=" + "x" * 600_000 + "\n")
    with pytest.raises(OSError, match="larger than 512 KiB"):
        await own_tools.target().unit("a.service")


async def test_whatever_goes_wrong_with_an_answer_is_an_error_of_this_target(
    machine: Place, monkeypatch: pytest.MonkeyPatch
):
    def confused(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(command_target, "parse_unit", confused)
    monkeypatch.setattr(command_target, "parse_inside", confused)
    with pytest.raises(OSError, match=r"lxc:129: its answer is not understood: .*no such thing") as raised:
        await machine.target().unit("a.service")
    assert raised.value.errno == errno.EPROTO
    reachable = (await machine.target().facts()).reachable
    assert isinstance(reachable, Unknown)
    assert "no such thing" in reachable.reason


# -- one command for what is asked at once ----------------------------------------------------------------------------


async def test_what_is_asked_at_once_goes_there_in_one_command_and_the_same_only_once(inside: Place):
    inside.write(f"{inside.home}/file", "text")
    inside.write(f"{inside.home}/journal", "")
    target = inside.target()
    answers = await asyncio.gather(
        answer(target.unit("a.service")),
        answer(target.unit("a.service")),
        answer(target.read_file(f"{inside.home}/file")),
        answer(target.read_file(inside.home)),
        answer(target.exists(f"{inside.home}/none")),
        answer(target.unit_log("a.service", 3)),
        answer(target.process(999_999_999)),
    )
    assert inside.commands() == 1
    assert len([call for call in inside.calls() if "show" in call]) == 1
    assert answers[0] == answers[1]
    assert answers[2] == "text"
    assert isinstance(answers[3], OSError)
    assert answers[4:] == [False, (), None]


async def test_a_question_that_hangs_takes_no_other_answer_with_it(
    machine: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(target_batch, "READ_DEADLINE", 1.5)
    machine.tool("ls", "#!/bin/sh\nexec sleep 600\n")  # what `exists` asks about a path on a dead file server
    machine.write(f"{machine.home}/file", "text")
    target = machine.target()
    missing, unit, text = await asyncio.gather(
        answer(target.exists(f"{machine.home}/dead")),
        answer(target.unit("a.service")),
        answer(target.read_file(f"{machine.home}/file")),
    )
    assert isinstance(missing, TimeoutError)
    assert "lxc:129 did not answer within 1.5 s" in str(missing)
    assert not isinstance(unit, OSError)
    assert text == "text"


async def test_one_who_gives_up_asking_leaves_the_others_their_answers(machine: Place):
    machine.write(f"{machine.home}/file", "text")
    target = machine.target()
    asked = [asyncio.ensure_future(target.read_file(f"{machine.home}/file")) for _ in range(2)]
    await asyncio.sleep(0)
    asked[0].cancel()
    assert await asked[1] == "text"
    assert await target.read_file(f"{machine.home}/file") == "text"


async def test_a_greeting_before_the_answers_is_passed_over(machine: Place, tmp_path: Path):
    greeting = program(tmp_path / "greet", '#!/bin/sh\necho Welcome; echo "No mail." >&2\nexec "$@"\n')
    target = CommandTarget("ssh:a@b", (str(greeting), *machine.prefix))
    machine.write(f"{machine.home}/file", "text")
    assert await target.read_file(f"{machine.home}/file") == "text"


async def test_a_script_that_arrives_by_half_does_nothing(machine: Place, tmp_path: Path):
    cut = program(tmp_path / "cut", '#!/bin/sh\nhead -c -3 | "$@"\n')
    target = CommandTarget("ssh:a@b", (str(cut), *machine.prefix))
    with pytest.raises(OSError):
        await target.write_file(f"{machine.home}/file", "text")
    assert not machine.at(f"{machine.home}/file").exists()


def test_an_answer_is_taken_from_between_its_marks_alone():
    stdout = (
        "part-1 0\nOgow\npart-1 end\npart-0 1\nOgow\npart-0 end\npart-1 1\n!!\npart-1 end\npart-1 2\nOgow\n"
    )
    assert parts("part-1", stdout, "noise\npart-1 0\nwords\n") == {0: Part(0, b":", "words")}


def test_lines_may_end_as_a_terminal_ends_them():
    stdout = "Welcome\r\npart-1 0\r\nOg\r\now\r\npart-1 end\r\n"
    assert parts("part-1", stdout, "part-1 0\r\nsome\r\nwords\r\n") == {0: Part(0, b":", "some\nwords")}


@pytest.mark.parametrize("flood", ["\n" * (8 << 20), "part-1 0\n" * (1 << 17), "part-1 " + "1" * (8 << 20)])
def test_a_flood_is_taken_apart_without_a_list_of_its_lines(flood: str):
    stdout = f"part-1 3\nOgow\npart-1 end\n{flood}\npart-1 7\nOgow\npart-1 end\n"
    tracemalloc.start()
    try:
        found = parts("part-1", stdout, "")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(found) == {3, 7}
    assert most < 3 * len(flood) + (24 << 20)


async def test_more_errors_than_anybody_reads_are_an_error(tmp_path: Path):
    shouting = program(tmp_path / "shouting", '#!/bin/sh\nhead -c 100000 /dev/zero >&2\nexec "$@"\n')
    with pytest.raises(OSError, match="wrote more than 65536 bytes"):
        await CommandTarget("ssh:a@b", (str(shouting),)).exists("/")


def test_words_in_a_script_are_quoted_whatever_they_hold():
    assert b"part 0 'read_file' '/it'\\''s $(x)\n`y`'" in script("m", [("read_file", "/it's $(x)\n`y`")])


# -- where it cannot be reached ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo 'first' >&2; echo 'container 129 not running!' >&2; exit 255", "container 129 not running!"),
        ("exit 3", "ended with status 3"),
        ("echo unexpected; cat >/dev/null", "ended with status 0"),
    ],
)
async def test_a_target_that_is_down_is_unreachable_in_its_tools_own_words(
    tmp_path: Path, text: str, words: str
):
    target = CommandTarget("lxc:129", (str(program(tmp_path / "down", f"#!/bin/sh\n{text}\n")),))
    facts, unit, missing = await asyncio.gather(
        target.facts(), answer(target.unit("a.service")), answer(target.exists("/x"))
    )
    assert isinstance(facts.reachable, Unknown)
    assert facts.reachable.code == "TargetUnreachable"
    assert words in facts.reachable.reason
    assert facts.nvml == facts.reachable
    for error in (unit, missing):
        assert isinstance(error, OSError)
        assert words in str(error)


async def test_a_tool_that_is_missing_or_never_stops_talking_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(FileNotFoundError, match="lxc:129"):
        await CommandTarget("lxc:129", ("/nonexistent/pct",)).exists("/")
    monkeypatch.setattr(target_batch, "_OUTPUT_LIMIT", 100_000)
    with pytest.raises(OSError, match="wrote more than"):
        await CommandTarget("lxc:129", (str(program(tmp_path / "endless", "#!/bin/sh\nexec yes\n")),)).exists(
            "/"
        )


# -- facts ----------------------------------------------------------------------------------------------------------


async def test_a_container_shows_its_libraries_shm_and_device_nodes(own_tools: Place):
    own_tools.write("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.565.57.01", "")
    (own_tools.root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.565.57.01")
    own_tools.write("usr/lib/x86_64-linux-gnu/libcuda.so.590.48.01", "")
    for name in ("dev/nvidia0", "dev/nvidiactl", "dev/nvidia-caps/nvidia-cap1", "dev/shm/x"):
        own_tools.write(name, "")
    own_tools.tool("stat", "#!/bin/sh\necho 262144 4096\n")
    facts = await own_tools.target().facts()
    assert facts.reachable == Known(value=True)
    assert facts.user_driver == Known("565.57.01")
    assert facts.shm_bytes == Known(1 << 30)
    assert facts.device_nodes == Known(("/dev/nvidia0", "/dev/nvidiactl"))
    assert isinstance(facts.nvml, Unknown)
    assert facts.nvml.code == "NotObserved"


@pytest.mark.parametrize("tool", ["stat", "busybox stat"])
async def test_the_size_of_a_real_dev_shm_is_what_the_kernel_says(machine: Place, tool: str):
    machine.tool("stat", f'#!/bin/sh\nexec /usr/bin/{tool} "$@"\n')
    stats = os.statvfs("/dev/shm")
    assert (await machine.target().facts()).shm_bytes == Known(stats.f_blocks * stats.f_frsize)


async def test_P12_a_container_without_dev_shm_has_none(tree: Place):
    assert isinstance((await tree.target().facts()).shm_bytes, Absent)


SAID = [
    ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 565.57", 18, "NvmlVersionMismatch"),
    ("Failed to initialize NVML: Unknown Error", 255, "NvmlUnknownError"),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure", 9, "NvmlDriverNotLoaded"),
    ("Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error", 0, "NvmlUnknownError"),
    ("something else", 15, "GpuLost"),
    ("something else", 77, "NvmlError77"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "status", "code"), SAID)
async def test_D3_nvml_fails_inside_and_its_words_tell_how(tree: Place, text: str, status: int, code: str):
    tree.tool("nvidia-smi", f'#!/bin/sh\nprintf "%s\\n" "{text}"\nexit {status}\n')
    nvml = (await tree.target().facts()).nvml
    assert isinstance(nvml, Unknown)
    assert (nvml.code, text.split("\n", maxsplit=1)[0] in nvml.reason) == (code, True)


async def test_nvml_that_works_inside_is_known_and_without_gpus_absent(tree: Place):
    tree.tool("nvidia-smi", '#!/bin/sh\necho "GPU 0: NVIDIA (UUID: GPU-1)"\n')
    assert (await tree.target().facts()).nvml == Known("ok")
    tree.tool("nvidia-smi", '#!/bin/sh\necho "No devices found."\nexit 6\n')
    assert isinstance((await tree.target().facts()).nvml, Absent)


async def test_D3_nvml_is_asked_again_after_a_reload_a_change_inside_or_a_while(tree: Place):
    now = 1000.0
    target = CommandTarget("lxc:129", tree.prefix, lambda: now)
    tree.tool("nvidia-smi", "#!/bin/sh\necho asked >>@/asked\n")

    async def asked() -> int:
        await target.facts()
        return len(tree.at(f"{tree.home}/asked").read_text().splitlines())

    assert [await asked(), await asked()] == [1, 1]
    await target.daemon_reload()
    assert [await asked(), await asked()] == [2, 2]
    tree.write("proc/sys/kernel/random/boot_id", "another")
    assert [await asked(), await asked()] == [3, 3]
    tree.write("proc/1/stat", f"1 (sys) emd) S {' '.join(str(n) for n in range(4, 53))}\n")
    assert [await asked(), await asked()] == [4, 4]
    now += NVML_EVERY
    assert [await asked(), await asked()] == [5, 5]


async def test_D3_a_reload_on_the_host_makes_its_containers_be_asked_again(
    tree: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent.host.real.prefix_for", lambda _: tree.prefix)
    tree.tool("nvidia-smi", "#!/bin/sh\necho asked >>@/asked\n")
    async with fake_systemd() as (daemon, _):
        host = real_host(daemon.root)
        targets = host.ports.targets

        async def asked(name: str) -> int:
            await targets(name).facts()
            return len(tree.at(f"{tree.home}/asked").read_text().splitlines())

        assert [await asked("lxc:129"), await asked("lxc:129")] == [1, 1]
        await targets("host").daemon_reload()
        assert [await asked("lxc:129"), await asked("lxc:129")] == [2, 2]
        assert [await asked("ssh:root@gpu1"), await asked("ssh:root@gpu1")] == [3, 3]
        await targets("host").daemon_reload()
        assert await asked("ssh:root@gpu1") == 3  # that one has a systemd of its own
        await host.close()


async def test_an_nvidia_smi_that_sleeps_in_the_kernel_is_not_joined_by_another(tree: Place):
    tree.tool("nvidia-smi", "#!/bin/sh\necho asked >>@/asked\n")
    tree.write("proc/77/stat", "77 (nvidia-smi) D 1 77\n")
    nvml = (await tree.target().facts()).nvml
    assert isinstance(nvml, Unknown)
    assert nvml.code == "NvmlStuck"
    assert not tree.at(f"{tree.home}/asked").exists()


async def test_nvidia_smi_in_a_container_and_a_look_at_holders_are_never_at_the_same_time(
    tree: Place, monkeypatch: pytest.MonkeyPatch
):
    """The one would be seen by the other, and count as somebody who holds the GPU."""
    monkeypatch.setattr(command_target, "_PATIENCE", 0.2)
    tree.tool("nvidia-smi", "#!/bin/sh\necho asked >>@/asked\nsleep 1\n")
    alone = asyncio.Lock()
    target = CommandTarget("lxc:129", tree.prefix, alone=alone)
    asked = tree.at(f"{tree.home}/asked")
    async with alone:
        nvml = (await target.facts()).nvml
        assert isinstance(nvml, Unknown)
        assert nvml.code == "NotObserved"
        assert not asked.exists()
        elsewhere = CommandTarget(
            "ssh:root@gpu1", tree.prefix, alone=alone
        )  # its processes are not seen here
        assert (await elsewhere.facts()).nvml == Known("ok")
        asked.unlink()
    asking = asyncio.ensure_future(target.facts())
    while not asked.exists():
        await asyncio.sleep(0.01)
    assert alone.locked()
    assert (await asking).nvml == Known("ok")
    assert not alone.locked()


# -- where its ports are ------------------------------------------------------------------------------------------------


async def test_a_containers_port_is_at_its_first_address_that_others_can_reach(own_tools: Place):
    own_tools.tool(
        "ip",
        '#!/bin/sh\necho "2: eth0    inet6 fd00::7/64 scope global"\necho "2: eth0    inet 10.1.2.3/24 brd 10.1.2.255 scope global eth0"\n',
    )
    (own_tools.root / "proc/self/ns/net").symlink_to("net:[1]")
    target = own_tools.target()
    assert parse_endpoint(target.endpoint(30000)).host.endswith(".invalid")
    await target.unit("a.service")
    assert target.endpoint(30000) == "http://10.1.2.3:30000"
    own_tools.tool("ip", '#!/bin/sh\necho "2: eth0    inet 10.1.2.4/24 brd 10.1.2.255 scope global eth0"\n')
    await target.unit("a.service")
    assert target.endpoint(30000) == "http://10.1.2.3:30000"
    await target.facts()
    assert target.endpoint(30000) == "http://10.1.2.4:30000"


def container(tree: Tree, network: str = "net:[1]", group: str = "lxc/129") -> None:
    """This host is in net:[1]. 400 came in by `pct exec`, 500 is the container's first, 600 that of one inside it."""
    tree.link("proc/self/ns/net", "net:[1]")
    tree.file("sys/fs/cgroup/cgroup.controllers", "cpu\n")
    tree.file(f"sys/fs/cgroup/{group}/cgroup.procs")
    tree.file(f"sys/fs/cgroup/{group}/ns/cgroup.procs", "400\n600\n")
    tree.file(f"sys/fs/cgroup/{group}/ns/init.scope/cgroup.procs", "500\n")
    for pid, inside, its in ((400, "77", "net:[1]"), (500, "1", network), (600, "30\t1", "net:[1]")):
        tree.file(f"proc/{pid}/status", f"Name:\tx\nNSpid:\t{pid}\t{inside}\nNSpgid:\t{pid}\t1\n")
        tree.link(f"proc/{pid}/ns/net", its)


@pytest.mark.parametrize("group", ["lxc/129", "lxc.payload.129"])
async def test_a_container_on_this_hosts_network_has_loopback(tree: Place, group: str):
    host = Tree(tree.root.parent / "host")
    container(host, group=group)
    target = CommandTarget("lxc:129", tree.prefix, root=host.root)
    await target.unit("a.service")
    assert target.endpoint(30000) == "http://127.0.0.1:30000"
    assert not shares_network("lxc:12", host.root)


async def test_a_container_that_only_says_it_has_this_hosts_network_is_not_believed(own_tools: Place):
    """It may print what it likes: the agent would ask a server of this host, and take its answers for the container's."""
    own_tools.tool("readlink", '#!/bin/sh\necho "net:[1]"\n')
    own_tools.tool("ip", '#!/bin/sh\necho "net:[1] 127.0.0.1"\n')
    own_tools.tool("hostname", '#!/bin/sh\necho "net:[1] 127.0.0.1 ::1 ::ffff:127.0.0.1 192.0.2.7"\n')
    host = Tree(own_tools.root.parent / "host")
    container(host, "net:[2]")
    host.file("proc/net/fib_trie", "Local:\n  |-- 192.0.2.7\n     /32 link UNICAST\n     /32 host LOCAL\n")
    target = CommandTarget("lxc:129", own_tools.prefix, root=host.root)
    await target.facts()
    assert target.endpoint(30000) == "http://no-address.invalid:30000"
    host.file("sys/fs/cgroup/lxc/129/ns/init.scope/cgroup.procs", "")  # its first process is not found
    await target.facts()
    assert target.endpoint(30000) == "http://no-address.invalid:30000"


def test_an_address_is_one_that_others_can_reach_ipv4_first(tree_of_a_host: Tree):
    root = tree_of_a_host.root
    words = ["x", "127.0.0.1", "fe80::1", "fd00::1", "10.0.0.1", "10.0.0.2"]
    assert container_address(words, root) == "10.0.0.1"
    assert container_address(["fd00::1"], root) == "[fd00::1]"
    for word in ("::1", "169.254.1.1", "0.0.0.1", "255.255.255.255", "::ffff:127.0.0.1", "::127.0.0.1", "fd00::1%lo",
                 "192.0.2.7", "fd00::7"):  # fmt: skip
        assert container_address([word], root) == "", word


def test_of_very_many_addresses_the_rest_is_not_looked_at(tree_of_a_host: Tree):
    assert container_address([*["x"] * 100, "10.0.0.1"], tree_of_a_host.root) == ""


def test_another_machines_port_is_at_the_name_that_ssh_uses():
    assert CommandTarget("ssh:root@gpu1", ()).endpoint(30000) == "http://gpu1:30000"
    assert CommandTarget("ssh:root@fd00::2", ()).endpoint(30000) == "http://[fd00::2]:30000"


# -- the commands that get there ------------------------------------------------------------------------------------------


def tools(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Path:
    """Executables that write down their arguments, and then do what their script says."""
    for name, text in scripts.items():
        tool = name.replace("_", "-")
        program(folder / "path" / tool, f'#!/bin/sh\necho "{tool} $*" >>"{folder}/argv"\n{text}\n')
    monkeypatch.setenv("PATH", f"{folder / 'path'}:/usr/bin:/bin")
    return folder / "argv"


async def test_a_container_is_entered_by_pct_which_pid_1_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    strip = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
    argv = tools(tmp_path, monkeypatch, pct='shift 3; exec "$@"', systemd_run=strip)
    target = CommandTarget("lxc:129", prefix_for("lxc:129", systemd=tmp_path))
    assert await target.exists("/")
    first, second = argv.read_text().splitlines()
    assert re.match("systemd-run --unit=[^ ]+ --quiet --pipe --wait --collect ", first)
    assert first.endswith(" -- pct exec 129 -- sh -s")
    assert second == "pct exec 129 -- sh -s"


@pytest.mark.parametrize("end", ["its time is over", "nobody waits any more", "it never stops talking"])
async def test_what_is_given_up_is_ended_by_pid_1_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
):
    talk = "exec yes" if end == "it never stops talking" else "exec sleep 600"
    argv = tools(tmp_path, monkeypatch, pct="", systemd_run=talk, systemctl="")
    target = CommandTarget("lxc:129", prefix_for("lxc:129", systemd=tmp_path))
    if end == "its time is over":
        monkeypatch.setattr(target_batch, "READ_DEADLINE", 1.0)
        with pytest.raises(TimeoutError, match="did not answer"):
            await target.exists("/")
    elif end == "it never stops talking":
        with pytest.raises(OSError, match="wrote more than"):
            await target.exists("/")
    else:
        writing = asyncio.ensure_future(target.write_file("/file", "text"))
        while not argv.exists():
            await asyncio.sleep(0.01)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    started, stopped = argv.read_text().splitlines()
    unit = re.search(r" --unit=(gpu-host-agent-enters-[0-9a-f]{16}\.service) ", started)
    assert unit is not None
    assert stopped == f"systemctl stop --no-block -- {unit[1]}"


async def test_without_pct_a_container_is_entered_by_lxc_attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    argv = tools(tmp_path, monkeypatch, lxc_attach='shift 3; exec "$@"')
    target = CommandTarget("lxc:129", prefix_for("lxc:129", systemd=tmp_path / "not-booted"))
    assert await target.exists("/")
    assert argv.read_text() == "lxc-attach -n 129 -- sh -s\n"


async def test_a_machine_is_reached_by_ssh_without_questions_and_its_shells_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As ssh does: the words after the destination are joined by blanks and given to the user's shell."""
    argv = tools(tmp_path, monkeypatch, ssh='while [ "$1" != -- ]; do shift; done; shift 2; exec sh -c "$*"')
    target = CommandTarget("ssh:root@gpu1", prefix_for("ssh:root@gpu1"))
    path = f'{tmp_path}/it\'s "a" $(file)'
    await target.write_file(path, "text")
    assert Path(path).read_text() == "text"
    assert argv.read_text().startswith("ssh -T -o BatchMode=yes -o ConnectTimeout=5 ")
    assert argv.read_text().endswith(" -- root@gpu1 sh -s\n")


def test_the_real_ssh_takes_these_options_for_what_they_are():
    if shutil.which("ssh") is None:
        pytest.skip("ssh is not installed")
    _, *options = prefix_for("ssh:root@gpu1.example")
    done = subprocess.run(["ssh", "-G", *options], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert {
        "user root",
        "hostname gpu1.example",
        "batchmode yes",
        "connecttimeout 5",
        "serveraliveinterval 5",
    } <= set(said)


@pytest.mark.parametrize(
    "name",
    ["host", "lxc:", "lxc:-1", "lxc:12 9", "lxc:0", "ssh:gpu1", "ssh:-oProxyCommand=x@y", "ssh:a@-b", "ssh:a b@c",
     "ssh:a@b\n", "ssh:a@b;c", "ssh:$(x)@b", "ssh:a@[::1]", "lxc:129\n"],
)  # fmt: skip
def test_a_name_that_could_be_an_option_or_more_leads_nowhere(name: str):
    with pytest.raises(OSError, match="expected lxc:ID or ssh:user@host"):
        prefix_for(name)
