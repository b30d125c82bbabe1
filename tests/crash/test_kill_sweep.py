"""Law 8: killed at any instant, the agent resumes to the old state or the new one, never a mix nobody chose.

The daemon is killed by SIGKILL after every journal entry (the entry is on disk, nothing after it has happened), before
every journal entry (what it reports has happened and is not recorded), and before every effect on the host. Then a new
agent starts over what is left. Two halves: a host as found is split, self-tested and promoted; then an edited spec that
halves the speed is tried and rolled back.
"""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.crash.killed import AS_FOUND, EDITED, Rig, When, converged, killed, type_host

PARTS = 6  # of each sweep, so that several test workers can share it
INSTANTS: tuple[When, ...] = ("entry-written", "entry-not-written", "effect-not-begun")
MOST = 200


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
    for number in range(1 + part, MOST, PARTS):
        root = tmp_path / str(number)
        root.mkdir()
        if not killed(root, AS_FOUND, when, number):
            assert number > 20, "the sweep ended before the trial had begun"
            return
        asyncio.run(resumed(root, AS_FOUND, "Promoted"))
    raise AssertionError("the sweep has no end")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("when", INSTANTS)
def test_law_8_killed_at_any_instant_of_a_rollback_the_agent_ends_on_the_last_good_revision(
    tmp_path: Path, promoted_host: Path, when: When, part: int
) -> None:
    for number in range(1 + part, MOST, PARTS):
        root = tmp_path / str(number)
        shutil.copytree(promoted_host, root)
        if not killed(root, EDITED, when, number):
            assert number > 10, "the sweep ended before the rollback had begun"
            return
        asyncio.run(resumed(root, EDITED, "RolledBack"))
    raise AssertionError("the sweep has no end")


async def resumed(root: Path, spec: str, reason: str) -> None:
    """A new agent over what the killed one left must come to the same end as one that was never killed."""
    async with type_host(root, spec) as agent:
        agent.host.world.tick()
        await agent.converge()
        every_selected_device_has_its_driver(agent)
        the_promoted_revision_runs(agent, reason)
        the_journal_is_whole(root)
        writes = list(agent.world.writes)
        result = await agent.one_pass()
        assert result.plan is not None and not result.plan.actions
        assert agent.world.writes == writes


def every_selected_device_has_its_driver(agent: Rig) -> None:
    for gpu in agent.status().gpus:
        assert gpu.driver == gpu.desired_driver, gpu
    for address, function in agent.world.state.functions.items():
        assert function.driver, f"{address} has no driver"


def the_promoted_revision_runs(agent: Rig, reason: str) -> None:
    condition = agent.condition("ServiceReady/qwen")
    (service,) = agent.status().services
    assert condition.reason == reason, (condition, agent.results[-1].sentence)
    assert agent.status().ready == ("True" if reason == "Promoted" else "False")
    assert service.state == "active"
    assert service.revision and service.revision == service.promoted
    assert "--disable-cuda-graph" not in service.argv
    assert service.trial is not None and service.trial.outcome != "running"


def the_journal_is_whole(root: Path) -> None:
    for line in (root / "var/lib/gpu-host-agent/journal.jsonl").read_text().splitlines():
        assert isinstance(json.loads(line), dict)
