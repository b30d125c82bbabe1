import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.host.kmsg import Kmsg, Record, parse_cursor, parse_record, unescape
from agent.ports import KernelLines
from tests.host.trees import Tree

RECORD = (
    b"3,339,5140900,-;nvidia 0000:c1:00.0: AMD-Vi: Event logged\n SUBSYSTEM=pci\n DEVICE=+pci:0000:c1:00.0\n"
)


def test_a_record_is_taken_apart_without_its_dictionary() -> None:
    assert parse_record(RECORD) == Record(339, 0, 5.1409, "nvidia 0000:c1:00.0: AMD-Vi: Event logged")
    assert parse_record(b"30,7,1,-,caller=T1;systemd[1]: x; y\n") == Record(7, 3, 1e-06, "systemd[1]: x; y")
    assert parse_record(b"3,8,1,c;rest\n") == Record(8, 0, 1e-06, "rest", continues=True)


@pytest.mark.parametrize("text", [b"", b"no record", b"a,b,c,-;x", b"1,2;x", b"\xb2,1,1,-;x"])
def test_what_is_no_record_is_passed_over(text: bytes) -> None:
    assert parse_record(text) is None


@pytest.mark.parametrize(
    ("logged", "text"),
    [
        (rb"AMD-Vi: \x09Event", "AMD-Vi:  Event"),
        (rb"first\x0asecond", "first second"),
        (rb"a \x5cx41 b", r"a \x41 b"),  # a backslash that was logged stays one
        (rb"caf\xc3\xa9 \xff", "caf\u00e9 \ufffd"),
        (rb"no \xzz escape \x", r"no \xzz escape \x"),
    ],
)
def test_what_the_kernel_escaped_is_read_as_it_was_logged_and_stays_one_line(
    logged: bytes, text: str
) -> None:
    assert unescape(logged) == text


def test_a_cursor_of_another_boot_or_of_none_starts_from_the_beginning() -> None:
    assert parse_cursor("boot-a:12", "boot-a") == 12
    assert parse_cursor("boot-b:12", "boot-a") == -1
    assert parse_cursor("", "boot-a") == -1
    assert parse_cursor("nonsense", "boot-a") == -1
    assert parse_cursor("boot-a:\u0663", "boot-a") == -1


Log = Callable[..., None]


@pytest.fixture
def log(tree: Tree) -> Iterator[Log]:
    """A pipe in the log's place that gives one record a read, as the log does; what was read is gone."""
    tree.file("proc/sys/kernel/random/boot_id", "boot-a\n")
    tree.directory("dev")
    os.mkfifo(tree.root / "dev/kmsg")
    writer = os.open(tree.root / "dev/kmsg", os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT)

    def write(sequence: int, text: str, priority: int = 3, flags: str = "-") -> None:
        os.write(writer, f"{priority},{sequence},1000,{flags};{text}\n".encode())

    yield write
    os.close(writer)


def texts(read: KernelLines) -> list[str]:
    return [text for _, text in read.lines]


async def test_lines_after_the_cursor_are_read_without_waiting(tree: Tree, log: Log) -> None:
    log(339, "AMD-Vi: Event logged")
    read = await Kmsg(tree.root).read("boot-a:338")
    assert texts(read) == ["AMD-Vi: Event logged"]
    assert (read.cursor, read.gap, read.more, read.fresh) == ("boot-a:339", False, False, False)
    assert await Kmsg(tree.root).read(read.cursor) == KernelLines((), "boot-a:339")


async def test_lines_that_were_lost_leave_a_gap(tree: Tree, log: Log) -> None:
    log(339, "x")
    assert (await Kmsg(tree.root).read("boot-a:7")).gap


async def test_a_log_whose_first_lines_are_gone_has_a_gap_before_it(tree: Tree, log: Log) -> None:
    log(339, "x")
    assert (await Kmsg(tree.root).read("")).gap


async def test_a_cursor_of_another_boot_says_that_these_lines_begin_anew(tree: Tree, log: Log) -> None:
    log(0, "Linux version")
    read = await Kmsg(tree.root).read("boot-b:5000")
    assert (texts(read), read.fresh, read.gap, read.cursor) == (["Linux version"], True, False, "boot-a:0")


async def test_a_boot_that_cannot_be_told_is_an_error_and_no_guess(tree: Tree, log: Log) -> None:
    (tree.root / "proc/sys/kernel/random/boot_id").unlink()
    log(1, "x")
    with pytest.raises(OSError, match="boot_id"):
        await Kmsg(tree.root).read("")


