"""The spec from a file: read whole or not at all."""

import asyncio
import errno
import os
import stat
import time
from pathlib import Path

from agent.core.errors import SpecError
from agent.host.file_calls import FileCalls
from agent.host.symlinks import entries_to
from agent.ports import SpecText

MAX_BYTES = 64 * 1024
SETTLE = 0.1  # seconds without a write before a file that was just written is taken
DEADLINE = 10.0  # seconds for one look at it
_ATTEMPTS = 30


class FileSpecSource:
    """``SpecSource``. ``strict``: the file and every directory on the way are root's (``owner``) alone to change."""

    def __init__(self, path: Path, *, strict: bool, owner: int = 0, settle: float = SETTLE) -> None:
        self._path = path
        self._strict = strict
        self._owner = owner
        self._settle = settle
        self._files = FileCalls("the spec")

    async def read(self) -> SpecText:
        """Raises OSError when it is missing, unreadable or never still; TimeoutError when its file system does not answer;
        SpecError for its owner, mode, size or text.
        """
        for _ in range(_ATTEMPTS):
            data = await self._files.run(str(self._path), self._read_once, DEADLINE)
            if data is not None:
                return SpecText(self._decode(data), str(self._path))
            await asyncio.sleep(self._settle)
        raise OSError(errno.EAGAIN, f"{self._path} is being written all the time; waiting for it to be still")

    def _read_once(self) -> bytes | None:
        """None: it is being written right now.

        An editor that saves by rename is never seen half-way; one that writes in place is, and half a spec can be
        a valid one. So a file that changed a moment ago must be still for a moment.
        """
        resolved = self._resolve()
        try:
            if self._strict:
                self._check_owners(resolved)
            fd = os.open(resolved, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None  # swapped since it was resolved
        try:
            before = os.fstat(fd)
            self._check_file(before)
            if abs(time.time() - before.st_mtime) < self._settle:
                return None
            data = os.read(fd, MAX_BYTES + 1)
            after = os.fstat(fd)
        finally:
            os.close(fd)
        if _version(before) != _version(after) or len(data) != after.st_size:
            return None
        return data

    def _resolve(self) -> Path:
        try:
            return self._path.resolve(strict=True)
        except RuntimeError as error:
            raise OSError(errno.ELOOP, f"{self._path} is a symlink loop") from error

    def _check_file(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise SpecError((f"{self._path}: not a regular file; expected a YAML file",))
        if status.st_size > MAX_BYTES:
            raise SpecError(
                (f"{self._path}: {status.st_size} bytes; expected at most {MAX_BYTES // 1024} KiB",)
            )

    def _check_owners(self, resolved: Path) -> None:
        links = (entry.parent for entry in entries_to(self._path) if entry.is_symlink())
        problems = [
            self._owner_problem(place) for place in dict.fromkeys((resolved, resolved.parent, *links))
        ]
        found = tuple(problem for problem in problems if problem)
        if found:
            raise SpecError(found)

    def _owner_problem(self, place: Path) -> str:
        status = place.stat()
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid == self._owner and not mode & 0o022:
            return ""
        return (
            f"{place}: owner {status.st_uid}, mode {mode:04o}; expected owner {self._owner} and no write permission"
            f" for group and others, since whoever can change it commands this host;"
            f" correct it with: chown {self._owner} {place} && chmod go-w {place}"
        )

    def _decode(self, data: bytes) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise SpecError(
                (f"{self._path}:{line}: byte {error.start} is not UTF-8; save the file as UTF-8",)
            ) from error


def _version(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
