"""P2P cases, as an operator meets them: what status says, what was written, what runs."""

from pathlib import Path

from tests.cases.operating import (
    INFERENCE,
    PASSTHROUGH,
    asks,
    journal,
    kernel_says,
    on_any_platform,
    phases,
    qwen,
    recipe,
    rig,
    service,
    service_dies,
    starts,
    stops,
    unit,
)  # fmt: skip
from tests.rig import SCENARIOS, Rig

EIGHT = (*INFERENCE, "0000:81:00.0", "0000:91:00.0", "0000:e1:00.0", "0000:f1:00.0")
FAULT = "nvidia {gpu}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0003 address=0x{address:x} flags=0x0020]"


def assert_p2p_off_everywhere(agent: Rig) -> None:
    """NCCL and SGLang's custom all-reduce use P2P independently of each other: one verdict turns both off."""
    shown = service(agent)
    assert shown.p2p == "off"
    assert shown.env["NCCL_P2P_DISABLE"] == "1"
    assert "--disable-custom-all-reduce" in shown.argv
    assert unit(agent).env["NCCL_P2P_DISABLE"] == "1"
    assert "--disable-custom-all-reduce" in unit(agent).argv


def assert_p2p_on(agent: Rig) -> None:
    shown = service(agent)
    assert shown.p2p == "on"
    assert "NCCL_P2P_DISABLE" not in unit(agent).env
    assert "--disable-custom-all-reduce" not in unit(agent).argv


async def test_P1_one_bad_verdict_vetoes_both_consumers_although_the_spec_names_one(tmp_path: Path) -> None:
    spec = recipe(**qwen(nccl={"NCCL_P2P_DISABLE": "1"}))
    async with rig(tmp_path, spec=spec, scenario=SCENARIOS / "P1.yaml") as agent:
        await agent.converge()
        assert_p2p_off_everywhere(agent)
        why = service(agent).why
        assert why["args.disable-custom-all-reduce"].source == "verdict"
        assert "12 of 12 ordered pairs" in why["args.disable-custom-all-reduce"].reason


async def test_P2_a_hung_pair_is_named_and_the_service_starts_without_p2p(tmp_path: Path) -> None:
    scenario = PASSTHROUGH + (SCENARIOS / "P2.yaml").read_text()
    async with rig(tmp_path, spec=on_any_platform(), scenario=scenario) as agent:
        await agent.converge()
        condition = agent.condition("P2PVerified/qwen")
        assert (condition.status, condition.reason) == ("False", "Hung")
        assert "0000:01:00.0 -> 0000:11:00.0" in condition.message
        assert "1 of 12 ordered pairs hung" in condition.message
        assert_p2p_off_everywhere(agent)
        assert agent.status().ready == "True"


async def test_P4_a_pair_that_capabilities_call_fine_is_judged_by_its_data(tmp_path: Path) -> None:
    """Two of the GPUs fail where four work: the test is made with exactly the service's own GPUs."""
    two = {"inference": {"select": list(INFERENCE[:2])}}
    spec = on_any_platform(gpus=two, **qwen(args={"tensor-parallel-size": 2}))
    async with rig(tmp_path, spec=spec, scenario=SCENARIOS / "P4.yaml") as agent:
        await agent.converge()
        (p2p,) = agent.status().p2p
        assert p2p.gpus == INFERENCE[:2]
        assert p2p.verdict == "hung"
        assert_p2p_off_everywhere(agent)


async def test_P4_the_same_host_with_four_gpus_is_tested_with_four_and_runs_with_p2p(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=on_any_platform(), scenario=SCENARIOS / "P4.yaml") as agent:
        await agent.converge()
        (p2p,) = agent.status().p2p
        assert p2p.gpus == INFERENCE
        assert p2p.verdict == "good"
        assert_p2p_on(agent)


async def test_P5_zeros_are_named_and_the_page_faults_attributed_to_their_pair(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "P5.yaml") as agent:
        await agent.converge()
        condition = agent.condition("P2PVerified/qwen")
        assert (condition.status, condition.reason) == ("False", "Corrupt")
        assert "zeros" in condition.message
        assert "page faults" in condition.message
        assert "0000:01:00.0 into 0000:11:00.0" in condition.message
        assert_p2p_off_everywhere(agent)


async def test_P5_right_data_with_page_faults_during_the_test_is_still_bad(tmp_path: Path) -> None:
    line = FAULT.format(gpu="0000:71:00.0", address=0x20000001000)
    scenario = PASSTHROUGH + f"events: [{{afterCalls: {{p2p.run: 1}}, do: {{log: '{line}'}}}}]"
    async with rig(tmp_path, spec=on_any_platform(), scenario=scenario) as agent:
        await agent.converge()
        condition = agent.condition("P2PVerified/qwen")
        assert (condition.status, condition.reason) == ("False", "Corrupt")
        assert "1 page faults during the test" in condition.message
        assert "0000:71:00.0 into 0000:01:00.0" in condition.message
        assert_p2p_off_everywhere(agent)


