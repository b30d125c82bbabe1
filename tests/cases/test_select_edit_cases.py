"""A person names the cards anew: places are learned anew, and the very first plan is the whole one."""

from pathlib import Path

from tests.cases.hardware import CONFIDENTIAL, at_any_speed, is_ready
from tests.cases.operating import INFERENCE
from tests.rig import rig

MOVED = INFERENCE[2:]
OTHER_SELECT = {
    "gpus": {
        "inference": {"select": list(INFERENCE[:2])},
        "confidential": {"select": [*CONFIDENTIAL, *MOVED]},
    },
    "services": {"qwen": {"args": {"tensor-parallel-size": 2}}},
}
NAMELESS = 'set: {functions: {"0000:f1:00.0": {serial: "", slot: ""}}}'


async def test_the_first_pass_after_an_edit_of_the_selection_plans_all_that_is_meant(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=at_any_speed()) as host:
        await host.converge()
        host.write_spec(at_any_speed(**OTHER_SELECT, policy={"allow": ["live"]}))
        first = await host.one_pass()
        second = await host.one_pass()
        assert first.plan is not None
        assert second.plan is not None
        assert not [r for r in first.plan.refusals if "looked for" in r.message]
        assert first.plan.id == second.plan.id
        bound = {a.target for a in first.plan.actions if a.verb == "bind"}
        assert bound == set(MOVED)


async def test_an_edit_of_the_selection_makes_no_card_a_moved_one_that_shows_no_serial(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=at_any_speed(), scenario=NAMELESS) as host:
        await host.converge()
        host.write_spec(at_any_speed(**OTHER_SELECT))
        await host.converge()
        await host.restart()
        await host.converge()
        assert host.condition("DriversBound").status == "True"
        await is_ready(host)
