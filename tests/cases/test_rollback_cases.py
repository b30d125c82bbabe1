"""Rollbacks to a revision that the spec has moved away from, and starts under facts that changed meanwhile."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent.core.render import DROP_IN
from agent.core.spec import Service
from agent.loop.lifecycle import Lifecycle
from agent.sim import systemd
from tests.cases.operating import (
    CANDIDATE,
    PASSTHROUGH,
    TARGET,
    UNIT,
    WHEN,
    journal,
    kernel_says,
    on_any_platform,
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
)  # fmt: skip
from tests.rig import Rig

FAULT = "nvidia 0000:11:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0003 address=0x20000001000 flags=0x0020]"
FAILING = {"require": {"1": ">= 100000 tok/s"}}
NEW_UNIT = "sglang-new.service"


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)


def assert_the_old_one_is_back(agent: Rig, good: str) -> None:
    shown = service(agent)
    assert (shown.revision, shown.promoted) == (good, good)
    assert (shown.state, shown.health) == ("active", "ok")
    assert shown.trial is not None
    assert (shown.trial.outcome, shown.trial.restored) == ("rolled-back", good)
    assert agent.condition("ServiceReady/qwen").reason == "RolledBack"


@pytest.mark.parametrize(
    "args", [{"port": 30001}, {"served-model-name": "another"}], ids=["port", "served name"]
)
async def test_S5_an_edit_of_where_requests_go_is_rolled_back_to_where_they_went(
    tmp_path: Path, args: dict[str, Any]
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        good = service(agent).revision
        agent.write_spec(recipe(**qwen(args=args, gate=FAILING)))
        await agent.converge()
        assert_the_old_one_is_back(agent, good)
        counted = starts(agent), stops(agent)
        await agent.restart()
        await agent.converge()
        assert_the_old_one_is_back(agent, good)
        assert (starts(agent), stops(agent)) == counted


def beside_it(agent: Rig) -> None:
    """The operator has made a second unit like the service's."""
    with agent.world.change():
        for path, file in list(target(agent).files.items()):
            if path.endswith(f"/{UNIT}"):
                target(agent).files[path.replace(UNIT, NEW_UNIT)] = file.model_copy()
        systemd.daemon_reload(target(agent))


def state(agent: Rig, name: str) -> str:
    found = target(agent).units.get(name)
    return found.active_state if found else "not there"


async def test_an_edit_of_the_unit_stops_the_old_unit_and_starts_the_new_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        beside_it(agent)
        agent.write_spec(recipe(**qwen(unit=NEW_UNIT)))
        await agent.converge()
        assert state(agent, UNIT) in {"inactive", "failed"}
        assert state(agent, NEW_UNIT) == "active"
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert service(agent).unit == NEW_UNIT


