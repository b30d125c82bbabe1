"""One child of the P2P self-test: its steps as they come, a deadline for each, and an end that is not waited for for ever."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from agent.core.fact import value_or
from agent.core.verdict import STAYS
from agent.host.p2p_wire import Begin, End, Line, Request
from agent.host.reading import names_in, read_text

MODULE = "agent.selftest.p2p_worker"
_TERM_WAIT, _KILL_WAIT = 2.0, 3.0  # seconds
_LAST_WORDS = 1.0  # seconds for what an ended child has left in its pipe
_STDERR_KEPT = 4096  # bytes
# They change what a CUDA program sees or how it runs; the test means the whole host.
_NOT_INHERITED = re.compile(
    r"CUDA_(VISIBLE_DEVICES|DEVICE_|LAUNCH_|MPS_|INJECTION|CACHE_|MODULE_|FORCE_|DISABLE_|ENABLE_)|NVIDIA_|NCCL_"
)
_SET = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "CUDA_MODULE_LOADING": "LAZY",
    "CUDA_CACHE_DISABLE": "1",  # nothing is left in a home directory
}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds for a child's first step, in which the driver wakes the GPUs, and for each one after it."""

    first: float = 30.0
    later: float = 10.0


@dataclass(slots=True)
class Ended:
    """What a child told, and how it ended. ``why`` is "" after an ordinary end, and ``stuck`` names who cannot be ended."""

    ends: list[End] = field(default_factory=list)
    open: Begin | None = None
    why: str = ""
    hung: bool = False
    stuck: str = ""


def child_env(extra: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.match(name)}
    # -P keeps the working directory off the child's path: a module of that name there must not run as root.
    return {**kept, **_SET, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), **extra}


async def run_child(
    request: Request,
    env: Mapping[str, str],
    deadlines: Deadlines,
    until: float,
    told: Callable[[Begin], None],
) -> Ended:
    """``until``: the event loop's time after which nothing is waited for any more.

    Raises OSError where no child can be started.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", MODULE, request.model_dump_json(),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=child_env(env), start_new_session=True,
    )  # fmt: skip
    ended, stderr = Ended(), bytearray()
    listening = asyncio.create_task(_listen(process, stderr))
    try:
        await _follow(process, ended, deadlines, until, told)
        if ended.why:
            await _finish(process, ended)
        else:
            await asyncio.wait([listening], timeout=_LAST_WORDS)
    except BaseException:
        await _finish(process, ended)
        raise
    finally:
        listening.cancel()
    if not ended.why and process.returncode:
        ended.why = _said_by(process.returncode, bytes(stderr))
    return ended


async def _follow(
    process: asyncio.subprocess.Process, ended: Ended, deadlines: Deadlines, until: float, told: Callable[[Begin], None]
) -> None:  # fmt: skip
    """To the child's end, or to a deadline."""
    assert process.stdout is not None  # noqa: S101 - it was asked for above
    loop = asyncio.get_running_loop()
    step = deadlines.first
    while True:
        end = min(loop.time() + step, until)
        try:
            async with asyncio.timeout_at(end):
                line = await process.stdout.readline()
                if not line:
                    await process.wait()
                    return
        except TimeoutError:
            bound = "the whole test's time was over" if end >= until else f"no end within {step:g} s"
            ended.hung, ended.why = True, f"{bound} (pid {process.pid}, {_state(process.pid)})"
            return
        except ValueError:
            ended.why = "the child wrote a line that has no end"
            return
        try:
            said = Line.validate_json(line)
        except ValidationError as error:
            ended.why = f"the child wrote what is no step: {error.errors()[0]['msg']}"
            return
        if isinstance(said, Begin):
            ended.open = said
            told(said)
        else:
            ended.ends.append(said)
            if ended.open and (said.source, said.path) == (ended.open.source, ended.open.path):
                ended.open, step = None, deadlines.later


async def _listen(process: asyncio.subprocess.Process, kept: bytearray) -> None:
    while process.stderr is not None and (chunk := await process.stderr.read(_STDERR_KEPT)):
        kept += chunk
        del kept[:-_STDERR_KEPT]


async def _finish(process: asyncio.subprocess.Process, ended: Ended) -> None:
    """A child that outlives SIGKILL is left behind, and named: it holds its GPUs."""
    for number, grace in ((signal.SIGTERM, _TERM_WAIT), (signal.SIGKILL, _KILL_WAIT)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await process.wait()
                return
    ended.stuck = f"pid {process.pid} {STAYS} ({_state(process.pid)})"
    # Its pipes are ours no more; there is no public way to let go of a process that has not ended.
    process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001


def _said_by(status: int, stderr: bytes) -> str:
    last = (stderr.decode(errors="replace").strip().splitlines() or [""])[-1][:200]
    if status > 0:
        return f"the child ended with status {status}: {last or 'it said nothing'}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"the child was killed by {name}" + (f": {last}" if last else "")


def _state(pid: int, root: Path = Path("/")) -> str:
    """What a process that is waited for does, and where in the kernel."""
    stat = value_or(read_text(root / "proc" / str(pid) / "stat"), "").rpartition(")")[2].split()
    place = value_or(read_text(root / "proc" / str(pid) / "wchan"), "").strip()
    where = f" in {place}" if place not in {"", "0"} else ""
    return f"state {stat[0]}{where}" if stat else "gone by now"


def left_behind(root: Path, gpus: tuple[str, ...]) -> dict[str, str]:
    """Children that this agent, or one that has ended, gave up and that still live, by the GPUs of these they hold."""
    found: dict[str, str] = {}
    for name in names_in(root / "proc"):
        words = value_or(read_text(root / "proc" / name / "cmdline"), "") if name.isdecimal() else ""
        if MODULE not in words.split("\0") or _tested_with(root / "proc", name):
            continue
        for gpu in gpus:
            if gpu in words:
                found[gpu] = (
                    f"a child of an earlier self-test has not ended (pid {name}, {_state(int(name), root)})"
                )
    return found


def _tested_with(proc: Path, name: str) -> bool:
    """It belongs to a self-test of another program that goes on: its parent is of the same interpreter, not a reaper."""
    parent = value_or(read_text(proc / name / "stat"), "").rpartition(")")[2].split()[1:2]
    if not parent or parent == [str(os.getpid())]:
        return False
    try:
        return os.readlink(proc / name / "exe") == os.readlink(proc / parent[0] / "exe")  # noqa: PTH115 - only names
    except OSError:
        return False
