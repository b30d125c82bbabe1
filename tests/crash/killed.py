"""A whole agent in a forked process that is killed with SIGKILL at a chosen instant. The kill is here, never in the agent."""

import asyncio
import os
import signal
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

import pytest

from agent.core.memory import Memory
from agent.loop.journal import Journal
from agent.loop.store import Store
from agent.sim.profile import load_profile
from agent.sim.scenario import Fault
from agent.sim.world import World
from tests.forked import fork, wait
from tests.rig import Rig, recipe, rig

# One short level, and a model that loads in no time. At this compression the shortest deadline of a trial is still a
# real second.
FACTOR = 60.0
LOAD_SECONDS = 1.0
QUICK = {
    "benchmark": {"concurrency": [1], "outputTokens": 800},
    "regression": {"throughput": "90%", "latencyP50": "900%", "latencyP95": "900%"},
}
# The floor alone decides, just under the full speed. A machine so busy that the full speed does not reach it shows the
# last good revision as degraded, which stays up all the same; one that lets the halved speed reach it is not to be feared.
SLOWER = {"gate": {**QUICK, "require": {"1": ">= 100 tok/s"}}, "args": {"disable-cuda-graph": True}}
AS_FOUND = recipe(services={"qwen": {"gate": QUICK}})
EDITED = recipe(services={"qwen": SLOWER})

When = Literal["entry-written", "between-entries"]


def type_host(root: Path, spec: str) -> AbstractAsyncContextManager[Rig]:
    """The rig on the type host."""
    profile = load_profile("esc8000a")
    serving = profile.serving.model_copy(update={"load_seconds": LOAD_SECONDS})
    return rig(root, spec=spec, profile=profile.model_copy(update={"serving": serving}), factor=FACTOR)


async def converged(root: Path, spec: str) -> None:
    async with type_host(root, spec) as agent:
        await agent.converge()


def killed(root: Path, spec: str, when: When, number: int) -> bool:
    """Converge in a child that is killed at the ``number``-th such instant; False when it never came to that."""

    def child() -> None:
        tempfile.tempdir = str(root)  # what a killed process leaves behind stays with the test
        with pytest.MonkeyPatch.context() as patch:
            _arm(patch, _Killer(when, number))
            asyncio.run(converged(root, spec))

    return wait(fork(child, root / "victim.txt"), root / "victim.txt") == -signal.SIGKILL


class _Killer:
    """Counts instants of one kind, and kills this process at the chosen one."""

    def __init__(self, when: When, number: int) -> None:
        self._when = when
        self._left = number
        self._moved = False

    def entry_written(self) -> None:
        self._moved = False
        self._tick("entry-written")

    def about_to_change(self) -> None:
        """Before an effect or a change of memory. The first one after an entry finds what that entry's kill left."""
        if self._moved:
            self._tick("between-entries")
        self._moved = True

    def _tick(self, when: When) -> None:
        if when == self._when:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _arm(patch: pytest.MonkeyPatch, killer: _Killer) -> None:
    append, save, enter = Journal.append, Store.save, World.enter

    def killing_append(self: Journal, at: float, event: str, **fields: Any) -> None:
        append(self, at, event, **fields)
        killer.entry_written()

    def killing_save(self: Store, memory: Memory) -> None:
        if memory != self.memory:
            killer.about_to_change()
        save(self, memory)

    async def killing_enter(self: World, call: str, *about: str, write: str = "") -> Fault | None:
        if write:
            killer.about_to_change()
        return await enter(self, call, *about, write=write)

    patch.setattr(Journal, "append", killing_append)
    patch.setattr(Store, "save", killing_save)
    patch.setattr(World, "enter", killing_enter)
