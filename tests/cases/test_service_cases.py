"""Service and gate cases: what a start must prove, and what becomes of a service that does not prove it."""

from pathlib import Path

import pytest

from tests.cases.operating import (
    CANDIDATE,
    TARGET,
    UNIT,
    WHEN,
    asks,
    assert_rolled_back,
    files_under,
    patient_health,
    phases,
    promoted_then,
    qwen,
    recipe,
    rig,
    service,
    service_dies,
    starts,
    steady,
    stops,
    target,
    unit,
    wait_out_backoff,
)  # fmt: skip
from tests.rig import SCENARIOS, Rig


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)


async def test_S1_health_200_without_tokens_is_not_ready_and_ends_with_the_start_deadline(
    tmp_path: Path,
) -> None:
    spec = recipe(**qwen(gate={"startTimeout": "3m"}))
    async with rig(tmp_path, spec=spec, scenario=SCENARIOS / "S1.yaml") as agent:
        await agent.converge()
        assert phases(agent)[-1] == "ready timeout"
        assert starts(agent) == 1
        assert unit(agent).active_state in {"inactive", "failed"}
        condition = agent.condition("ServiceReady/qwen")
        assert condition.status == "False"
        assert "ready was not done within 180 s" in condition.message


async def test_S1_a_running_service_that_stops_generating_is_no_longer_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient_health(monkeypatch)
    async with rig(tmp_path) as agent:
        await agent.converge()
        with agent.world.change():
            unit(agent).server = {"health": 200, "answer": "no-tokens"}
        agent.world.servers.rewrite()
        await agent.restart()
        await agent.one_pass()
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "NotAnswering")
        assert "without generating a token" in condition.message


async def test_S4_nothing_is_started_over_an_orphan_and_the_service_starts_when_it_has_gone(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "S4.yaml") as agent:
        await agent.converge()
        for _ in range(3):
            assert starts(agent) == 0
            condition = agent.condition("ServiceReady/qwen")
            assert condition.status == "False"
            assert "pid 4711" in condition.message
            assert "0000:01:00.0" in condition.message
            assert "port 30000" in condition.message
            assert condition.next_step
            assert agent.memory.trials.get("qwen") is None or agent.memory.trials["qwen"].outcome == "failed"
            await wait_out_backoff(agent)
            await agent.converge()
        with agent.world.change():
            unit(agent).orphans.clear()
        await wait_out_backoff(agent)
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert not agent.memory.rejected