async def test_P6_a_dropped_write_is_found_although_the_call_succeeded(tmp_path: Path) -> None:
    scenario = PASSTHROUGH + (SCENARIOS / "P6.yaml").read_text()
    async with rig(tmp_path, spec=on_any_platform(), scenario=scenario) as agent:
        await agent.converge()
        condition = agent.condition("P2PVerified/qwen")
        assert (condition.status, condition.reason) == ("False", "Corrupt")
        assert "dropped write" in condition.message
        assert_p2p_off_everywhere(agent)


async def test_P7_five_thousand_fault_lines_are_one_record_with_a_count(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "P7.yaml") as agent:
        await agent.converge()
        await agent.one_pass()
        text = (tmp_path / "run/gpu-host-agent/status.json").read_text()
        said = [c for c in agent.status().conditions if "0000:01:00.0 into 0000:11:00.0 5," in c.message]
        assert said, [c.message for c in agent.status().conditions]
        assert text.count("IO_PAGE_FAULT") <= 2
        assert len(text) < 60_000
        assert sum(p.stat().st_size for p in (tmp_path / "var/lib/gpu-host-agent").iterdir()) < 200_000
        before = len(journal(agent))
        kernel_says(agent, FAULT.format(gpu="0000:01:00.0", address=0x80000040), 5000)
        await agent.one_pass()
        assert len(journal(agent)) == before


async def test_P7_a_page_fault_under_p2p_revokes_the_verdict_and_the_service_runs_without(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=on_any_platform(), scenario=PASSTHROUGH) as agent:
        await agent.converge()
        assert_p2p_on(agent)
        kernel_says(agent, FAULT.format(gpu="0000:11:00.0", address=0x20000001000), 3)
        result = await agent.one_pass()
        assert result.plan is not None
        assert "page fault" in "\n".join(d.why for d in result.plan.drifts)
        await agent.converge()
        assert_p2p_off_everywhere(agent)
        assert "page fault" in service(agent).p2p_reason
        condition = agent.condition("P2PVerified/qwen")
        assert (condition.status, condition.reason) == ("False", "Revoked")
        assert "agent retry qwen" in condition.next_step
        assert agent.status().ready == "True"
        # A good test does not outweigh a fault in service: P2P stays off until somebody asks, or the host changes.
        count = starts(agent)
        kernel_says(agent, FAULT.format(gpu="0000:11:00.0", address=0x20000001000), 3)
        await agent.converge()
        await agent.restart()
        await agent.converge()
        assert starts(agent) == count
        assert_p2p_off_everywhere(agent)


async def test_P7_a_revoked_verdict_outlives_the_kernel_log_and_a_retry_tests_anew(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=on_any_platform(), scenario=PASSTHROUGH) as agent:
        await agent.converge()
        kernel_says(agent, FAULT.format(gpu="0000:11:00.0", address=0x20000001000))
        await agent.converge()
        with agent.world.change() as state:
            state.kernel_log.clear()
        await agent.restart()
        await agent.converge()
        assert_p2p_off_everywhere(agent)
        asks(agent, "retry", "qwen")
        await agent.converge()
        assert_p2p_off_everywhere(agent)  # nobody asked for a restart
        service_dies(agent)
        await agent.converge()
        assert agent.condition("P2PVerified/qwen").status == "True"
        assert_p2p_on(agent)


async def test_P7_where_p2p_is_required_nothing_is_restarted_without_it(tmp_path: Path) -> None:
    spec = on_any_platform(**qwen(p2p="required"))
    async with rig(tmp_path, spec=spec, scenario=PASSTHROUGH) as agent:
        await agent.converge()
        assert_p2p_on(agent)
        counted = starts(agent), stops(agent)
        kernel_says(agent, FAULT.format(gpu="0000:11:00.0", address=0x20000001000))
        await agent.converge()
        assert (starts(agent), stops(agent)) == counted
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "P2PRequired")
        assert "page fault" in condition.message
        assert condition.next_step


async def test_P2_where_p2p_is_required_a_bad_verdict_keeps_the_service_from_starting(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=recipe(**qwen(p2p="required"))) as agent:
        await agent.converge()
        assert starts(agent) == 0
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "P2PRequired")
        assert "12 of 12" in condition.message


async def test_P8_exclamation_marks_fail_the_smoke_test_and_the_last_good_revision_comes_back(
    tmp_path: Path,
) -> None:
    await _nonsense_is_rolled_back(tmp_path, "exclaim", "'!' makes")


async def test_P8_fluent_nonsense_fails_the_smoke_test_and_the_last_good_revision_comes_back(
    tmp_path: Path,
) -> None:
    await _nonsense_is_rolled_back(tmp_path, "nonsense", "expected '91' in the answer")


