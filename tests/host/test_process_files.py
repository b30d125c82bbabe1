"""Holders that no path gives away: real processes of this machine, among a host's files that are made up.

Which devices are GPUs' is what the host's /proc/devices says; here it calls the major of /dev/null and /dev/zero one
of nvidia's, so that no GPU is needed to open one.
"""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.core.fact import Fact, Known, Unknown
from agent.core.observation import Holder
from agent.host.char_devices import CharDevices
from agent.host.device_nodes import DeviceNodes, read_device_nodes
from agent.host.file_tables import tables_of_threads
from agent.host.nvidia_minors import NvidiaMinors
from agent.host.proc_holders import ProcHolders
from agent.host.process_files import ProcessFiles
from agent.host.statx import KindReader
from tests.host.trees import Tree

A = "0000:01:00.0"
MEM_MAJOR, NULL, ZERO = 1, 3, 5
needs_kcmp = pytest.mark.skipif(
    os.geteuid() != 0 or os.uname().machine not in ("x86_64", "aarch64"),
    reason="comparing open files needs root",
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def host(tree: Tree) -> Tree:
    tree.function(A, 0x030200)
    tree.bind(A, "nvidia")
    tree.file("proc/devices", f"Character devices:\n  {MEM_MAJOR} nvidia-uvm\n\nBlock devices:\n  7 loop\n")
    return tree


@pytest.fixture
def start(host: Tree) -> Iterator[Start]:
    """Runs a program until the end of the test, and shows it, and it alone, as a process of the host."""
    running: list[subprocess.Popen[bytes]] = []

    def run(program: str) -> subprocess.Popen[bytes]:
        begun = "import ctypes, mmap, os, sys, threading, time\ndef ready(): os.write(1, b'!')\n"
        process = subprocess.Popen(
            [sys.executable, "-c", begun + program], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.read(1) == b"!", "the program has failed"
        (host.root / "proc").mkdir(exist_ok=True)
        (host.root / f"proc/{process.pid}").symlink_to(f"/proc/{process.pid}")
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


async def held(host: Tree) -> Fact[tuple[Holder, ...]]:
    return (await ProcHolders(host.root).read([A]))[A]


def node(path: Path, minor: int) -> Path:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(MEM_MAJOR, minor))
    return path


async def holders(host: Tree) -> list[tuple[int | None, str]]:
    fact = await held(host)
    assert isinstance(fact, Known), fact
    return [(holder.pid, holder.what) for holder in fact.value]


# The programs' own standard input is /dev/null, which is a GPU's here: they close it where it would hide the point.


async def test_B3_a_process_without_a_device_holds_nothing(host: Tree, start: Start):
    start("os.close(0); ready(); time.sleep(600)")
    assert await holders(host) == []


@needs_root
async def test_B3_a_node_by_another_name_is_seen_by_its_number(host: Tree, start: Start, tmp_path: Path):
    hidden = node(tmp_path / "innocent", ZERO)
    process = start(f"os.close(0); f = open({str(hidden)!r}); ready(); time.sleep(600)")
    assert await holders(host) == [(process.pid, "/dev/nvidia-uvm")]


@needs_root
async def test_B3_a_file_with_a_devices_name_is_no_device(host: Tree, start: Start, tmp_path: Path):
    (tmp_path / "dev").mkdir()
    false = tmp_path / "dev/nvidia0"
    false.write_text("")
    start(f"os.close(0); os.chroot({str(tmp_path)!r}); f = open('/dev/nvidia0'); ready(); time.sleep(600)")
    assert await holders(host) == []


@pytest.fixture(params=["by comparing", "by counting"])
def tables_told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose open files are whose, with kcmp(2) and without."""
    if request.param == "by counting":
        monkeypatch.setattr("agent.host.file_tables._KCMP", None)


@pytest.mark.usefixtures("tables_told")
async def test_B3_workers_whose_main_thread_has_ended_are_seen(host: Tree, start: Start):
    process = start(
        "threading.Thread(target=lambda: (time.sleep(0.2), ready(), time.sleep(600))).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)"  # exit(2) ends one thread
    )
    assert process.poll() is None
    assert not list(Path(f"/proc/{process.pid}/fd").iterdir())
    assert await holders(host) == [(process.pid, "/dev/nvidia-uvm")]


@pytest.mark.usefixtures("tables_told")
async def test_B3_a_thread_with_open_files_of_its_own_is_seen(host: Tree, start: Start):
    process = start(
        "os.close(0)\n"
        "def work():\n"
        "    assert ctypes.CDLL(None).unshare(0x400) == 0\n"  # CLONE_FILES
        "    os.open('/dev/zero', os.O_RDONLY); ready(); time.sleep(600)\n"
        "threading.Thread(target=work).start()"
    )
    assert await holders(host) == [(process.pid, "/dev/nvidia-uvm")]


WITH_AS_MANY = (
    "os.close(0); os.open('/etc/passwd', os.O_RDONLY)\n"
    "def work():\n"
    "    assert ctypes.CDLL(None).unshare(0x400) == 0\n"
    "    os.close(0); os.open('/dev/zero', os.O_RDONLY); ready(); time.sleep(600)\n"
    "threading.Thread(target=work).start()"
)


@needs_kcmp
async def test_B3_a_thread_with_as_many_open_files_of_its_own_is_seen(host: Tree, start: Start):
    process = start(WITH_AS_MANY)
    assert await holders(host) == [(process.pid, "/dev/nvidia-uvm")]


@needs_kcmp
@pytest.mark.parametrize("ended", [False, True], ids=["all threads", "the first thread ended"])
def test_threads_that_share_their_files_are_told_without_listing_what_each_has(
    start: Start, monkeypatch: pytest.MonkeyPatch, ended: bool
):
    """Before Linux 6.2 only a list of all its files tells how many a thread has."""
    process = start(
        "for _ in range(9): threading.Thread(target=time.sleep, args=(600,)).start()\n"
        + (
            "threading.Thread(target=lambda: (time.sleep(0.2), ready())).start()\nctypes.CDLL(None).syscall(60, 0)"
            if ended
            else "ready()"
        )
    )
    monkeypatch.delattr("agent.host.file_tables.count_files")
    tables = tables_of_threads(Path(f"/proc/{process.pid}"))
    assert [len(each) >= 9 for each in tables] == [True] * ended


MAP = "f = open({path!r}, 'r+b'); m = mmap.mmap(f.fileno(), 4096, flags=mmap.MAP_PRIVATE)\n"


@needs_root
@pytest.mark.parametrize("ended", [False, True], ids=["all threads", "the first thread ended"])
async def test_B3_a_device_that_is_mapped_and_closed_is_still_held(
    host: Tree, start: Start, tmp_path: Path, ended: bool
):
    hidden = node(tmp_path / "innocent", ZERO)
    process = start(
        f"os.close(0)\n{MAP.format(path=str(hidden))}os.closerange(3, 100); os.close(0)\n"  # mmap has a copy
        + (
            "threading.Thread(target=lambda: (time.sleep(0.2), ready(), time.sleep(600))).start()\n"
            "ctypes.CDLL(None).syscall(60, 0)"
            if ended
            else "ready(); time.sleep(600)"
        )
    )
    assert await holders(host) == [(process.pid, "/dev/nvidia-uvm")]


async def test_B3_a_memory_map_that_does_not_answer_leaves_unknown_what_is_held(host: Tree):
    host.process(10, "python3", "/none")
    os.mkfifo(host.root / "proc/10/maps")
    fact = await held(host)
    assert isinstance(fact, Unknown)
    assert fact.code == "HoldersUnknown"
    assert "memory map of process 10" in fact.reason


async def test_B3_a_process_that_does_not_come_to_its_end_leaves_unknown_what_is_held(host: Tree):
    host.process(10, "python3 (x) Z 1")
    exiting = "10 (python3 (x) Z 1) D 1 10 10 0 -1 4194308 0 0\n"
    host.file("proc/10/stat", exiting)
    fact = await held(host)
    assert isinstance(fact, Unknown)
    assert "process 10 is ending" in fact.reason
    host.file("proc/10/stat", exiting.replace(") D ", ") Z "))
    assert await held(host) == Known(())
    host.file("proc/10/task/11/stat", exiting)
    assert isinstance(await held(host), Unknown)


async def test_B3_a_process_that_is_ending_and_has_given_back_only_its_memory_leaves_unknown_what_is_held(
    host: Tree,
):
    host.process(10, "python3", "socket:[1]")
    host.file("proc/10/maps")
    exiting = "10 (python3) D 1 10 10 0 -1 4194308 0 0\n"
    host.file("proc/10/stat", exiting)
    fact = await held(host)
    assert isinstance(fact, Unknown)
    assert "process 10 is ending" in fact.reason
    host.file("proc/10/stat", exiting.replace(") D ", ") Z "))
    assert await held(host) == Known(())
    host.file("proc/10/stat", "10 (kthreadd) S 0 0 0 0 -1 2129984 0 0\n")
    assert await held(host) == Known(())


WITH_ONE_FILE_LEFT = f"""
import asyncio, os, pathlib, resource, sys
from agent.host.proc_holders import ProcHolders
async def main():
    holders = ProcHolders(pathlib.Path(sys.argv[1]))
    print((await holders.read([{A!r}]))[{A!r}])
    os.close(last := os.open("/", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, last + 1))
    print((await holders.read([{A!r}]))[{A!r}])
asyncio.run(main())
"""


def test_B3_an_agent_that_can_open_no_more_files_does_not_know_who_holds_a_gpu(host: Tree):
    """One file may be open at a time, and for the open files of a process it takes two."""
    host.process(10, "python3", "/dev/nvidia0")
    argv = [sys.executable, "-c", WITH_ONE_FILE_LEFT, str(host.root)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    before, after = done.stdout.splitlines()
    assert before.startswith("Known(")
    assert "/dev/nvidia0" in before
    assert after.startswith("Unknown(")
    assert "Too many open files" in after


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("proc/devices", "which devices are GPUs'"),
        ("proc/10/fd", "open files of process 10"),
        ("proc/10/fd/3", "open files of process 10"),
        ("proc/10/task", "open files of process 10"),
        ("proc/10/maps", "what process 10 has mapped"),
        ("proc/11/stat", "proc/11/stat"),
    ],
)
async def test_B3_what_cannot_be_read_of_a_process_leaves_unknown_what_it_holds(
    host: Tree, file: str, told: str
):
    """Only that it is not there any more says that it holds nothing; ELOOP does not."""
    host.process(10, "python3", "socket:[1]")
    host.process(11, "python3")
    host.file("proc/10/maps")
    host.file("proc/10/stat", "10 (python3) S 1 10 10 0 -1 4194304 0 0\n")
    host.file("proc/11/stat", "11 (python3) S 1 11 11 0 -1 4194304 0 0\n")
    assert await held(host) == Known(())
    at = host.root / file
    if at.exists() or at.is_symlink():
        at.rename(host.root / "moved")
    at.symlink_to(at.name)
    fact = await held(host)
    assert isinstance(fact, Unknown), fact
    assert (fact.code, told in fact.reason) == ("HoldersUnknown", True), fact


async def test_B3_without_a_list_of_drivers_numbers_nobody_knows_who_holds_a_gpu(host: Tree):
    (host.root / "proc/devices").unlink()
    assert isinstance(await held(host), Unknown)


@needs_root
async def test_B3_a_device_without_a_readable_name_leaves_unknown_whose_it_is(
    host: Tree, start: Start, tmp_path: Path
):
    host.file("proc/devices", f"Character devices:\n  {MEM_MAJOR} drm\n")
    hidden = node(tmp_path / "innocent", ZERO)
    start(f"os.close(0); f = open({str(hidden)!r}); ready(); time.sleep(600)")
    assert await held(host) == Known(())  # on its way out of sysfs, and no GPU's that is still there
    host.directory(f"sys/dev/char/{MEM_MAJOR}:{ZERO}/uevent")
    fact = await held(host)
    assert isinstance(fact, Unknown)
    assert f"{MEM_MAJOR}:{ZERO}" in fact.reason


async def test_B3_a_vfio_device_that_is_mapped_and_closed_is_held(host: Tree):
    host.bind(other := another_function(host), "vfio-pci")
    host.process(10, "qemu-system-x86")
    span = "7f0000000000-7f0000001000"
    host.file("proc/10/maps", f"{span} rw-s 00000000 00:0f 1057      anon_inode:[vfio-device]\n")
    host.file(f"proc/10/map_files/{span}")
    fact = (await ProcHolders(host.root).read([other]))[other]
    assert isinstance(fact, Known)
    assert [(h.kind, h.what) for h in fact.value] == [("vm", "anon_inode:[vfio-device]")]


def another_function(host: Tree) -> str:
    host.function("0000:81:00.0", 0x030200)
    return "0000:81:00.0"


@pytest.mark.parametrize(
    ("number", "name"),
    [
        ((195, 4), "/dev/nvidia4"),
        ((195, 255), "/dev/nvidiactl"),
        ((508, 0), "/dev/nvidia-uvm"),
        ((226, 128), "/dev/dri/renderD128"),
        ((116, 3), "/dev/snd/pcmC1D0p"),
        ((511, 0), "/dev/vfio/12"),
        ((511, 1), "/dev/vfio/511:1"),
        ((510, 7), "/dev/vfio/510:7"),
        ((10, 196), ""),
        ((1, 3), ""),
        ((7, 0), ""),
    ],
)
def test_a_number_has_the_name_that_its_driver_and_udev_give_it(
    tree: Tree, number: tuple[int, int], name: str
):
    tree.file(
        "proc/devices",
        "Character devices:\n  1 mem\n 10 misc\n116 alsa\n195 nvidia\n195 nvidiactl\n226 drm\n508 nvidia-uvm\n"
        "510 vfio-dev\n511 vfio\n\nBlock devices:\n  7 nvidia-not\n",
    )
    tree.file("sys/dev/char/226:128/uevent", "MAJOR=226\nMINOR=128\nDEVNAME=dri/renderD128\n")
    tree.file("sys/dev/char/116:3/uevent", "MAJOR=116\nMINOR=3\nDEVNAME=snd/pcmC1D0p\n")
    tree.file("sys/dev/char/511:0/uevent", "MAJOR=511\nMINOR=0\nDEVNAME=vfio/12\n")
    assert CharDevices(tree.root).name(*number) == name


def test_a_vfio_device_on_its_way_out_of_sysfs_counts_for_whatever_is_on_vfio(host: Tree):
    host.bind(other := another_function(host), "vfio-pci")
    assert nodes(host).functions("/dev/vfio/511:1") == (other,)


def nodes(host: Tree) -> DeviceNodes:
    return read_device_nodes(host.root, NvidiaMinors(host.root))


@pytest.mark.parametrize("below", ["", "/drm/card0/card0-DP-1"], ids=["its own", "a monitor's"])
def test_a_bus_of_i2c_belongs_to_the_gpu_whose_bus_it_is(host: Tree, below: str):
    adapter = f"sys/devices/pci0000:00/0000:00:01.1/{A}{below}/i2c-5"
    host.directory(adapter)
    (host.root / f"{adapter}/i2c-dev/i2c-5").mkdir(parents=True)
    (host.root / f"{adapter}/i2c-dev/i2c-5/device").symlink_to("../../../i2c-5")
    host.directory("sys/class/i2c-dev")
    (host.root / "sys/class/i2c-dev/i2c-5").symlink_to(host.root / f"{adapter}/i2c-dev/i2c-5")
    assert nodes(host).functions("/dev/i2c-5") == (A,)


def test_a_bus_of_i2c_that_goes_away_is_nobodys(host: Tree):
    host.link("sys/class/i2c-dev/i2c-5", "sys/devices/gone")
    assert nodes(host).functions("/dev/i2c-5") == ()


def test_the_kind_of_a_file_is_what_stat_says(tmp_path: Path):
    (tmp_path / "é").write_text("")
    directory = os.open("/", os.O_RDONLY)
    reader = KindReader()
    try:
        null = reader.read("dev/null", directory)
        assert (null.is_character_device, null.major, null.minor) == (True, MEM_MAJOR, NULL)
        assert reader.read(str(tmp_path / "é"), directory).kind == stat.S_IFREG
        with pytest.raises(FileNotFoundError):
            reader.read(str(tmp_path / "none"), directory)
        epoll = os.eventfd(0)
        assert reader.read(f"/proc/self/fd/{epoll}", directory).kind == 0
        os.close(epoll)
    finally:
        os.close(directory)


def test_this_machines_processes_are_read_without_a_crash():
    files = ProcessFiles(Path("/"))
    me = Path("/proc") / str(os.getpid())
    assert files.opened(me) == files.mapped(me) == set()
