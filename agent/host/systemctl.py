"""systemd by its command line tools, for machines whose bus cannot be reached from here."""

import asyncio
import errno
from pathlib import Path

from agent.core.observation import Unit
from agent.host.command import Finished, run_command
from agent.host.manager import TransientCommand
from agent.host.systemctl_show import show_unit
from agent.host.transient import run_words

_DEADLINE = 10.0
RELOAD_DEADLINE = 60.0  # the answer comes when PID 1 has read every unit anew
_POLL = 0.1
_SETTLE = 5.0
_NO_ANSWER = (
    "timed out", "Connection reset", "Connection closed", "Broken pipe", "not connected", "Remote peer disconnected",
    "did not receive a reply", "Did not receive a reply",
)  # fmt: skip
_NOT_LOADED = ("not loaded", "not-found", "could not be found", "not found", "No such process")


class SystemctlManager:
    """``ServiceManager`` by systemctl and systemd-run, each command behind ``prefix`` (nsenter, for instance).

    ``root`` is where that machine's /sys/fs/cgroup can be read from here.
    """

    def __init__(self, prefix: tuple[str, ...] = (), root: Path = Path("/")) -> None:
        self._prefix = prefix
        self._root = root

    async def unit(self, name: str) -> Unit:
        return await show_unit(name, self._root, self._prefix)

    async def reload(self) -> None:
        await self._done("systemctl", "daemon-reload", deadline=RELOAD_DEADLINE)

    async def start(self, name: str) -> None:
        await self._done("systemctl", "start", "--no-block", "--", name)

    async def stop(self, name: str) -> None:
        await self._done("systemctl", "stop", "--no-block", "--", name)

    async def kill(self, name: str) -> None:
        await self._done_if_loaded("systemctl", "kill", "--signal=SIGKILL", "--", name)

    async def reset_failed(self, name: str) -> None:
        await self._done_if_loaded("systemctl", "reset-failed", "--", name)

    async def run(self, command: TransientCommand) -> None:
        words = run_words(command)
        await self._clear(command.unit)
        await self._done(*words)
        try:
            begun = await self._until(command.unit, gone=False)
        except OSError as error:
            text = f"{command.unit} was queued, and nothing tells whether it started: {error}"
            raise TimeoutError(text) from error
        if not begun:
            raise TimeoutError(f"{command.unit} was queued and did not start within {_SETTLE:g} s")

    async def _clear(self, name: str) -> None:
        unit = await self.unit(name)
        if unit.load_state == "not-found":
            return
        if unit.active_state == "failed":
            await self.reset_failed(name)
        elif (unit.active_state, unit.sub_state) == ("active", "exited"):
            await self._done_if_loaded("systemctl", "stop", "--no-block", "--", name)
        elif unit.active_state != "inactive":
            text = f"{name} still runs ({unit.active_state}, {unit.sub_state}); another was not started"
            raise OSError(errno.EBUSY, text)
        await self._until(name, gone=True)

    async def _until(self, name: str, *, gone: bool) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + _SETTLE
        while True:
            unit = await self.unit(name)
            if unit.load_state == "not-found" if gone else unit.active_state != "inactive":
                return True
            if loop.time() > end:
                return False
            await asyncio.sleep(_POLL)

    async def _done(self, *words: str, deadline: float = _DEADLINE) -> None:
        done = await run_command((*self._prefix, *words), deadline)
        if done.status != 0:
            raise _failure(words, done)

    async def _done_if_loaded(self, *words: str) -> None:
        done = await run_command((*self._prefix, *words), _DEADLINE)
        if done.status != 0 and not any(text in done.stderr for text in _NOT_LOADED):
            raise _failure(words, done)


def _failure(words: tuple[str, ...], done: Finished) -> OSError:
    """systemctl's own words; status 4 is its "no permission", 5 its "no such unit" (man 1 systemctl).

    What it was asked for may come to pass after a TimeoutError or a ConnectionError.
    """
    text = done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else f"status {done.status}"
    number = {4: errno.EACCES, 5: errno.ENOENT}.get(done.status, errno.EIO)
    if "Access denied" in text or "authentication required" in text:
        number = errno.EACCES
    if any(word in text for word in _NO_ANSWER):
        number = errno.ETIMEDOUT
    return OSError(number, f"{' '.join(words[:2])} {words[-1]}: {text}")
