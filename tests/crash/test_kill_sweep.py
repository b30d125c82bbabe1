"""Law 8: killed at any instant, the agent resumes to the old state or the new one, never a mix nobody chose.

The daemon is killed by SIGKILL after every journal entry, and between entries before every effect on the host and every
change of its memory that follows another one; then a new agent starts over what is left. Two halves: a host as found is split, self-tested and promoted;
then an edited spec that halves the speed is tried and rolled back.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.crash.killed import AS_FOUND, EDITED, When, converged, killed, type_host
from tests.forked import fork, wait
from tests.rig import Rig

PARTS = 4  # of each sweep, so that several test workers can share it
AT_ONCE = 3  # kills under way in one worker: most of their time is spent waiting
MOST = 200
CLOSED = {
    "promoted",
    "rolled-back",
    "degraded",
}  # on a busy machine the last good one may measure low: it stays
FEWEST = 20  # journal entries of either half: fewer would mean that the sweep missed the trial
NOTES, UNREACHED = "notes.txt", "unreached"
INSTANTS: tuple[When, ...] = ("entry-written", "between-entries")


@pytest.fixture(scope="module")
def promoted_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host on which the first half has gone well and no agent runs."""
    root = tmp_path_factory.mktemp("promoted")
    asyncio.run(converged(root, AS_FOUND))
    return root


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("when", INSTANTS)
def test_law_8_killed_at_any_instant_of_the_first_convergence_the_agent_ends_promoted(
    tmp_path: Path, when: When, part: int
) -> None:
    sweep(tmp_path, when, part, AS_FOUND, "Promoted", Path.mkdir)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("when", INSTANTS)
def test_law_8_killed_at_any_instant_of_a_rollback_the_agent_ends_on_the_last_good_revision(
    tmp_path: Path, promoted_host: Path, when: When, part: int
) -> None:
    sweep(tmp_path, when, part, EDITED, "RolledBack", lambda root: shutil.copytree(promoted_host, root))


def sweep(folder: Path, when: When, part: int, spec: str, end: str, make: Callable[[Path], object]) -> None:
    """Kill at this part's instants, in order, until one is never reached because the agent had converged before."""
    for first in range(1 + part, MOST, PARTS * AT_ONCE):
        jobs: list[tuple[int, Path]] = []
        for number in range(first, first + PARTS * AT_ONCE, PARTS):
            root = folder / str(number)
            make(root)
            jobs.append((fork(partial(kill_and_resume, root, spec, when, number, end), root / NOTES), root))
        for pid, root in jobs:
            wait(pid, root / NOTES)
        if any((root / UNREACHED).exists() for _, root in jobs):
            assert when != "entry-written" or first > FEWEST
            return
    raise AssertionError("the sweep has no end")


def kill_and_resume(root: Path, spec: str, when: When, number: int, end: str) -> None:
    tempfile.tempdir = str(root)
    if killed(root, spec, when, number):
        asyncio.run(resumed(root, spec, end))
    else:
        (root / UNREACHED).touch()


async def resumed(root: Path, spec: str, end: str) -> None:
    """A new agent over what the killed one left must come to the same end as one that was never killed."""
    async with type_host(root, spec) as agent:
        await settled(agent)
        every_device_has_its_driver(agent)
        the_promoted_revision_runs(agent, end)
        the_journal_is_whole(root)
        writes = list(agent.world.writes)
        result = await agent.one_pass()
        assert result.plan is not None and not result.plan.actions, result.sentence
        assert agent.world.writes == writes


async def settled(agent: Rig) -> None:
    """Converge; where a server that has just begun was slow to answer, until its health has been asked for again."""
    await agent.converge()
    for _ in range(MOST):
        if agent.condition("ServiceReady/qwen").reason != "NotAnswering":
            return
        await agent.host.ports.clock.sleep(30.0)
        await agent.converge()


def every_device_has_its_driver(agent: Rig) -> None:
    for gpu in agent.status().gpus:
        assert gpu.driver == gpu.desired_driver, gpu
    for address, function in agent.world.state.functions.items():
        assert function.driver, f"{address} has no driver"
        assert function.override in {"", function.driver}, f"{address} has a stale override"


def the_promoted_revision_runs(agent: Rig, end: str) -> None:
    condition = agent.condition("ServiceReady/qwen")
    (service,) = agent.status().services
    assert condition.reason == end, (condition, agent.results[-1].sentence)
    assert agent.status().ready == ("True" if end == "Promoted" else "False")
    assert service.state == "active"
    assert service.revision, "what runs is no known revision"
    assert service.revision == service.promoted
    assert "--disable-cuda-graph" not in service.argv
    assert service.trial is not None
    assert service.trial.outcome in CLOSED, service.trial


def the_journal_is_whole(root: Path) -> None:
    for line in (root / "var/lib/gpu-host-agent/journal.jsonl").read_text().splitlines():
        assert isinstance(json.loads(line), dict)
