"""Every shipped recipe does on the simulated host what it is for."""

from pathlib import Path

import pytest

from tests.rig import REPOSITORY, recipe, rig

# A deployment follows another on this host when an operator has stopped the other: a service that no spec names holds
# its GPUs, and the agent would leave it alone.
STOPPED = 'set: {targets: {"lxc:129": {units: {sglang-qwen.service: {activeState: inactive}}}}}'
RECIPES = sorted((REPOSITORY / "specs").glob("*.yaml"))


def test_there_are_four_recipes() -> None:
    assert len(RECIPES) == 4


@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.stem)
async def test_the_recipe_converges_and_its_service_is_promoted(file: Path, tmp_path: Path) -> None:
    async with rig(tmp_path, spec=recipe(file), scenario=STOPPED) as agent:
        await agent.converge()
        status = agent.status()
        assert status.ready == "True", [c for c in status.conditions if c.status != "True"]
        (service,) = status.services
        assert service.revision == service.promoted
        assert service.trial is not None
        assert service.trial.outcome == "promoted"
        assert {g.driver for g in status.gpus if g.address in service.gpus} == {"nvidia"}
        agent.world.writes.clear()
        await agent.one_pass()
        assert agent.world.writes == []
