"""What is asked of one place in one turn of the loop goes there in one command."""

import asyncio
import errno
import secrets
from collections.abc import Sequence

from agent.host.command import ExpiredError, run_command
from agent.host.entering import entering
from agent.host.target_script import Call, Part, last_words, parts, quoted, script

READ_DEADLINE = (
    12.0  # seconds: below the observer's own, so that the tool's words arrive and not only its silence
)
WRITE_DEADLINE = 20.0
_GATHER = 0.01  # seconds that a first question waits for others
_LAST = "exists"  # of models, on a file server that may be gone: what may hang comes last, and holds up nobody's answer
_OUTPUT_LIMIT = 8 << 20  # bytes: the largest file, in base64, and as much again as the other answers need
_ERROR_LIMIT = 64 << 10


class Batch:
    """Calls of target_functions.sh behind an argv prefix, such as ``pct exec 129 --``.

    Every method raises OSError (TimeoutError is one) where the place cannot be reached, with the last line that the
    tool said.
    """

    def __init__(self, name: str, prefix: Sequence[str]) -> None:
        self._name = name
        self._prefix = tuple(prefix)
        self._waiting: dict[Call, asyncio.Future[Part | OSError]] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, *call: str) -> Part:
        """One read, together with all that are asked at the same time; the same question is asked once."""
        _check(call)
        if self._waiting is None:
            self._waiting = {}
            task = asyncio.create_task(self._send(self._waiting))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        if call not in self._waiting:
            self._waiting[call] = asyncio.get_running_loop().create_future()
        answer = await asyncio.shield(self._waiting[call])
        if isinstance(answer, OSError):
            raise OSError(*answer.args) from answer  # of its own: one error may be everybody's
        return answer

    async def tell(self, *call: str, deadline: float = WRITE_DEADLINE) -> Part:
        """One command of its own, at once."""
        answer = (await self._run([call], deadline))[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def _send(self, waiting: dict[Call, asyncio.Future[Part | OSError]]) -> None:
        await asyncio.sleep(_GATHER)
        self._waiting = None
        calls = sorted(waiting, key=lambda call: call[0] == _LAST)
        try:
            answers = await self._run(calls, READ_DEADLINE)
        except Exception as error:  # a mistake of ours is for whoever asked to raise
            for future in waiting.values():
                future.set_exception(error)
            return
        for call, answer in zip(calls, answers, strict=True):
            waiting[call].set_result(answer)

    async def _run(self, calls: Sequence[Call], deadline: float) -> list[Part | OSError]:
        mark = f"part-{secrets.token_hex(16)}"
        there = entering(self._prefix)
        tool = there.argv[0]
        found: dict[int, Part] = {}
        try:
            done = await run_command(
                there.argv, deadline, stdin=script(mark, calls), limit=_OUTPUT_LIMIT, error_limit=_ERROR_LIMIT
            )
        except asyncio.CancelledError:
            await there.give_up()
            raise
        except ExpiredError as error:
            await there.give_up()
            found = parts(mark, error.stdout, error.stderr)
            late = f"{self._name} did not answer within {deadline:g} s"
            missing: OSError = TimeoutError(errno.ETIMEDOUT, late)
        except OSError as error:
            await there.give_up()  # one that never stops talking
            missing = OSError(error.errno or errno.EIO, f"{self._name}: {tool}: {error.strerror or error}")
        else:
            found = parts(mark, done.stdout, done.stderr)
            words = last_words(mark, done.stderr) or f"{tool} ended with status {done.status}"
            missing = OSError(errno.EHOSTUNREACH, f"{self._name}: {words}")
        return [found.get(number, missing) for number in range(len(calls))]


def _check(call: Call) -> None:
    """Before it joins others: one that cannot be written must not be the end of them all."""
    for word in call:
        quoted(word)
