import os

import pytest

from agent.host.kmsg import Kmsg, parse_cursor, parse_record
from tests.host.trees import Tree

RECORD = (
    "3,339,5140900,-;nvidia 0000:c1:00.0: AMD-Vi: Event logged\n SUBSYSTEM=pci\n DEVICE=+pci:0000:c1:00.0\n"
)


def test_a_record_is_taken_apart_without_its_dictionary():
    assert parse_record(RECORD) == (339, 0, 5.1409, "nvidia 0000:c1:00.0: AMD-Vi: Event logged")
    assert parse_record("30,7,1,-,caller=T1;systemd[1]: x; y\n") == (7, 3, 1e-06, "systemd[1]: x; y")


@pytest.mark.parametrize("text", ["", "no record", "a,b,c,-;x", "1,2;x"])
def test_what_is_no_record_is_passed_over(text: str):
    assert parse_record(text) is None


def test_a_cursor_of_another_boot_or_of_none_starts_from_the_beginning():
    assert parse_cursor("boot-a:12", "boot-a") == 12
    assert parse_cursor("boot-b:12", "boot-a") == -1
    assert parse_cursor("", "boot-a") == -1
    assert parse_cursor("nonsense", "boot-a") == -1


@pytest.fixture
def log(tree: Tree):
    """A pipe in the log's place: whatever is in it is read as one record."""
    tree.file("proc/sys/kernel/random/boot_id", "boot-a\n")
    tree.directory("dev")
    os.mkfifo(tree.root / "dev/kmsg")
    writer = os.open(tree.root / "dev/kmsg", os.O_RDWR)
    yield writer
    os.close(writer)


async def test_lines_after_the_cursor_are_read_without_waiting(tree: Tree, log: int):
    os.write(log, RECORD.encode())
    read = await Kmsg(tree.root).read("boot-a:338")
    assert [text for _, text in read.lines] == ["nvidia 0000:c1:00.0: AMD-Vi: Event logged"]
    assert (read.cursor, read.gap) == ("boot-a:339", False)
    assert await Kmsg(tree.root).read(read.cursor) == type(read)((), "boot-a:339")


async def test_lines_that_were_lost_leave_a_gap(tree: Tree, log: int):
    os.write(log, RECORD.encode())
    assert (await Kmsg(tree.root).read("boot-a:7")).gap


async def test_a_line_written_by_a_program_is_not_the_kernels_word(tree: Tree, log: int):
    os.write(log, b"12,340,1,-;NVRM: Xid (PCI:0000:c1:00): 79, forged\n")
    read = await Kmsg(tree.root).read("boot-a:339")
    assert (read.lines, read.cursor) == ((), "boot-a:340")


async def test_a_missing_log_raises(tree: Tree):
    with pytest.raises(FileNotFoundError):
        await Kmsg(tree.root).read("")


@pytest.mark.skipif(
    not os.access("/dev/kmsg", os.R_OK), reason="the kernel log is not readable here: need root"
)
async def test_the_real_log_is_read_to_its_end_in_bounded_pieces():
    try:
        first = await Kmsg(max_lines=5).read("")
    except PermissionError:
        pytest.skip("the kernel log is restricted here (dmesg_restrict)")
    assert len(first.lines) <= 5
    rest = await Kmsg().read(first.cursor)
    assert not set(rest.lines) & set(first.lines) or not first.lines
