"""What the agent may do by itself: observe, approve exactly one plan, hosts on which it does not act."""

from dataclasses import replace
from pathlib import Path

from agent.app.paths import Paths
from agent.app.wiring import assemble_on
from agent.core.status import PlanStatus, Status
from tests.cases.operating import asks, qwen, recipe, rig, service, service_dies, starts, unit
from tests.rig import Rig

ONLY_LIVE = {"policy": {"allow": ["live"]}}


def shown_plan(agent: Rig) -> PlanStatus:
    plan = agent.status().plan
    assert plan is not None
    return plan


async def test_in_observe_mode_everything_is_planned_and_nothing_is_written(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=recipe(policy={"mode": "observe"})) as agent:
        for _ in range(3):
            result = await agent.converge()
            assert result.blocked
        assert agent.world.writes == []
        assert unit(agent).active_state == "active"
        condition = agent.condition("Converged")
        assert (condition.status, condition.reason) == ("False", "Blocked")
        assert "policy.mode is observe" in condition.message
        plan = shown_plan(agent)
        assert "bind" in plan.text
        assert "drain and stop sglang-qwen.service" in plan.text
        assert plan.approve == ""
        asks(agent, "approve", plan.id)
        await agent.converge()
        assert agent.world.writes == []


async def test_a_plan_beyond_the_policy_waits_whole_and_says_how_to_approve_it(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=recipe(**ONLY_LIVE)) as agent:
        await agent.converge()
        assert agent.world.writes == []
        plan = shown_plan(agent)
        assert plan.approve == f"agent approve {plan.id}"
        condition = agent.condition("Converged")
        assert condition.next_step == plan.approve
        assert "rebind, restart" in condition.message
        assert agent.status().ready == "False"
        await agent.converge()
        assert shown_plan(agent).id == plan.id


async def test_an_approved_plan_and_what_follows_from_it_run_to_the_end(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=recipe(**ONLY_LIVE)) as agent:
        await agent.converge()
        asks(agent, "approve", shown_plan(agent).id)
        await agent.converge()
        assert agent.status().ready == "True"
        assert agent.memory.grant is None
        assert agent.memory.approved == ""


async def test_an_approval_of_another_plan_lets_nothing_run(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=recipe(**ONLY_LIVE)) as agent:
        await agent.converge()
        asks(agent, "approve", "0123456789")
        await agent.converge()
        assert agent.world.writes == []
        assert agent.condition("Converged").reason == "Blocked"


async def test_an_approval_covers_one_convergence_and_not_the_next(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=recipe(**ONLY_LIVE)) as agent:
        await agent.converge()
        asks(agent, "approve", shown_plan(agent).id)
        await agent.converge()
        count = starts(agent)
        agent.write_spec(recipe(**ONLY_LIVE, **qwen(args={"max-running-requests": 64})))
        await agent.converge()
        assert starts(agent) == count
        assert service(agent).health == "ok"
        assert "restart" in agent.condition("Converged").message
        asks(agent, "approve", shown_plan(agent).id)
        await agent.converge()
        assert "--max-running-requests" in unit(agent).argv
        assert agent.status().ready == "True"


async def test_an_approval_does_not_outlive_its_generation(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=recipe(**ONLY_LIVE)) as agent:
        await agent.converge()
        approved = shown_plan(agent).id
        agent.write_spec(recipe(**ONLY_LIVE, **qwen(args={"max-running-requests": 64})))
        asks(agent, "approve", approved)
        await agent.converge()
        assert agent.world.writes == []
        assert shown_plan(agent).id != approved


async def test_a_follow_up_of_an_approved_plan_is_covered_until_the_host_has_converged(
    tmp_path: Path,
) -> None:
    """The approved plan stops for a failed bind; the next pass goes on with the same approval."""
    scenario = "faults: [{on: pci.probe, target: '0000:f1:00.0', times: 1, errno: EIO}]"
    async with rig(tmp_path, spec=recipe(**ONLY_LIVE), scenario=scenario) as agent:
        await agent.converge()
        asks(agent, "approve", shown_plan(agent).id)
        await agent.one_pass()
        assert agent.results[-1].executed is not None
        assert agent.results[-1].executed.failed is not None
        assert agent.memory.grant is not None
        await agent.restart()
        await agent.one_pass()
        assert agent.memory.grant is not None
        asks(agent, "retry", "0000:f1:00.0")
        await agent.converge()
        assert agent.status().ready == "True", [c for c in agent.status().conditions if c.status != "True"]


async def test_live_changes_need_no_approval(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.write_spec(recipe(**ONLY_LIVE, gpus={"inference": {"settings": {"powerLimit": "500W"}}}))
        await agent.converge()
        assert {g.power_limit for g in agent.status().gpus if g.group == "inference"} == {500}
        assert agent.status().ready == "True"


async def test_a_service_that_died_is_started_again_under_a_policy_of_live_changes_only(
    tmp_path: Path,
) -> None:
    """Starting what does not run disturbs nobody."""
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.write_spec(recipe(**ONLY_LIVE))
        await agent.converge()
        service_dies(agent)
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"


async def test_under_a_policy_of_observing_a_host_is_planned_for_and_not_touched(tmp_path: Path) -> None:
    """As on a real host: the same ports, and the wiring that is not told they are simulated."""
    async with rig(tmp_path) as agent:
        agent.write_spec(recipe(policy={"mode": "observe"}))
        real = replace(agent.host.ports, simulated="")
        paths = Paths(tmp_path / "observer", agent.spec)
        observer = assemble_on(real, paths, deadline=5.0)
        try:
            for _ in range(3):
                result = await observer.reconciler.run_pass("test")
                assert result.blocked
                assert not result.again
        finally:
            await observer.close()
        assert agent.world.writes == []
        status = Status.model_validate_json(paths.status.read_bytes())
        conditions = {c.type: c for c in status.conditions}
        assert conditions["Converged"].reason == "Blocked"
        assert "Simulated" not in conditions
        assert status.plan is not None
        assert status.plan.approve == ""
        assert status.ready == "False"
        assert status.proof.startswith("a real host")
