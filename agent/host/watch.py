"""Noticing that a file changed, whatever way it was saved, moved, linked or deleted.

The events of the file system are only a hint to look: whether something changed is decided by comparing what is on
the way to each file before and after. So a lost event is made up for at the next look, and noise wakes nobody.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from pathlib import Path

from watchfiles import awatch

from agent.host.file_calls import FileCalls
from agent.host.symlinks import entries_to

_DEBOUNCE_MS = 400  # the longest a burst can put off its trigger
_STEP_MS = 200  # a burst ends with this much quiet; the watching thread also wakes this often
_LOOK_MS = 5000  # look at least this often, event or not
_RETRY = 0.05
_DEADLINE, _HUNG_PAUSE = 10.0, 5.0  # seconds

State = tuple[tuple[str, int, int, int], ...]


class _Stop(asyncio.Event):
    """watchfiles sets the event it was given when it is cancelled; that must not stop the whole daemon."""

    def __init__(self, outer: asyncio.Event) -> None:
        super().__init__()
        self._outer = outer

    def is_set(self) -> bool:
        return super().is_set() or self._outer.is_set()


class _Looker:
    """Looks at the files where that holds up nothing else: one may be on a file system that does not answer."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files
        self._calls = FileCalls("watched files")

    async def look(self) -> tuple[State, dict[Path, int]]:
        """What is on the way to each file, and the directories to be watched for that. Waits for an answer."""
        while True:
            try:
                return await self._calls.run(
                    str(self._files[0]), lambda: (_look(self._files), _directories(self._files)), _DEADLINE
                )
            except OSError:
                await asyncio.sleep(_HUNG_PAUSE)


async def watch(paths: Iterable[Path], stop: asyncio.Event) -> AsyncIterator[None]:
    """Yields once for each burst of changes to any of the files, until ``stop`` is set.

    Works for files and directories that do not exist yet, or are deleted and come back: the nearest existing
    parent is watched then. While the way to one of them does not answer, nothing is noticed of the others either.
    """
    looker = _Looker(tuple(paths))
    state, directories = await looker.look()
    while not stop.is_set():
        try:
            async with aclosing(
                awatch(
                    *directories,
                    watch_filter=None,
                    debounce=_DEBOUNCE_MS,
                    step=_STEP_MS,
                    rust_timeout=_LOOK_MS,
                    yield_on_timeout=True,
                    recursive=False,
                    stop_event=_Stop(stop),
                )
            ) as hints:
                async for _ in hints:
                    now, there = await looker.look()
                    if now != state:
                        state = now
                        yield
                    if there != directories:
                        break
        except (OSError, RuntimeError):
            # A directory went away between listing it and watching it, or the host is out of inotify watches
            # (a RuntimeError of watchfiles): looking goes on without hints.
            await asyncio.sleep(_RETRY)
        now, directories = await looker.look()
        if now != state and not stop.is_set():
            state = now
            yield


def _directories(files: tuple[Path, ...]) -> dict[Path, int]:
    """Existing directories on the way, with their inode: one that was deleted and made again is another one."""
    found: dict[Path, int] = {}
    for file in files:
        if file.is_dir():
            found[file] = file.stat().st_ino
        for entry in entries_to(file):
            try:
                found[entry.parent] = entry.parent.stat().st_ino
            except OSError:
                continue
    return found


def _look(files: tuple[Path, ...]) -> State:
    """What is on the way to each file.

    A directory on the way counts by its identity; a file, a symlink, or a directory that is itself watched, also by
    the date of its content.
    """
    state = [(str(f), 0, 0, f.stat().st_mtime_ns) for f in files if f.is_dir()]
    for entry in dict.fromkeys(entry for file in files for entry in entries_to(file)):
        try:
            status = os.lstat(entry)
        except OSError:
            state.append((str(entry), 0, 0, 0))
            continue
        is_directory = entry.is_dir() and not entry.is_symlink()
        state.append(
            (str(entry), status.st_ino, 0, 0)
            if is_directory
            else (str(entry), status.st_ino, status.st_size, status.st_mtime_ns)
        )
    return tuple(state)
