"""The main job on the simulated host, and the two laws that a converged host must show."""

from pathlib import Path

from tests.rig import rig


async def test_the_type_host_as_found_converges_and_is_promoted(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        status = agent.status()
        assert status.ready == "True", [c for c in status.conditions if c.status != "True"]
        assert status.host.simulated == "esc8000a"
        (service,) = status.services
        assert service.env["NCCL_P2P_DISABLE"] == "1"
        assert "--disable-custom-all-reduce" in service.argv
        assert "12 of 12" in service.p2p_reason
        assert service.revision == service.promoted


async def test_law_7_a_second_pass_on_a_converged_host_writes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.world.writes.clear()
        result = await agent.one_pass()
        assert result.plan is not None
        assert not result.plan.actions
        assert agent.world.writes == []


async def test_law_7_a_restarted_agent_writes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        await agent.restart()
        agent.world.writes.clear()
        result = await agent.converge()
        assert result.sentence == "Converged: nothing to do."
        assert agent.world.writes == []
        assert agent.status().ready == "True"
