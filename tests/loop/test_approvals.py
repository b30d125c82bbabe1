"""An approval is for the host as the operator saw it: it begins at once or lapses, and covers its rest for a day."""

from pathlib import Path

from agent.core.settle import GRANT_LIFE
from agent.loop.store import leave_request
from tests.cases.operating import TARGET, asks, journal, recipe, starts
from tests.rig import Rig, rig

ONLY_LIVE = {"policy": {"allow": ["live"]}}
DROP_IN = "/etc/systemd/system/sglang-qwen.service.d/50-gpu-host-agent.conf"


async def edited_by_hand(agent: Rig, line: str) -> str:
    """The drop-in as it was, before somebody added a line to it: drift that only a restart takes back."""
    target = agent.host.ports.targets(TARGET)
    good = await target.read_file(DROP_IN)
    assert good is not None
    await target.write_file(DROP_IN, good + line)
    return good


def notes(agent: Rig) -> list[str]:
    return [r["text"] for r in journal(agent) if r["event"] == "note"]


async def test_an_approval_that_is_not_needed_any_more_does_not_fire_later(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.write_spec(recipe(**ONLY_LIVE))
        await agent.converge()
        good = await edited_by_hand(agent, "# one\n")
        blocked = await agent.one_pass()
        assert blocked.plan is not None
        assert blocked.blocked
        await agent.host.ports.targets(TARGET).write_file(DROP_IN, good)
        asks(agent, "approve", blocked.plan.id)
        assert (await agent.one_pass()).sentence == "Converged: nothing to do."
        assert f"the approval of plan {blocked.plan.id} lapses" in notes(agent)[-1]
        count = starts(agent)
        await edited_by_hand(agent, "# one\n")
        again = await agent.one_pass()
        assert again.plan is not None
        assert again.plan.id == blocked.plan.id
        assert again.blocked, "the same drift weeks later is another decision"
        assert starts(agent) == count


async def test_an_approval_of_a_plan_that_is_not_the_one_needed_lapses_and_the_journal_says_so(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=recipe(**ONLY_LIVE)) as agent:
        needed = await agent.one_pass()
        assert needed.plan is not None
        asks(agent, "approve", "0123456789")
        await agent.one_pass()
        assert agent.memory.approved == ""
        expected = f"the approval of plan 0123456789 lapses: what is needed now is plan {needed.plan.id}"
        assert notes(agent) == [expected]
        assert agent.world.writes == []


async def test_an_approval_left_while_no_agent_ran_is_taken_up_by_the_next_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.write_spec(recipe(**ONLY_LIVE, services={"qwen": {"args": {"max-running-requests": 64}}}))
        blocked = await agent.converge()
        assert blocked.plan is not None
        await agent.close()
        leave_request(agent.agent.paths.state, "approve", blocked.plan.id)
        agent.open()
        await agent.converge()
        assert agent.status().ready == "True"


async def test_an_approval_is_used_up_when_only_something_else_still_waits(tmp_path: Path) -> None:
    """A rejected revision waits for a person for weeks: that does not keep the approval of a driver change alive."""
    gpu = "0000:81:00.0"
    scenario = "faults: [{on: service.start, times: 1, after: 1, crash: {status: 1, after: 1, log: [boom]}}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        policy = {"allow": ["live", "restart"]}
        args = {"max-running-requests": 64}
        agent.write_spec(recipe(policy=policy, services={"qwen": {"args": args}}))
        await agent.converge()
        assert "qwen" in agent.memory.rejected
        for approved in (True, False):
            with agent.world.change() as state:
                state.functions[gpu].driver, state.functions[gpu].override = "nvidia", ""
            result = await agent.one_pass()
            assert "needs rebind" in result.blocked
            if approved and result.plan is not None:
                asks(agent, "approve", result.plan.id)
                await agent.converge()
                assert agent.world.state.functions[gpu].driver == "vfio-pci"
                assert agent.memory.grant is None


async def half_done(agent: Rig) -> None:
    """An approved plan that stopped for a bind which fails once, up to where only the failed part waits."""
    await agent.converge()
    plan = agent.status().plan
    assert plan is not None
    asks(agent, "approve", plan.id)
    await agent.converge()
    assert agent.memory.retry_after
    assert agent.results[-1].sentence.startswith("Waiting: ")


async def test_a_transient_failure_does_not_cost_the_rest_of_an_approved_plan_its_approval(
    tmp_path: Path,
) -> None:
    scenario = "faults: [{on: pci.probe, target: '0000:f1:00.0', times: 1, errno: EBUSY}]"
    async with rig(tmp_path, spec=recipe(**ONLY_LIVE), scenario=scenario) as agent:
        await half_done(agent)
        await agent.restart()
        asks(agent, "retry", "0000:f1:00.0")
        await agent.converge()
        assert agent.status().ready == "True", [c for c in agent.status().conditions if c.status != "True"]
        assert agent.memory.grant is None


async def test_what_is_not_done_a_day_after_its_approval_is_asked_for_again(tmp_path: Path) -> None:
    scenario = "faults: [{on: pci.probe, target: '0000:f1:00.0', times: 1, errno: EBUSY}]"
    async with rig(tmp_path, spec=recipe(**ONLY_LIVE), scenario=scenario) as agent:
        await half_done(agent)
        grant = agent.memory.grant
        assert grant is not None
        agent.agent.store.update(grant=grant.model_copy(update={"at": grant.at - GRANT_LIFE}))
        asks(agent, "retry", "0000:f1:00.0")
        result = await agent.one_pass()
        assert "needs rebind" in result.blocked
        assert agent.memory.grant is None
