"""One agent for each state directory; and for a real host one in all, wherever each keeps its state."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from agent.app.paths import HOST_LOCK, Paths
from agent.host.lockfile import InstanceLock


@contextmanager
def only_agent(kind: str, paths: Paths) -> Iterator[None]:
    """While inside, no other agent acts where this one does. ``kind``: real or sim.

    Raises TerminalError naming the process that does; OSError when a lock file cannot be made.
    """
    with ExitStack() as locks:
        if kind == "real":
            HOST_LOCK.parent.mkdir(parents=True, exist_ok=True)
            locks.enter_context(InstanceLock(HOST_LOCK))
        paths.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        locks.enter_context(InstanceLock(paths.lock))
        yield
