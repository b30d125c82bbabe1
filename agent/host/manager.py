"""systemd as the agent needs it: units read and switched, and commands run outside the agent's own cgroup."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from agent.core.observation import Unit


@dataclass(frozen=True, slots=True)
class TransientCommand:
    """A command that PID 1 runs as a transient oneshot service.

    It has none of the caller's sandbox and is in none of the caller's cgroups: neither a stop of the agent waits for
    it, nor does its end by a signal touch it. ``unit`` stays loaded after the end, so that its outcome can be read.
    """

    unit: str  # its name, with .service
    argv: tuple[str, ...]  # absolute path first
    description: str
    # Settings by their names in a unit file, with values as there. Known are Slice, KillMode, SendSIGKILL,
    # TimeoutStartSec, TimeoutStopSec (a number of seconds, or infinity), SyslogIdentifier and CollectMode; any other
    # is a ValueError.
    properties: Mapping[str, str] = field(default_factory=dict)


class ServiceManager(Protocol):
    """systemd of one machine. Every method raises OSError (TimeoutError is one) where systemd does not answer."""

    async def unit(self, name: str) -> Unit:
        """``load_state`` "not-found" where there is none. Aliases are resolved: ``name`` is the unit's own."""
        ...

    async def reload(self) -> None: ...

    async def start(self, name: str) -> None:
        """Returns when the job is queued."""
        ...

    async def stop(self, name: str) -> None:
        """Returns when the job is queued."""
        ...

    async def kill(self, name: str) -> None:
        """SIGKILL to every process of the unit. No error where there is none, nor where the unit is not loaded."""
        ...

    async def reset_failed(self, name: str) -> None:
        """No error where the unit is not loaded."""
        ...

    async def run(self, command: TransientCommand) -> None:
        """Start it; returns when it has been started, not when it has ended. Read ``unit(command.unit)`` for its state:
        activating while it runs, active (exited) after status 0, failed with ``exit_status`` after another.

        An ended unit of the same name is cleared away first; one that still runs is an OSError (EBUSY). TimeoutError and
        ConnectionError leave open whether it will start; after any other OSError it will not.
        """
        ...
