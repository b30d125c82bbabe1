"""What a rejected revision leaves behind: nothing is taken back from others, and it does not serve on."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agent.core.spec import Service
from agent.loop.lifecycle import Lifecycle
from tests.cases.operating import (
    CANDIDATE,
    INFERENCE,
    WHEN,
    qwen,
    recipe,
    rig,
    service,
    starts,
    steady,
    stops,
    unit,
)
from tests.rig import Rig

CRASHES = f"faults: [{{on: service.start, {WHEN}, crash: {{status: 1, after: 1, log: [boom]}}}}]"
OTHER_UNIT = "sglang-glm.service"
FAILING = {"require": {"1": ">= 100000 tok/s"}}


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)


def two_services(*, unit_too: bool) -> str:
    """The service keeps two of its four GPUs; ``second`` gets the others, and with ``unit_too`` its unit and port."""
    data: Any = json.loads(recipe())
    spec = data["spec"]
    spec["gpus"]["inference"]["select"] = list(INFERENCE[:2])
    spec["gpus"]["second"] = {"select": list(INFERENCE[2:]), "driver": "nvidia"}
    now = spec["services"]["qwen"]
    args = {**now["args"], "tensor-parallel-size": 2}
    old_place = {**now, "args": args}
    new_place = {**now, "unit": OTHER_UNIT, "args": {**args, "port": 30001}}
    first, second = (new_place, old_place) if unit_too else (old_place, new_place)
    spec["services"]["qwen"] = {**first, "args": {**first["args"], **CANDIDATE}}
    spec["services"]["second"] = {**second, "gpus": "second"}
    return json.dumps(data)


async def assert_nothing_more_is_done(agent: Rig) -> None:
    before = list(agent.world.writes)
    result = await agent.one_pass()
    assert not result.plan, result.sentence
    assert agent.world.writes == before


@pytest.mark.parametrize("unit_too", [False, True], ids=["GPUs", "GPUs, unit and port"])
async def test_a_rollback_takes_nothing_back_that_the_spec_gave_to_another_service(
    tmp_path: Path, *, unit_too: bool
) -> None:
    async with rig(tmp_path, scenario=CRASHES) as agent:
        await agent.converge()
        agent.write_spec(two_services(unit_too=unit_too))
        await agent.converge()
        assert agent.condition("ServiceReady/second").reason == "Promoted"
        assert agent.condition("ServiceReady/qwen").reason == "RevisionRejected"
        assert service(agent).state == "failed"
        await assert_nothing_more_is_done(agent)


async def test_law_3_a_rollback_leaves_gpus_alone_that_the_spec_no_longer_names(tmp_path: Path) -> None:
    two = {"inference": {"select": list(INFERENCE[:2])}}
    async with rig(tmp_path, scenario=CRASHES) as agent:
        await agent.converge()
        agent.write_spec(recipe(gpus=two, **qwen(args={**CANDIDATE, "tensor-parallel-size": 2})))
        await agent.converge()
        assert agent.memory.trials["qwen"].outcome == "held"
        assert service(agent).state == "failed"
        await assert_nothing_more_is_done(agent)


@pytest.mark.parametrize("ends", [asyncio.CancelledError(), OSError("no answer")], ids=["killed", "failed"])
@pytest.mark.parametrize("on_failure", ["hold", "rollback"])
async def test_a_rejected_revision_whose_stop_did_not_come_about_is_stopped_by_the_next_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_failure: str, ends: BaseException
) -> None:
    """There is no last good revision to go back to."""
    stop = Lifecycle.stop
    async with rig(tmp_path, spec=recipe(**qwen(gate={**FAILING, "onFailure": on_failure}))) as agent:

        async def ended(self: Lifecycle, at: Service, seconds: float) -> None:
            if agent.memory.rejected:
                raise ends
            await stop(self, at, seconds)

        with monkeypatch.context() as patch:
            patch.setattr(Lifecycle, "stop", ended)
            try:
                await agent.one_pass()
            except asyncio.CancelledError:
                await agent.restart()
        assert agent.memory.rejected
        assert unit(agent).active_state == "active"
        result = await agent.one_pass()
        assert result.plan is not None
        assert [a.key for a in result.plan.actions] == ["service/stop/qwen"]
        assert unit(agent).active_state == "inactive"
        counted = starts(agent), stops(agent)
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "RevisionRejected"
        assert (starts(agent), stops(agent)) == counted
