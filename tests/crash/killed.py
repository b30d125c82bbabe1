"""A whole agent in a forked process that is killed with SIGKILL at a chosen instant. The kill is here, never in the agent."""

import asyncio
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest

from agent.loop.journal import Journal
from agent.sim.faults import Fault
from agent.sim.profile import load_profile
from agent.sim.world import World
from tests.rig import Rig, recipe, rig

# One short level; the deadlines of the trial are long enough for a busy machine at this compression.
FACTOR = 100.0
QUICK = {"gate": {"benchmark": {"concurrency": [1], "outputTokens": 500}}}
# The floor lies between the full and the halved speed: a busy machine can only make the slow one slower.
SLOWER = {"gate": QUICK["gate"] | {"require": {"1": ">= 80 tok/s"}}, "args": {"disable-cuda-graph": True}}
AS_FOUND = recipe(services={"qwen": QUICK})
EDITED = recipe(services={"qwen": SLOWER})
LONGEST = 60  # real seconds after which a child that hangs is ended by SIGALRM

When = Literal["entry-written", "entry-not-written", "effect-not-begun"]


def type_host(root: Path, spec: str) -> Any:
    """The rig on the type host, whose model loads in no time."""
    profile = load_profile("esc8000a")
    serving = profile.serving.model_copy(update={"load_seconds": 2.0})
    return rig(root, spec=spec, profile=profile.model_copy(update={"serving": serving}), factor=FACTOR)


async def converged(root: Path, spec: str) -> None:
    async with type_host(root, spec) as agent:
        await agent.converge()


def killed(root: Path, spec: str, when: When, number: int) -> bool:
    """Converge in a child that is killed at the ``number``-th such instant; False when it never came to that."""
    with warnings.catch_warnings():
        # Test runners have a thread that reads their orders. The child uses nothing of theirs and never returns.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _child(root, spec, when, number)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert status == 0, f"the child ended with {status}: " + _last_words(root).read_text()
    return False


def _last_words(root: Path) -> Path:
    return root / "child.txt"


def _child(root: Path, spec: str, when: When, number: int) -> NoReturn:
    code = 1
    try:
        signal.alarm(LONGEST)
        _last_words(root).write_text("it hung")
        tempfile.tempdir = str(root)  # what a killed process leaves behind stays with the test
        with pytest.MonkeyPatch.context() as patch:
            _arm(patch, when, _countdown(number))
            asyncio.run(converged(root, spec))
        code = 0
    except BaseException:
        _last_words(root).write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _countdown(number: int) -> Callable[[], None]:
    left = number

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return tick


def _arm(patch: pytest.MonkeyPatch, when: When, tick: Callable[[], None]) -> None:
    append, enter = Journal.append, World.enter

    def killing_append(self: Journal, at: float, event: str, **fields: Any) -> None:
        if when == "entry-not-written":
            tick()
        append(self, at, event, **fields)
        if when == "entry-written":
            tick()

    async def killing_enter(self: World, call: str, *about: str, write: str = "") -> Fault | None:
        if when == "effect-not-begun" and write:
            tick()
        return await enter(self, call, *about, write=write)

    patch.setattr(Journal, "append", killing_append)
    patch.setattr(World, "enter", killing_enter)


__all__ = ["AS_FOUND", "EDITED", "Rig", "When", "converged", "killed", "type_host"]
