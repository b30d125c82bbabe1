"""Which threads of a process have open files of their own.

kcmp(2) tells at once whether two threads share their table of open files. Without it (no right to, another machine)
they are told apart by how many files there are: that takes a reading of every table before Linux 6.2, and does not see a
thread that has unshared its files and has exactly as many of them as another.
"""

import ctypes
import os
from pathlib import Path

ENDED = (FileNotFoundError, ProcessLookupError)  # as /proc answers for a process or a thread that is gone
_libc = ctypes.CDLL(None, use_errno=True)
_KCMP = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine)
_KCMP_FILES = 2


def tables_of_threads(process: Path) -> list[list[Path]]:
    """The tables beside that of the first thread, each by all threads that share it: any of them may end meanwhile.

    A first thread that has ended has none left, while the others go on. Raises OSError.
    """
    try:
        if (process / "task").stat().st_nlink <= 3:
            return []
    except ENDED:
        return []
    others = threads_but_first(process)
    shared = _by_comparing(process, others)
    if shared is None:
        shared = _by_counting(process, others)
    return [[process / "task" / name / "fd" for name in names] for names in shared]


def threads_but_first(process: Path) -> list[str]:
    try:
        return [name for name in os.listdir(process / "task") if name != process.name]  # noqa: PTH208 - names are enough
    except ENDED:
        return []


def _by_comparing(process: Path, others: list[str]) -> list[list[str]] | None:
    """None: the kernel does not say."""
    if _KCMP is None or not _is_by_our_numbers(process):
        return None
    shared: list[list[str]] = [[process.name]]
    try:
        for name in others:
            for names in shared:
                if _share(int(name), int(names[0])):
                    names.append(name)
                    break
            else:
                shared.append([name])
    except OSError:
        return None
    return shared[1:]


def _share(one: int, other: int) -> bool:
    """Not, where either has ended: a table is rather read twice than passed over. Raises OSError."""
    answer = _libc.syscall(_KCMP, one, other, _KCMP_FILES, ctypes.c_ulong(0), ctypes.c_ulong(0))
    if answer < 0:
        number = ctypes.get_errno()
        try:
            raise OSError(number, os.strerror(number))
        except ProcessLookupError:
            return False
    return bool(answer == 0)


def _is_by_our_numbers(process: Path) -> bool:
    """A /proc of another pid namespace has other numbers than our calls."""
    try:
        return (process / "task").samefile(Path("/proc") / process.name / "task")
    except OSError:
        return False


def _by_counting(process: Path, others: list[str]) -> list[list[str]]:
    own = count_files(process / "fd")
    by_count: dict[int, list[str]] = {}
    for name in others:
        count = count_files(process / "task" / name / "fd")
        if count not in (0, own) and count != count_files(process / "fd"):
            by_count.setdefault(count, []).append(name)
    return list(by_count.values())


def count_files(table: Path) -> int:
    """How many files are open: the size of the directory since Linux 6.2, before that by counting. 0: ended."""
    try:
        return table.stat().st_size or len(os.listdir(table))  # noqa: PTH208 - names are enough
    except ENDED:
        return 0
