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
from agent.host.device_nodes import read_device_nodes
from agent.host.proc_holders import ProcHolders
from agent.host.process_files import ProcessFiles
from agent.host.statx import KindReader
from tests.host.trees import Tree

A = "0000:01:00.0"
MEM_MAJOR, NULL, ZERO = 1, 3, 5
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


async def test_B3_workers_whose_main_thread_has_ended_are_seen(host: Tree, start: Start):
    process = start(
        "threading.Thread(target=lambda: (time.sleep(0.2), ready(), time.sleep(600))).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)"  # exit(2) ends one thread
    )
    assert process.poll() is None
    assert not list(Path(f"/proc/{process.pid}/fd").iterdir())
    assert await holders(host) == [(process.pid, "/dev/nvidia-uvm")]


async def test_B3_a_thread_with_open_files_of_its_own_is_seen(host: Tree, start: Start):
    process = start(
        "os.close(0)\n"
        "def work():\n"
        "    assert ctypes.CDLL(None).unshare(0x400) == 0\n"  # CLONE_FILES
        "    os.open('/dev/zero', os.O_RDONLY); ready(); time.sleep(600)\n"
        "threading.Thread(target=work).start()"
    )
    assert await holders(host) == [(process.pid, "/dev/nvidia-uvm")]


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
    host.process(10, "python3", "/dev/null/none")
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
    assert read_device_nodes(host.root).functions("/dev/vfio/511:1") == (other,)


def test_a_bus_of_i2c_belongs_to_the_gpu_whose_bus_it_is(host: Tree):
    adapter = f"sys/devices/pci0000:00/{A}/i2c-5"
    host.directory(adapter)
    (host.root / f"{adapter}/i2c-dev/i2c-5").mkdir(parents=True)
    (host.root / f"{adapter}/i2c-dev/i2c-5/device").symlink_to("../../../i2c-5")
    host.directory("sys/class/i2c-dev")
    (host.root / "sys/class/i2c-dev/i2c-5").symlink_to(host.root / f"{adapter}/i2c-dev/i2c-5")
    assert read_device_nodes(host.root).functions("/dev/i2c-5") == (A,)


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
