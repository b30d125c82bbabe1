"""One pass: what it asks for next, and what it leaves alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agent.core.plan import Disruption
from agent.loop.journal import read
from agent.loop.store import leave_request
from tests.cases import operating
from tests.rig import Rig, recipe, rig

CARD = "0000:01:00.0"


@dataclass
class Door:
    """``Permit`` that refuses until it is opened."""

    why: str = "another host is being drained"
    events: list[str] = field(default_factory=list)

    async def acquire(self, plan_id: str, disruption: str) -> str:
        self.events.append(f"asked for {disruption}")
        return self.why

    async def release(self) -> None:
        self.events.append("released")


def set_back(agent: Rig) -> None:
    """What another program on the host does behind the agent's back."""
    with agent.world.change() as state:
        state.gpus[CARD].power_limit = 450


async def test_what_something_else_undoes_at_once_is_done_twice_and_then_waits(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.world.writes.clear()
        for _ in range(2):
            set_back(agent)
            result = await agent.one_pass()
        assert "did not hold" in result.sentence
        assert not result.again
        assert result.retry_in is not None
        set_back(agent)
        result = await agent.one_pass()
        assert result.sentence.startswith("Waiting: ")
        assert "something else changes it back" in result.sentence
        assert agent.world.writes == [f"nvml.set_power_limit {CARD} 600"] * 2


async def test_what_was_set_back_once_is_mended_and_nothing_waits(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        for _ in range(3):
            set_back(agent)
            assert (await agent.one_pass()).again
            result = await agent.one_pass()
            assert result.sentence == "Converged: nothing to do."
            assert result.retry_in is None


async def test_a_failure_that_the_host_got_over_by_itself_asks_for_no_early_pass(tmp_path: Path) -> None:
    scenario = "faults: [{on: nvml.set_power_limit, errno: EIO}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        set_back(agent)
        result = await agent.one_pass()
        assert result.again
        assert agent.memory.failures
        with agent.world.change() as state:
            state.gpus[CARD].power_limit = 600
        past = dict.fromkeys(agent.memory.retry_after, 1.0)
        agent.agent.store.update(retry_after=past)
        result = await agent.one_pass()
        assert result.sentence == "Converged: nothing to do."
        assert result.retry_in is None


async def test_a_failure_that_the_host_got_over_before_it_was_due_is_forgotten_at_once(
    tmp_path: Path,
) -> None:
    scenario = "faults: [{on: nvml.set_power_limit, errno: EIO}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        set_back(agent)
        await agent.one_pass()
        waiting = await agent.one_pass()
        assert waiting.sentence.startswith("Waiting: ")
        assert waiting.retry_in is not None
        with agent.world.change() as state:
            state.gpus[CARD].power_limit = 600
        for _ in range(2):
            result = await agent.one_pass()
            assert result.sentence == "Converged: nothing to do."
            assert result.retry_in is None
        memory = agent.memory
        assert (memory.failures, memory.retry_after, memory.errors) == ({}, {}, {})


async def test_after_a_plan_was_carried_out_status_shows_what_it_made_of_the_host(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=operating.recipe()) as agent:
        await agent.converge()
        agent.write_spec(operating.recipe(**operating.qwen(args=operating.CANDIDATE)))
        result = await agent.one_pass()
        assert "promoted" in result.sentence
        status = agent.status()
        (service,) = status.services
        assert service.revision == service.promoted
        assert "--max-running-requests" in service.argv
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert status.plan is None
        assert status.last_pass is not None
        assert status.last_pass.sentence == result.sentence


async def test_without_a_permit_nothing_is_done_and_the_pass_waits(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        door = Door()
        agent.agent.reconciler.permit = door
        for _ in range(3):
            result = await agent.one_pass()
            assert result.sentence == "waiting for a permit: another host is being drained."
            assert not result.again
        assert agent.world.writes == []
        assert door.events == ["asked for rebind"] * 3
        door.why = ""
        await agent.converge()
        assert agent.status().ready == "True"
        assert door.events[-1] == "released"


async def test_a_host_without_any_spec_is_neither_read_nor_touched(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        agent.spec.unlink()
        result = await agent.one_pass()
        assert result.sentence.startswith("No spec is in force: ")
        assert not result.again
        assert agent.world.writes == []
        assert sum(agent.world.reads.values()) == 0
        assert agent.status().ready == "False"
        assert agent.condition("SpecAccepted").status == "False"


async def test_every_disruption_that_the_policy_lacks_blocks_the_whole_plan(tmp_path: Path) -> None:
    limit = {"inference": {"settings": {"powerLimit": "500W"}}}
    async with rig(tmp_path, spec=recipe(policy={"allow": ["live"]}, gpus=limit)) as agent:
        result = await agent.one_pass()
        assert result.plan is not None
        assert Disruption.LIVE in {a.disruption for a in result.plan.actions}
        assert "needs rebind, restart" in result.blocked
        assert agent.world.writes == []
        assert not result.again


async def test_a_request_that_no_version_knows_is_recorded_and_changes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        before = agent.memory
        leave_request(agent.agent.paths.state, "explode", "qwen")
        await agent.one_pass()
        assert agent.memory == before
        last = list(read(agent.agent.paths.state / "journal.jsonl"))[-1]
        assert (last["event"], last["verb"], last["argument"]) == ("request", "explode", "qwen")


async def test_a_memory_that_could_not_be_read_is_said_until_a_person_has_looked(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        await agent.close()
        for name in ("memory.json", "memory.json.old"):
            (agent.agent.paths.state / name).write_text("{}}")
        agent.open()
        await agent.converge()
        condition = agent.condition("MemoryIntact")
        assert (condition.status, condition.reason) == ("False", "MemoryUnreadable")
        assert "begins anew" in condition.message
        assert "restart the agent" in condition.next_step
        assert agent.status().ready == "False"
        await agent.restart()
        await agent.converge()
        assert "MemoryIntact" not in {c.type for c in agent.status().conditions}


async def test_an_idle_pass_changes_no_file_but_the_status(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        before = stamps(agent.agent.paths.state)
        await agent.one_pass()
        assert stamps(agent.agent.paths.state) == before


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    found: Callable[[Path], tuple[int, int]] = lambda p: (p.stat().st_ino, p.stat().st_mtime_ns)  # noqa: E731 - short
    return {p.name: found(p) for p in folder.iterdir() if p.is_file()}
