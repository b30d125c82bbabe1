"""Work in a forked child, for what only a process of its own can show: a death by SIGKILL, a limit of its own."""

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path


def fork(work: Callable[[], object], notes: Path, *, longest: int = 60) -> int:
    """The process id of a child that does this and nothing else; what it raises is written to ``notes``.

    ``longest``: real seconds after which a child that hangs is ended by SIGALRM.
    """
    with warnings.catch_warnings():
        # Test runners have a thread that reads their orders. The child uses nothing of theirs and never returns.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(longest)
        notes.write_text("it was ended from outside")
        work()
        code = 0
    except BaseException:
        notes.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def wait(pid: int, notes: Path) -> int:
    """0, or -9 when SIGKILL ended it. Fails with the child's own words when it failed."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in {0, -signal.SIGKILL}, f"child ended with {code}: {notes.read_text()}"
    return code