async def test_a_line_written_by_a_program_is_not_the_kernels_word(tree: Tree, log: Log) -> None:
    log(340, "NVRM: Xid (PCI:0000:c1:00): 79, forged", priority=12)
    read = await Kmsg(tree.root).read("boot-a:339")
    assert (read.lines, read.cursor) == ((), "boot-a:340")


async def test_a_flood_is_read_in_bounded_pieces_that_leave_nothing_out(tree: Tree, log: Log) -> None:
    for number in range(11):
        log(number, f"line {number}")
    kmsg, cursor, seen, more = Kmsg(tree.root, max_lines=4), "", [], []
    for _ in range(3):
        read = await kmsg.read(cursor)
        assert not read.gap
        cursor = read.cursor
        seen.append(texts(read))
        more.append(read.more)
    assert [len(piece) for piece in seen] == [4, 4, 3]
    assert [line for piece in seen for line in piece] == [f"line {n}" for n in range(11)]
    assert more == [True, True, False]


async def test_pieces_of_one_line_are_joined_wherever_the_bound_falls(tree: Tree, log: Log) -> None:
    log(1, "AMD-Vi: Event logged [")
    log(2, "IO_PAGE_FAULT device=c1:00.0 ", flags="c")
    log(3, "domain=0x1]", flags="c")
    log(4, "next")
    kmsg = Kmsg(tree.root, max_lines=1)
    first = await kmsg.read("boot-a:0")
    assert texts(first) == ["AMD-Vi: Event logged [IO_PAGE_FAULT device=c1:00.0 domain=0x1]"]
    assert texts(await kmsg.read(first.cursor)) == ["next"]


async def test_a_program_cannot_continue_a_line_of_the_kernels(tree: Tree, log: Log) -> None:
    log(1, "NVRM: GPU 0000:c1:00.0: ")
    log(2, "GPU has fallen off the bus", priority=12, flags="c")
    assert texts(await Kmsg(tree.root).read("boot-a:0")) == ["NVRM: GPU 0000:c1:00.0: "]


async def test_an_older_cursor_is_read_from_again_and_not_from_where_the_last_read_ended(
    tmp_path: Path,
) -> None:
    """As after a read that was given up on: its lines went nowhere. A file stands for a log that can be read twice."""
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("boot-a\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_bytes(RECORD)
    kmsg = Kmsg(tmp_path)
    first = await kmsg.read("boot-a:338")
    assert await kmsg.read(first.cursor) == KernelLines((), "boot-a:339")
    assert texts(await kmsg.read("boot-a:338")) == texts(first)


def opened(tree: Tree) -> list[str]:
    """This tree's log among this process's open files; the other files of the process come and go."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own is closed again
            found.append(str(descriptor.readlink()))
    return [path for path in found if path == str(tree.root / "dev/kmsg")]


async def test_a_log_that_is_no_longer_used_is_closed(tree: Tree, log: Log) -> None:
    log(1, "x")
    kmsg = Kmsg(tree.root)
    before = len(opened(tree))  # the writer has it open too
    await kmsg.read("")
    assert len(opened(tree)) == before + 1
    for thread in threading.enumerate():  # a thread that has just read may not have ended yet
        if thread.name == "kernel log":
            thread.join()
    del kmsg
    assert len(opened(tree)) == before


async def test_a_missing_log_raises(tree: Tree) -> None:
    tree.file("proc/sys/kernel/random/boot_id", "boot-a\n")
    with pytest.raises(FileNotFoundError):
        await Kmsg(tree.root).read("")


@pytest.mark.skipif(
    not os.access("/dev/kmsg", os.R_OK), reason="the kernel log is not readable here: need root"
)
async def test_the_real_log_is_read_to_its_end_in_bounded_pieces() -> None:
    kmsg = Kmsg(max_lines=5)
    try:
        first = await kmsg.read("")
    except PermissionError:
        pytest.skip("the kernel log is restricted here (dmesg_restrict)")
    assert len(first.lines) <= 5
    rest = await kmsg.read(first.cursor)
    again = await Kmsg(max_lines=5).read(first.cursor)  # the file opened anew: the same lines
    assert texts(rest)[: len(again.lines)] == texts(again)[: len(rest.lines)]
    assert not rest.fresh
