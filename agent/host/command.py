"""The one door for subprocesses: an argument list, a deadline, and an end that is waited for."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_KILL_WAIT = 2.0  # a killed process that sleeps in the kernel is left behind after this many seconds


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended. ``status`` is negative for a signal."""

    status: int
    stdout: str
    stderr: str


class StuckError(TimeoutError):
    """A command that was killed and sleeps on in the kernel. ``process`` tells when it is gone."""

    def __init__(self, message: str, process: asyncio.subprocess.Process) -> None:
        super().__init__(message)
        self.process = process


async def run_command(
    argv: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run to its end. Raises OSError when it cannot be started, TimeoutError after ``timeout`` seconds."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=None if env is None else dict(env),
    )
    try:
        async with asyncio.timeout(timeout):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        message = f"{' '.join(argv)} did not end within {timeout:g}s"
        if not await _ended(process):
            raise StuckError(f"{message} and cannot be killed", process) from None
        raise TimeoutError(message) from None
    except asyncio.CancelledError:
        await _ended(process)
        raise
    status = -1 if process.returncode is None else process.returncode
    return Finished(status, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


async def _ended(process: asyncio.subprocess.Process) -> bool:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILL_WAIT):
            await process.wait()
    return process.returncode is not None