async def test_S4_memory_without_a_visible_process_keeps_a_service_from_starting(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        count = starts(agent)
        with agent.world.change() as state:
            state.gpus["0000:61:00.0"].memory_used = 40_000
        service_dies(agent)
        await agent.converge()
        assert starts(agent) == count
        condition = agent.condition("ServiceReady/qwen")
        assert "0000:61:00.0 still holds" in condition.message
        with agent.world.change() as state:
            state.gpus["0000:61:00.0"].memory_used = 4
        await wait_out_backoff(agent)
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").status == "True"


async def test_S4_a_wedged_gpu_is_terminal_and_says_that_only_a_reset_helps(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        count = starts(agent)
        with agent.world.change() as state:
            state.gpus["0000:61:00.0"].utilization = 100
        service_dies(agent)
        for _ in range(3):
            await agent.converge()
            await wait_out_backoff(agent)
        assert starts(agent) == count
        condition = agent.condition("ServiceReady/qwen")
        assert condition.status == "False"
        assert "reset or a reboot" in condition.message
        assert "agent retry qwen" in condition.next_step
        assert not agent.memory.rejected


async def test_S5_a_candidate_that_crashes_is_tried_once_and_never_again(tmp_path: Path) -> None:
    scenario = (
        f"faults: [{{on: service.start, {WHEN}, crash: {{status: 1, after: 5s, log: [scripted crash]}}}}]"
    )
    async with rig(tmp_path, scenario=scenario) as agent:
        good = await promoted_then(agent)
        assert_rolled_back(agent, good, "StartFailed", "scripted crash")
        assert starts(agent) == 3  # promoted, tried, restored
        for _ in range(20):
            await agent.one_pass()
        await agent.restart()
        for _ in range(5):
            await agent.one_pass()
        assert starts(agent) == 3


async def test_S5_a_first_deployment_that_crashes_is_started_once_and_held(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "S5.yaml") as agent:
        for _ in range(20):
            await agent.one_pass()
        assert starts(agent) == 1
        assert agent.memory.trials["qwen"].outcome == "held"
        condition = agent.condition("ServiceReady/qwen")
        assert "RuntimeError: scripted" in condition.message
        assert "agent retry qwen" in condition.next_step


async def test_S5_when_even_the_last_good_revision_crashes_the_budget_ends_it(tmp_path: Path) -> None:
    scenario = "faults: [{on: service.start, after: 1, crash: {status: 1, log: [the host is broken]}}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        await promoted_then(agent)
        for _ in range(20):
            await wait_out_backoff(agent)
            await agent.one_pass()
        assert starts(agent) == 5  # promoted, tried, and three that nobody asked for: the budget
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "BudgetExhausted")
        assert "agent retry qwen" in condition.next_step
        assert agent.status().budget.startswith("3 of 3")


async def test_S6_a_benchmark_without_figures_is_inconclusive_tried_once_more_and_rolled_back(
    tmp_path: Path,
) -> None:
    scenario = f"faults: [{{on: server, answer: no-usage, afterRequests: 2, {WHEN}}}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        good = await promoted_then(agent)
        assert_rolled_back(agent, good, "Inconclusive", "no token came at any level")
        assert phases(agent).count("judge inconclusive") == 2
        assert starts(agent) == 4  # promoted, tried twice, restored
        assert agent.memory.trials["qwen"].attempt == 2


async def test_S6_a_first_deployment_without_figures_is_never_promoted(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "S6.yaml") as agent:
        await agent.converge()
        assert agent.memory.promoted == {}
        assert starts(agent) == 2
        assert agent.memory.trials["qwen"].outcome == "held"
        assert agent.condition("ServiceReady/qwen").status == "False"


async def test_S6_a_server_killed_under_the_benchmark_is_never_promoted(tmp_path: Path) -> None:
    scenario = f"faults: [{{on: server, answer: die-half-way, afterRequests: 2, {WHEN}}}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        good = await promoted_then(agent)
        assert service(agent).revision == service(agent).promoted == good
        assert agent.memory.trials["qwen"].outcome == "rolled-back"
        assert starts(agent) in {3, 4}


async def test_S13_a_secret_given_as_a_value_is_refused_and_never_repeated(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "S13.yaml") as agent:
        await agent.converge()
        agent.write_spec(recipe(**qwen(env={"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz012345"})))
        result = await agent.converge()
        assert agent.condition("SpecAccepted").status == "False"
        assert "HF_TOKEN" in agent.condition("SpecAccepted").message
        assert "abcdefghijklm" not in result.sentence
        assert_nowhere(agent, b"abcdefghijklm")


async def test_S13_the_value_behind_a_secret_reaches_the_process_and_nothing_that_the_agent_writes(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.write_spec(recipe(**qwen(args=CANDIDATE)))
        await agent.converge()
        secret = "simulated-token-no-secret"
        assert unit(agent).env["HF_TOKEN"] == secret
        installed = target(agent).files["/run/gpu-host-agent/secrets/qwen.env"]
        assert installed.mode == 0o600
        drop_in = target(agent).files[f"/etc/systemd/system/{UNIT}.d/50-gpu-host-agent.conf"]
        assert secret not in drop_in.text
        assert_nowhere(agent, secret.encode())


def assert_nowhere(agent: Rig, secret: bytes) -> None:
    paths = agent.agent.paths
    found = [path for path, data in files_under(paths.state, paths.run).items() if secret in data]
    assert not found
    assert not [write for write in agent.world.writes if secret.decode() in write]


async def test_D2_a_running_service_goes_on_when_its_driver_no_longer_fits_and_both_places_are_named(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        good, counted = service(agent).revision, (starts(agent), stops(agent))
        with agent.world.change():
            target(agent).user_driver = "565.57.01"
        await agent.converge()
        said = "\n".join(c.message for c in agent.status().conditions if c.status == "False")
        for word in ("565.57.01", "590.48.01", TARGET):
            assert word in said
        agent.write_spec(recipe(**qwen(args=CANDIDATE)))
        await agent.converge()
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "DriverMismatch")
        assert "565.57.01" in condition.message
        assert "590.48.01" in condition.message
        assert TARGET in condition.message
        assert "install" in condition.next_step
        assert (starts(agent), stops(agent)) == counted
        assert service(agent).revision == good
        assert service(agent).health == "ok"


async def test_a_service_that_is_to_be_held_is_stopped_and_waits(tmp_path: Path) -> None:
    scenario = f"faults: [{{on: server, answer: nonsense, {WHEN}}}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        await promoted_then(agent, gate={"onFailure": "hold"})
        assert agent.memory.trials["qwen"].outcome == "held"
        assert unit(agent).active_state in {"inactive", "failed"}
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "RevisionRejected")
        assert "agent retry qwen" in condition.next_step
        count = starts(agent)
        await agent.restart()
        for _ in range(5):
            await agent.one_pass()
        assert starts(agent) == count
        agent.write_spec(recipe())
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"


async def test_a_rejected_revision_is_tried_again_only_when_somebody_asks(tmp_path: Path) -> None:
    scenario = f"faults: [{{on: server, answer: nonsense, times: 1, {WHEN}}}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        good = await promoted_then(agent)
        assert_rolled_back(agent, good, "SmokeFailed", "expected '91'")
        await agent.restart()
        await agent.converge()
        assert starts(agent) == 3
        asks(agent, "retry", "qwen")
        await agent.converge()
        assert starts(agent) == 4
        assert "--max-running-requests" in unit(agent).argv
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert agent.status().ready == "True"


async def test_a_rejected_revision_is_tried_again_when_the_floor_is_lowered(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        good = await promoted_then(agent, gate={"require": {"1": ">= 100000 tok/s"}})
        assert_rolled_back(agent, good, "BelowGate", "below the floor of 100,000 tok/s")
        agent.write_spec(recipe(**qwen(args=CANDIDATE, gate={"require": {"1": ">= 1 tok/s"}})))
        await agent.converge()
        assert "--max-running-requests" in unit(agent).argv
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"


async def test_a_rejected_revision_is_not_tried_again_after_an_unrelated_edit(tmp_path: Path) -> None:
    scenario = f"faults: [{{on: server, answer: nonsense, {WHEN}}}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        good = await promoted_then(agent)
        agent.write_spec(recipe(**qwen(args=CANDIDATE), policy={"resync": "45s"}))
        await agent.converge()
        assert starts(agent) == 3
        assert_rolled_back(agent, good, "SmokeFailed", "expected '91'")