async def _nonsense_is_rolled_back(root: Path, answer: str, complaint: str) -> None:
    when = "{flag: max-running-requests, exists: true}"
    scenario = f"faults: [{{on: server, answer: {answer}, when: {when}}}]"
    async with rig(root, scenario=scenario) as agent:
        await agent.converge()
        good = service(agent).revision
        agent.write_spec(recipe(**qwen(args={"max-running-requests": 64})))
        await agent.converge()
        shown = service(agent)
        assert shown.revision == shown.promoted == good
        assert "--max-running-requests" not in unit(agent).argv
        assert shown.trial is not None
        assert (shown.trial.outcome, shown.trial.restored) == ("rolled-back", good)
        assert "smoke failed" in phases(agent)
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "RolledBack")
        assert complaint in condition.message
        assert "agent retry qwen" in condition.next_step


async def test_P8_nonsense_at_the_first_deployment_is_stopped_and_held(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "P8.yaml") as agent:
        await agent.converge()
        assert starts(agent) == 1
        assert unit(agent).active_state in {"inactive", "failed"}
        condition = agent.condition("ServiceReady/qwen")
        assert condition.status == "False"
        assert condition.reason == "RevisionRejected"
        assert "'!' makes" in condition.message
        assert agent.memory.trials["qwen"].outcome == "held"
        await agent.restart()
        await agent.converge()
        assert starts(agent) == 1


async def test_P9_exactly_the_bad_pair_and_its_direction_are_named(tmp_path: Path) -> None:
    eight = {"inference": {"select": list(EIGHT)}, "confidential": None}
    spec = on_any_platform(gpus=eight, **qwen(args={"tensor-parallel-size": 8}))
    async with rig(tmp_path, spec=spec, scenario=SCENARIOS / "P9.yaml") as agent:
        await agent.converge()
        (p2p,) = agent.status().p2p
        assert p2p.bad_pairs == (("0000:61:00.0", "0000:f1:00.0"),)
        assert "1 of 56 ordered pairs corrupt" in p2p.summary
        message = agent.condition("P2PVerified/qwen").message
        assert "0000:61:00.0 -> 0000:f1:00.0" in message
        assert "0000:f1:00.0 -> 0000:61:00.0" not in message
        assert "pattern address, offset 65536" in message
        assert_p2p_off_everywhere(agent)


async def test_P11_host_memory_that_fails_with_p2p_off_is_switched_off_and_the_status_says_why(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "P11.yaml") as agent:
        await agent.converge()
        assert_p2p_off_everywhere(agent)
        shown = service(agent)
        assert shown.env["NCCL_CUMEM_HOST_ENABLE"] == unit(agent).env["NCCL_CUMEM_HOST_ENABLE"] == "0"
        assert agent.status().ready == "True"
        why = shown.why["env.NCCL_CUMEM_HOST_ENABLE"]
        assert why.source == "rule"
        assert "217" in why.reason


async def test_P11_where_the_spec_sets_host_memory_itself_it_has_the_last_word(tmp_path: Path) -> None:
    spec = recipe(**qwen(nccl={"NCCL_CUMEM_HOST_ENABLE": "1"}))
    async with rig(tmp_path, spec=spec, scenario=SCENARIOS / "P11.yaml") as agent:
        await agent.converge()
        assert service(agent).health != "ok"
        agent.write_spec(recipe())
        await agent.converge()
        assert unit(agent).env["NCCL_CUMEM_HOST_ENABLE"] == "0"
        assert service(agent).health == "ok"


async def test_P11_another_failure_of_a_start_changes_no_setting(tmp_path: Path) -> None:
    scenario = (SCENARIOS / "P11.yaml").read_text().replace("217", "2")
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert agent.memory.host_memory == {}
        assert "NCCL_CUMEM_HOST_ENABLE" not in unit(agent).env


async def test_P12_a_small_dev_shm_is_refused_before_anything_is_stopped(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "P12.yaml") as agent:
        await agent.converge()
        assert stops(agent) == starts(agent) == 0
        assert not [w for w in agent.world.writes if w.startswith("target.kill_unit")]
        assert unit(agent).active_state == "active"
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "ShmTooSmall")
        assert "64 MiB" in condition.message
        assert "remount" in condition.next_step


async def test_P12_a_promoted_service_goes_on_while_its_next_revision_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        good, counted = service(agent).revision, (starts(agent), stops(agent))
        with agent.world.change() as state:
            state.targets["lxc:129"].shm_bytes = 64 << 20
        agent.write_spec(recipe(**qwen(args={"max-running-requests": 64})))
        await agent.converge()
        assert (starts(agent), stops(agent)) == counted
        assert service(agent).revision == good
        assert service(agent).health == "ok"
        assert agent.condition("ServiceReady/qwen").reason == "ShmTooSmall"


async def test_P15_nccl_values_that_nccl_reads_as_something_else_are_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.world.writes.clear()
        bad = {"NCCL_P2P_DISABLE": "true", "NCCL_BUFFSIZE": "4M", "NCCL_P2P_LEVEL": "sys"}
        agent.write_spec(recipe(**qwen(nccl=bad)))
        await agent.converge()
        condition = agent.condition("SpecAccepted")
        assert condition.status == "False"
        problems = "\n".join(agent.status().spec.problems)
        for name in bad:
            assert name in problems
        assert "generation 1 is in force" in condition.message
        assert agent.world.writes == []
        assert service(agent).health == "ok"
