"""The one door for subprocesses: an argument list, a deadline, a bounded output, and an end that is waited for."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_KILL_WAIT = 2.0  # a killed process that sleeps in the kernel is left behind after this many seconds
OUTPUT_LIMIT = 64 << 20  # bytes of one stream; whoever writes more is killed
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended. ``status`` is negative for a signal."""

    status: int
    stdout: str
    stderr: str


class ExpiredError(TimeoutError):
    """A command that did not end in time and was killed, with what it had written until then."""

    def __init__(self, message: str, stdout: str = "", stderr: str = "") -> None:
        super().__init__(message)
        self.stdout = stdout
        self.stderr = stderr


class StuckError(ExpiredError):
    """A command that was killed and sleeps on in the kernel. ``process`` tells when it is gone."""

    def __init__(
        self, message: str, process: asyncio.subprocess.Process, stdout: str = "", stderr: str = ""
    ) -> None:
        super().__init__(message, stdout, stderr)
        self.process = process


async def run_command(
    argv: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    *,
    stdin: bytes | None = None,
    limit: int = OUTPUT_LIMIT,
    error_limit: int | None = None,
) -> Finished:
    """Run to its end, in a session of its own that is killed as a whole.

    Raises OSError when it cannot be started (EFBIG when it wrote more than ``limit`` bytes, or ``error_limit`` on
    standard error), TimeoutError after ``timeout`` seconds.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=None if env is None else dict(env),
        start_new_session=True,
    )
    stdout, stderr = bytearray(), bytearray()
    errors = limit if error_limit is None else error_limit
    try:
        async with asyncio.timeout(timeout):
            await asyncio.gather(
                _feed(process, stdin),
                _drain(process, process.stdout, stdout, limit),
                _drain(process, process.stderr, stderr, errors),
            )
            status = await process.wait()
    except TimeoutError:
        message = f"{' '.join(argv)} did not end within {timeout:g}s"
        if not await _ended(process):
            raise StuckError(
                f"{message} and cannot be killed", process, _text(stdout), _text(stderr)
            ) from None
        raise ExpiredError(message, _text(stdout), _text(stderr)) from None
    except asyncio.CancelledError:
        await _ended(process)
        raise
    for written, most in ((stdout, limit), (stderr, errors)):
        if len(written) > most:
            raise OSError(errno.EFBIG, f"{' '.join(argv)} wrote more than {most} bytes")
    return Finished(status, _text(stdout), _text(stderr))


def _text(data: bytearray) -> str:
    return data.decode(errors="replace")


async def _feed(process: asyncio.subprocess.Process, data: bytes | None) -> None:
    if process.stdin is None or data is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its status says why it did not read on
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await process.stdin.wait_closed()


async def _drain(
    process: asyncio.subprocess.Process, stream: asyncio.StreamReader | None, into: bytearray, limit: int
) -> None:
    """To the end of the stream; a process that has passed the limit is killed, and its rest thrown away."""
    while stream is not None and (chunk := await stream.read(_CHUNK)):
        if len(into) <= limit:
            into += chunk
        else:
            _kill(process)


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _ended(process: asyncio.subprocess.Process) -> bool:
    _kill(process)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILL_WAIT):
            await process.wait()
    return process.returncode is not None
