"""The end of a command that PID 1 runs for the agent (``ServiceManager.run``): waited for, and put in words."""

import asyncio
import errno

from agent.core.observation import Unit
from agent.host.manager import ServiceManager

_POLL = 0.1  # seconds


async def ended(unit: str, said: str, deadline: float, manager: ServiceManager) -> Unit:
    """The unit, active after status 0 and failed after another. ``said`` is the command, for people.

    Raises TimeoutError after ``deadline`` seconds. Loaded and inactive is a start that systemd has not come to yet.
    """
    try:
        async with asyncio.timeout(deadline):
            while (seen := await manager.unit(unit)).active_state not in {"active", "failed"}:  # noqa: ASYNC110 - the unit is PID 1's
                await asyncio.sleep(_POLL)
    except TimeoutError:
        raise TimeoutError(
            f"{said} has not ended within {deadline:g} s; see systemctl status {unit}"
        ) from None
    return seen


async def succeeded(unit: str, said: str, deadline: float, manager: ServiceManager) -> None:
    """As ``ended``, and OSError (EIO) after any status but 0."""
    seen = await ended(unit, said, deadline, manager)
    if seen.active_state == "failed":
        how = f"status {seen.exit_status}" if seen.result == "exit-code" else seen.result
        raise OSError(errno.EIO, f"{said} ended with {how}; journalctl -u {unit} shows why")
