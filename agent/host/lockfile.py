"""One agent per state directory: a lock that the kernel drops with its process, however that ends."""

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.core.errors import TerminalError


class InstanceLock:
    """flock(2) on a file that also holds the owner's pid, for people. The file is never removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> None:
        """Raises TerminalError naming the pid that has it; OSError when the file cannot be made."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not self._take(fd):
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise TerminalError(
                f"another agent is running: pid {holder} holds {self._path}",
                reason="AlreadyRunning",
                next_step=f"stop it first, or look at it with: agent status (ps -p {holder})",
            )
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        self._fd = fd

    def _take(self, fd: int) -> bool:
        """A ``status`` that looks whether the agent lives holds the lock for an instant: that is not another agent."""
        for pause in (0.0, 0.02, 0.05, 0.1):
            time.sleep(pause)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return True
        return False

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