async def test_S5_an_edit_of_the_unit_is_rolled_back_to_the_old_unit_and_the_new_one_is_stopped(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        good = service(agent).revision
        beside_it(agent)
        agent.write_spec(recipe(**qwen(unit=NEW_UNIT, gate=FAILING)))
        await agent.converge()
        assert_the_old_one_is_back(agent, good)
        assert service(agent).unit == UNIT
        assert state(agent, UNIT) == "active"
        assert state(agent, NEW_UNIT) in {"inactive", "failed"}
        service_dies(agent)
        await agent.converge()
        assert state(agent, UNIT) == "active"
        assert service(agent).revision == good


async def test_a_unit_that_does_not_exist_costs_the_running_service_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        counted = stops(agent)
        agent.write_spec(recipe(**qwen(unit="sglang-nowhere.service")))
        await agent.converge()
        assert stops(agent) == counted
        assert state(agent, UNIT) == "active"
        condition = agent.condition("ServiceReady/qwen")
        assert condition.status == "False"
        assert f"no unit sglang-nowhere.service in {TARGET}" in condition.message


def starts_with_p2p(agent: Rig, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every start from here on, whether its drop-in leaves P2P on."""
    seen: list[bool] = []
    start = Lifecycle.start

    async def noted(self: Lifecycle, service: Service) -> None:
        text = await self.target(service).read_file(DROP_IN.format(unit=service.unit))
        seen.append("NCCL_P2P_DISABLE=1" not in (text or ""))
        await start(self, service)

    monkeypatch.setattr(Lifecycle, "start", noted)
    return seen


def before_the_first(name: str, happens: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment within a trial: just before this phase runs for the first time."""
    phase: Callable[..., Awaitable[object]] = getattr(Lifecycle, name)
    fired: list[bool] = []

    async def noted(self: Lifecycle, *args: Any) -> object:
        if not fired:
            fired.append(True)
            happens()
        return await phase(self, *args)

    monkeypatch.setattr(Lifecycle, name, noted)


async def test_law_4_a_page_fault_during_a_trial_has_the_last_good_revision_restored_without_p2p(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, spec=on_any_platform(), scenario=PASSTHROUGH) as agent:
        await agent.converge()
        assert service(agent).p2p == "on"
        seen = starts_with_p2p(agent, monkeypatch)
        before_the_first("smoke", lambda: kernel_says(agent, FAULT, 3), monkeypatch)
        agent.write_spec(on_any_platform(**qwen(args=CANDIDATE, gate=FAILING)))
        await agent.converge()
        assert seen == [True, False]  # the candidate, before the fault; the last good revision, after it
        shown = service(agent)
        assert (shown.state, shown.health, shown.p2p) == ("active", "ok", "off")
        assert "--max-running-requests" not in unit(agent).argv
        assert unit(agent).env["NCCL_P2P_DISABLE"] == "1"
        assert "--disable-custom-all-reduce" in unit(agent).argv
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "RolledBack")
        for _ in range(3):
            await agent.restart()
            await agent.converge()
        assert seen == [True, False]
        service_dies(agent)
        await agent.converge()
        assert seen == [True, False, False]
        assert "--max-running-requests" not in unit(agent).argv


async def test_law_4_a_page_fault_just_before_a_start_has_it_started_without_p2p(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, spec=on_any_platform(), scenario=PASSTHROUGH) as agent:
        await agent.converge()
        seen = starts_with_p2p(agent, monkeypatch)
        before_the_first("render", lambda: kernel_says(agent, FAULT), monkeypatch)
        agent.write_spec(on_any_platform(**qwen(args=CANDIDATE)))
        await agent.converge()
        assert seen == [False]
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert "--max-running-requests" in unit(agent).argv
        ends = [r["reason"] for r in journal(agent) if r["event"] == "trial"]
        assert ends[-2:] == ["P2PNotProved", "Promoted"]


async def test_S6_the_second_attempt_is_not_made_with_p2p_after_a_page_fault_in_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = PASSTHROUGH + f"faults: [{{on: server, answer: no-usage, afterRequests: 2, {WHEN}}}]"
    async with rig(tmp_path, spec=on_any_platform(), scenario=scenario) as agent:
        await agent.converge()
        seen = starts_with_p2p(agent, monkeypatch)
        before_the_first("smoke", lambda: kernel_says(agent, FAULT), monkeypatch)
        agent.write_spec(on_any_platform(**qwen(args=CANDIDATE)))
        await agent.converge()
        assert seen[:2] == [True, False]
        assert not any(seen[1:])


async def test_law_4_rejected_arguments_are_not_tried_again_because_p2p_has_come_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, spec=on_any_platform(), scenario=PASSTHROUGH) as agent:
        await agent.converge()
        seen = starts_with_p2p(agent, monkeypatch)
        agent.write_spec(on_any_platform(**qwen(args=CANDIDATE, gate=FAILING)))
        await agent.converge()
        assert seen == [True, True]
        kernel_says(agent, FAULT)
        await agent.converge()
        assert seen == [True, True, False]
        assert service(agent).p2p == "off"
        assert "--max-running-requests" not in unit(agent).argv


async def test_a_spec_corrected_while_the_service_drains_leaves_it_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        good, counted = agent.spec.read_text(), (starts(agent), stops(agent))

        def corrected() -> None:
            agent.write_spec(good)
            agent.agent.edited.set()

        before_the_first("drain", corrected, monkeypatch)
        agent.write_spec(recipe(**qwen(args=CANDIDATE)))
        result = await agent.one_pass()
        assert result.again
        assert "the spec was edited" in result.sentence
        await agent.converge()
        assert (starts(agent), stops(agent)) == counted
        assert agent.status().ready == "True"


async def test_P5_kernel_lines_lost_during_the_self_test_make_no_good_verdict(tmp_path: Path) -> None:
    scenario = PASSTHROUGH + "faults: [{on: kernel_log.read, value: {gap: true}}]"
    async with rig(tmp_path, spec=on_any_platform(), scenario=scenario) as agent:
        await agent.converge()
        (verdict,) = agent.memory.verdicts
        assert not verdict.controls_ok
        condition = agent.condition("P2PVerified/qwen")
        assert condition.status != "True"
        assert "lines of the kernel log were lost" in condition.message
        assert service(agent).p2p == "off"
        assert service(agent).state == "active"
