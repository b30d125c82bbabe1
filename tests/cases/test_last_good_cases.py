"""The last good revision is judged by what it is itself, not by the spec that failed; a move by where it goes."""

from pathlib import Path
from typing import Any

import pytest

from tests.cases.operating import (
    CANDIDATE,
    INFERENCE,
    TARGET,
    UNIT,
    patient_health,
    qwen,
    recipe,
    rig,
    service,
    service_dies,
    steady,
)  # fmt: skip
from tests.rig import Rig

CRASH = {"on": "service.start", "times": 1, "crash": {"status": 1, "after": 1, "log": ["boom"]}}


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    patient_health(monkeypatch)
    steady(monkeypatch)


def crashes_once(agent: Rig) -> None:
    with agent.world.change() as state:
        state.added_faults.append(CRASH)


def over(count: int) -> str:
    group = {"inference": {"select": list(INFERENCE[:count])}}
    return recipe(gpus=group, **qwen(args={"tensor-parallel-size": count}))


async def test_a_last_good_revision_over_fewer_gpus_than_the_rejected_spec_is_started_again(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=over(2)) as agent:
        await agent.converge()
        good = service(agent).revision
        crashes_once(agent)
        agent.write_spec(over(4))
        await agent.converge()
        assert agent.memory.trials["qwen"].restored == good
        service_dies(agent)
        await agent.converge()
        assert (service(agent).revision, service(agent).health) == (good, "ok")


async def test_a_last_good_revision_is_asked_what_it_was_promoted_with_not_the_rejected_specs_questions(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        good = service(agent).revision
        changed: dict[str, Any] = {"smoke": [{"ask": "What is 7 * 13?", "expect": "77777"}]}
        agent.write_spec(recipe(**qwen(gate=changed, args=CANDIDATE)))
        await agent.converge()
        trial = agent.memory.trials["qwen"]
        assert (trial.outcome, trial.reason, trial.restored) == ("rolled-back", "SmokeFailed", good)
        await agent.restart()  # nothing but memory.json says what was asked
        service_dies(agent)
        await agent.converge()
        assert (service(agent).revision, service(agent).health) == (good, "ok")


async def test_on_a_move_to_another_target_the_model_is_looked_for_where_the_service_goes(
    tmp_path: Path,
) -> None:
    moved = qwen(target="host", unit="other.service", args={"model-path": "/models/new"})
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.write_spec(recipe(**moved))
        await agent.one_pass()
        assert agent.condition("ServiceReady/qwen").reason == "ModelMissing"
        with agent.world.change() as state:
            stopped = {"active_state": "inactive", "main_pid": 0}
            there = state.targets[TARGET].units[UNIT].model_copy(deep=True, update=stopped)
            state.targets["host"].units["other.service"] = there
            state.targets["host"].paths.append("/models/new")
        await agent.one_pass()
        assert agent.condition("ServiceReady/qwen").reason != "ModelMissing"
