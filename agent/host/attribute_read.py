"""Reads of attributes that the kernel answers only under their device's lock, by one child that can be left behind.

An unbind, a probe or a reset that does not return keeps that lock for ever, and whoever then reads waits with it, out
of reach of signals. A thread that waits so keeps its process from ending, and its lock files with it; a child keeps
nobody. It is a shell that runs nothing but its own builtins: about 1 MB, and no process is started for a read.
"""

import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from agent.core.fact import Absent, Fact, Known, Unknown

STALL = 2.0  # seconds without an answer; an attribute answers in microseconds
_CHUNK = 4096
_REAP, _PATIENCE = 0.01, 100  # seconds, tries: for a killed shell to be gone
# A path and how the line begins, each on a line; the answer is "=" and the first such line, "-" where there is no such
# file, or "!". What is shorter than a line counts where there is any of it: a read that fails looks to a shell like an
# empty file.
_LOOP = """
cd /
while IFS= read -r path && IFS= read -r begins; do
  value= opened= ended=
  {
    opened=1
    while IFS= read -r value && ended=1 || ! ended=; do
      case $value in "$begins"*) break ;; esac
    done
  } <"$path" || :
  if [ "$opened" ] && [ "$ended$value" ]; then printf '=%s\\n' "$value"
  elif [ -e "$path" ]; then echo '!'
  else echo '-'
  fi
done
"""


class AttributeReader:
    """``key`` names what may be stuck: a PCI address. Calls from several threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._child: _Child | None = None
        self._stuck: Mapping[str, _Child] = {}

    def is_stuck(self, key: str) -> bool:
        """An earlier read of it has not returned from the kernel."""
        child = self._stuck.get(key)
        return child is not None and child.is_alive()

    def read(self, key: str, path: Path, begins: str = "") -> Fact[str] | None:
        """The first line that ``begins`` so; without one the file counts as one that cannot be read.

        Blocks for up to ``STALL`` seconds. None: no answer, now or to an earlier read of ``key``.
        """
        with self._turn:
            if self.is_stuck(key):
                return None
            try:
                child = self._child = self._child or _Child()
                answer = child.ask(f"{path}\n{begins}\n")
            except TimeoutError:
                # Not killed: it would not die where it waits. It ends when it comes back and finds nobody there.
                child.let_go()
                self._child, self._stuck = None, {**self._stuck, key: child}
                return None
            except OSError as error:
                self._child = None
                return Unknown(f"{path}: the process that reads it failed: {error}", "Unreadable")
        return _fact(path, answer)


def _fact(path: Path, answer: str) -> Fact[str]:
    if answer.startswith("="):
        return Known(answer[1:].strip())
    return Absent(f"no {path}") if answer == "-" else Unknown(f"{path}: it cannot be read", "Unreadable")


class _Child:
    """One shell. Raises OSError where it cannot be started."""

    def __init__(self) -> None:
        # Not by subprocess, which complains of every child that is left behind.
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            self._pid = os.posix_spawn(
                "/bin/sh", ["sh", "-c", _LOOP], os.environ, setsid=True,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, to) for to, fd in enumerate((theirs_in, theirs_out, null))],
            )  # fmt: skip
        except OSError:
            _close(self._to, self._from)
            raise
        finally:
            _close(theirs_in, theirs_out, null)
        self._ended = False
        self._end = weakref.finalize(self, _end, self._pid, self._to, self._from)

    def is_alive(self) -> bool:
        # Once it is reaped its number may be another child's, which must not be waited for here.
        self._ended = self._ended or _reaped(self._pid)
        return not self._ended

    def ask(self, question: str) -> str:
        """Raises TimeoutError after ``STALL`` seconds, ConnectionError where the shell has ended."""
        os.write(self._to, question.encode())
        poll = select.poll()
        poll.register(self._from, select.POLLIN)
        answer = b""
        while not answer.endswith(b"\n"):
            if not poll.poll(STALL * 1000):
                raise TimeoutError
            chunk = os.read(self._from, _CHUNK)
            if not chunk:
                raise ConnectionError("it has ended")
            answer += chunk
        return answer[:-1].decode(errors="replace")

    def let_go(self) -> None:
        """Close its pipes, at which it ends as soon as it can."""
        self._end.detach()
        _close(self._to, self._from)


def _end(pid: int, *pipes: int) -> None:
    """One that waits for a question dies at once."""
    _close(*pipes)
    for _ in range(_PATIENCE):
        if _reaped(pid):
            return
        os.kill(pid, signal.SIGKILL)
        time.sleep(_REAP)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
