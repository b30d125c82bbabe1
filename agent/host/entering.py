"""One command in a target, and how PID 1 is told to end it there when it is no longer waited for."""

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from agent.host.command import run_command

STARTER = "systemd-run"
_STOP_DEADLINE = 2.0  # seconds; with the deadline of a read it stays below the observer's own


@dataclass(frozen=True, slots=True)
class Entering:
    """``argv`` runs a shell there. ``unit``: the transient unit in which PID 1 does it; "" where nothing stands between."""

    argv: tuple[str, ...]
    unit: str = ""
    stop: tuple[str, ...] = ()

    async def give_up(self) -> None:
        """The command was killed here, and with PID 1 between, that ends only who waited for it: a write that was
        given up would still come, after whatever is done next. Where PID 1 cannot be told, RuntimeMaxSec ends it.
        """
        if self.stop:
            with contextlib.suppress(OSError):
                await run_command(self.stop, _STOP_DEADLINE)


def entering(prefix: Sequence[str]) -> Entering:
    """``prefix`` as of ``prefix_for``, and possibly behind a command that enters another place first."""
    words = tuple(prefix)
    if STARTER not in words:
        return Entering((*words, "sh", "-s"))
    at = words.index(STARTER)
    unit = f"gpu-host-agent-enters-{secrets.token_hex(8)}.service"
    stop = (*words[:at], "systemctl", "stop", "--no-block", "--", unit)
    return Entering((*words[: at + 1], f"--unit={unit}", *words[at + 1 :], "sh", "-s"), unit, stop)
