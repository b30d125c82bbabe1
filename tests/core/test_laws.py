"""Each law against plans made by hand: a bad one is refused, its nearest good neighbour is not."""

from dataclasses import replace

import pytest

from agent.core.fact import Absent, Known, Unknown
from agent.core.forbidden_text import proposes_untranslated
from agent.core.inputs import Inputs
from agent.core.laws import check_plan
from agent.core.memory import Quarantine, Rejected, Unbinding
from agent.core.observation import Holder, KernelEvent
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage, make_plan
from agent.core.resolve import trial_key
from agent.kind import plan_all, trajectory
from agent.kinds import ALL
from tests.core import build
from tests.core.build import (
    BOOT,
    FIRST,
    GPUS,
    LAST,
    NIC,
    NOW,
    SPLIT,
    audio_of,
    made,
    service,
    spec,
    type_host,
)
from tests.core.verdicts import converged, split, verdict

GPU = LAST[0]
IDLE = [a for gpu in GPUS for a in (gpu, audio_of(gpu))]
FOREIGN = Holder("process", "/dev/nvidia3", 77, "jupyter")


def bind(
    *functions: str, driver: str = "vfio-pci", verb: str = "bind", touches: tuple[str, ...] | None = None
) -> Action:
    return Action(
        "driver-binding", verb, functions[0], f"bind {', '.join(functions)}", Stage.BIND, Disruption.REBIND,
        params=dict.fromkeys(functions, driver), touches=functions if touches is None else touches,
    )  # fmt: skip


def persistence_off(gpu: str) -> Action:
    return Action(
        "driver-binding",
        "persistence-off",
        gpu,
        "persistence off",
        Stage.RELEASE,
        Disruption.LIVE,
        touches=(gpu,),
    )


def stop(name: str = "qwen") -> Action:
    return Action("service", "stop", name, "stop it", Stage.STOP, Disruption.RESTART, touches=(build.UNIT,))


def trial(**params: str) -> Action:
    return Action(
        "service", "trial", "qwen", "start it on trial", Stage.START, Disruption.LIVE, params=params
    )


def broken(
    inputs: Inputs, *actions: Action, refusals: tuple[Refusal, ...] = (), drifts: tuple[Drift, ...] = ()
) -> set[int]:
    plan: Plan = make_plan(1, list(actions), list(drifts), list(refusals))
    return {v.law for v in check_plan(plan, inputs, trajectory(ALL, plan, inputs))}


def idle_host(*changes: build.Change) -> Inputs:
    return type_host(None, build.stopped(), build.idle(*IDLE), *changes)


CARD = (GPU, audio_of(GPU))


def test_law_1_a_free_card_may_be_moved() -> None:
    assert broken(idle_host(), bind(*CARD)) == set()


@pytest.mark.parametrize(
    "change",
    [
        build.held(GPU, FOREIGN),
        build.held(audio_of(GPU), Holder("process", "/dev/snd/controlC1", 80, "pipewire")),
        build.held(GPU, Holder("vm", "VM 101")),
        build.holders_are(GPU, Unknown("permission denied")),
        build.gpu_with(GPU, persistence_mode=Known(value=True)),
        build.gpu_with(GPU, persistence_mode=Unknown("not supported")),
        build.nvml_of(GPU, None),
        lambda inputs: build.with_obs(inputs, nvml=Unknown("NVML error 18")),
        lambda inputs: build.with_obs(inputs, holders={}),
        build.function(GPU, boot_vga=Known(value=True)),
        build.function(GPU, boot_vga=Unknown("unreadable")),
        build.function(GPU, driver=Unknown("unreadable")),
    ],
    ids=[
        "a process", "the sound device", "a virtual machine", "unknown holders", "persistence", "unknown persistence",
        "NVML does not list it", "NVML fails", "nobody looked", "the console", "perhaps the console", "unknown driver",
    ],
)  # fmt: skip
def test_law_1_a_card_that_is_or_may_be_held_is_not_unbound(change: build.Change) -> None:
    assert 1 in broken(idle_host(change), bind(*CARD))


def test_law_1_a_holder_that_the_plan_stops_first_is_no_holder_and_one_stopped_later_is() -> None:
    serving = idle_host(build.held(GPU, build.serving(GPU)))
    assert broken(serving, stop(), bind(*CARD)) == set()
    assert 1 in broken(serving, bind(*CARD), replace(stop(), stage=Stage.START))


def test_law_1_stopping_a_unit_frees_only_what_that_unit_holds_in_its_own_place() -> None:
    """Another container has a unit of the same name."""
    strange = idle_host(build.held(GPU, build.serving(GPU, container="130")))
    assert 1 in broken(strange, stop(), bind(*CARD))


def test_law_1_persistence_mode_that_goes_off_first_is_no_holder() -> None:
    on = idle_host(build.gpu_with(GPU, persistence_mode=Known(value=True)))
    assert broken(on, persistence_off(GPU), bind(*CARD)) == set()
    assert 1 in broken(on, persistence_off(GPUS[5]), bind(*CARD))


def test_law_1_a_device_without_a_driver_may_be_a_pending_unbind_when_somebody_holds_it() -> None:
    bare = build.without_driver(GPU)
    assert broken(idle_host(bare), bind(*CARD)) == set()
    assert 1 in broken(idle_host(bare, build.held(GPU, FOREIGN)), bind(*CARD))
    assert 1 in broken(idle_host(bare, build.holders_are(GPU, Unknown("no permission"))), bind(*CARD))


def test_law_1_holds_for_verbs_that_nobody_has_heard_of() -> None:
    assert 1 in broken(idle_host(build.held(GPU, FOREIGN)), bind(*CARD, verb="rebind-quickly"))


def lost(boot: str) -> build.Change:
    entry = Quarantine(address=GPU, reason="RebootRequired", message="stuck", boot_id=boot, at=NOW)
    return build.with_memory(quarantine={GPU: entry})


def test_law_2_an_unbind_that_has_not_returned_is_not_written_again() -> None:
    assert 2 in broken(idle_host(build.pending(GPU)), bind(*CARD))
    assert 2 in broken(idle_host(build.pending(audio_of(GPU))), bind(*CARD))
    assert broken(idle_host(build.pending(GPUS[5])), bind(*CARD)) == set()


def test_law_2_a_quarantined_device_is_left_alone_until_another_boot() -> None:
    assert 2 in broken(idle_host(lost(BOOT)), bind(*CARD))
    assert 2 in broken(idle_host(lost("")), bind(*CARD))
    assert 2 in broken(idle_host(lost("another"), build.platform(boot_id=Unknown("unreadable"))), bind(*CARD))
    assert broken(idle_host(lost("another")), bind(*CARD)) == set()


def test_law_2_an_unbind_that_nothing_proves_to_have_returned_is_not_written_again() -> None:
    entry = Unbinding(boot_id=BOOT, at=NOW)
    assert 2 in broken(idle_host(build.with_memory(unbinding={audio_of(GPU): entry})), bind(*CARD))
    before = entry.model_copy(update={"boot_id": "another"})
    assert broken(idle_host(build.with_memory(unbinding={GPU: before})), bind(*CARD)) == set()


def test_law_10_what_others_wrote_is_redacted_in_the_planners_own_plans_and_does_not_block_them() -> None:
    failed = {"service/trial/qwen": f"401 for token hf_{'a1' * 12}; HF_TOKEN=abcdefgh is wrong"}
    inputs = type_host(SECRET, build.with_memory(terminal=failed))
    plan = plan_all(ALL, inputs)
    assert any("(not shown)" in r.message for r in plan.refusals)
    assert check_plan(plan, inputs, trajectory(ALL, plan, inputs)) == []


def test_law_2_nothing_else_is_written_to_it_either() -> None:
    """driver_override would wait for the same lock in the kernel."""
    mend = bind(GPU, driver="", verb="mend-override")
    assert 2 in broken(idle_host(build.pending(GPU)), mend)
    assert broken(idle_host(), mend) == set()


def test_law_3_only_devices_that_the_spec_names_are_touched() -> None:
    small = spec(gpus={"confidential": {"select": [GPUS[5]], "driver": "vfio-pci"}})
    host = type_host(small)
    assert 3 in broken(host, bind(*CARD))
    assert broken(host, bind(GPUS[5], audio_of(GPUS[5]))) == set()
    assert 3 in broken(host, bind(NIC))


def test_law_3_what_an_action_moves_counts_and_not_only_what_it_says_it_touches() -> None:
    small = spec(gpus={"confidential": {"select": [GPUS[5]], "driver": "vfio-pci"}})
    assert 3 in broken(type_host(small), bind(*CARD, touches=()))


def test_law_3_a_setting_of_a_card_that_the_spec_does_not_name_is_not_written() -> None:
    small = spec(gpus={"inference": {"select": [GPUS[5]], "driver": "nvidia"}})
    limit = Action(
        "gpu-settings", "power-limit", GPU, "set it", Stage.SET, Disruption.LIVE, params={"value": "400"}
    )
    assert 3 in broken(type_host(small), limit)
    assert broken(type_host(small), replace(limit, target=GPUS[5], touches=(GPUS[5],))) == set()


def test_law_3_a_card_goes_to_the_driver_of_its_group() -> None:
    assert 3 in broken(idle_host(), bind(FIRST[0], audio_of(FIRST[0])))
    given = idle_host(build.on("vfio-pci", GPU))
    assert 3 in broken(given, bind(GPU, driver="nvidia"))


def test_law_3_a_slot_is_not_split_in_either_direction() -> None:
    assert 3 in broken(idle_host(), bind(GPU))
    back = idle_host(build.on("vfio-pci", FIRST[0]))
    assert 3 in broken(back, bind(FIRST[0], driver="nvidia"))
    whole = replace(
        bind(FIRST[0], driver="nvidia"), params={FIRST[0]: "nvidia", audio_of(FIRST[0]): "snd_hda_intel"}
    )
    assert broken(back, whole) == set()


def test_law_3_an_iommu_group_is_not_split_unless_the_rest_of_it_follows() -> None:
    shared = build.in_group(99, *CARD, GPUS[5], audio_of(GPUS[5]))
    assert broken(idle_host(shared), bind(*CARD), bind(GPUS[5], audio_of(GPUS[5]))) == set()
    assert 3 in broken(idle_host(build.in_group(52, NIC, *CARD)), bind(*CARD))
    keeps = build.in_group(99, *CARD, FIRST[3], audio_of(FIRST[3]))
    assert 3 in broken(idle_host(keeps), bind(*CARD))


def test_law_3_nor_by_taking_a_card_back_from_a_group_that_stays_with_a_guest() -> None:
    mixed = build.in_group(99, FIRST[0], audio_of(FIRST[0]), *CARD)
    both = idle_host(build.on("vfio-pci", FIRST[0], GPU), mixed)
    back = replace(bind(FIRST[0], driver="nvidia"), params={FIRST[0]: "nvidia", audio_of(FIRST[0]): ""})
    assert 3 in broken(both, back)
    assert broken(idle_host(build.on("vfio-pci", FIRST[0], GPU)), back) == set()


def test_law_4_a_start_that_says_p2p_on_needs_a_good_verdict_for_exactly_these_gpus() -> None:
    base = type_host(None, split(), build.with_memory(verdicts=()))
    assert 4 in broken(base, trial(p2p="on"))
    assert broken(base, trial(p2p="off")) == set()
    assert 4 in broken(made(base, verdict("corrupt")), trial(p2p="on"))
    assert 4 in broken(made(base, verdict("good", FIRST[:3])), trial(p2p="on"))
    assert 4 in broken(made(base, verdict("good", fingerprint="0" * 16)), trial(p2p="on"))
    assert 4 in broken(made(base, verdict("good", revoked="7 page faults")), trial(p2p="on"))
    assert 4 in broken(made(base, verdict("good", controls_ok=False)), trial(p2p="on"))
    assert broken(made(base, verdict("good")), trial(p2p="on")) == set()


def test_law_4_and_law_9_two_unknown_boots_are_not_one_boot() -> None:
    base = type_host(None, split(), build.platform(boot_id=Unknown("unreadable")), verdict("good"))
    assert 4 in broken(base, trial(p2p="on"))


def test_law_4_looks_at_what_would_run_and_not_at_what_is_written_beside_it() -> None:
    """A last good revision that calls itself P2P off, and would leave one of the two consumers on."""
    base = type_host(None, split())
    now = build.desired(base)
    key = trial_key(now, base.spec.services["qwen"].gate)
    refused = {"qwen": Rejected(revision=key, generation=1, reason="SmokeFailed", message="!!!", at=NOW)}
    tampered = now.model_copy(
        update={"argv": tuple(w for w in now.argv if w != "--disable-custom-all-reduce")}
    )
    honest = now.model_copy(update={"argv": (*now.argv, "--log-level", "debug")})
    back = made(base, build.with_memory(rejected=refused))
    assert 4 in broken(made(back, build.promoted(revision=tampered)), trial())
    assert broken(made(back, build.promoted(revision=honest)), trial()) == set()


def test_law_4_a_fault_on_one_of_its_gpus_since_the_test_takes_the_verdict_away() -> None:
    base = type_host(None, split(), verdict("good"))
    fault = KernelEvent("page-fault", FIRST[2], 7, NOW - 60, NOW - 30, "IO_PAGE_FAULT")
    elsewhere = replace(fault, address=GPU)
    earlier = replace(fault, last=NOW - 7200)
    assert 4 in broken(build.with_obs(base, kernel_events=Known((fault,))), trial(p2p="on"))
    assert broken(build.with_obs(base, kernel_events=Known((elsewhere,))), trial(p2p="on")) == set()
    assert broken(build.with_obs(base, kernel_events=Known((earlier,))), trial(p2p="on")) == set()


SNP = spec(platform={"sevSnp": "enabled"}, gpus=SPLIT, services=service())


def advice(step: str) -> Refusal:
    return Refusal("p2p", "qwen", "Corrupt", "peer DMA is corrupt", step)


@pytest.mark.parametrize(
    "step",
    [
        "put iommu=pt on the kernel command line and reboot",
        "boot with iommu=pt",
        "try iommu=nomerge,pt; then test again",
        "iommu=off",
        "set amd_iommu=off",
        "use intel_iommu=off",
        "add iommu.passthrough=1",
        "remove quiet; add iommu=pt",
    ],
)
def test_law_5_and_D1_what_makes_the_kernel_refuse_snp_is_not_advised_where_the_spec_has_snp(
    step: str,
) -> None:
    assert 5 in broken(type_host(SNP), refusals=(advice(step),))
    assert broken(type_host(), refusals=(advice(step),)) == set()


@pytest.mark.parametrize(
    "step",
    [
        "remove iommu=pt, amd_iommu=off and iommu=off from the kernel command line and reboot",
        "do not set iommu=pt",
        "put pcie_aspm=off on the kernel command line",
        "see the P2P condition, or set p2p: auto",
        "",
    ],
)
def test_law_5_taking_it_away_is_good_advice(step: str) -> None:
    assert broken(type_host(SNP), refusals=(advice(step),)) == set()


def test_law_5_holds_for_actions_whatever_they_are_called() -> None:
    write = Action(
        "platform",
        "write-cmdline",
        "host",
        "write it",
        Stage.PREPARE,
        Disruption.NONE,
        {"text": "ro iommu=pt"},
    )
    assert 5 in broken(type_host(SNP), write)
    assert broken(type_host(SNP), replace(write, params={"text": "ro quiet"})) == set()
    assert proposes_untranslated("ro iommu=pt")


SECRET = spec(gpus=SPLIT, services=service(secrets={"HF_TOKEN": "/etc/gpu-host-agent/secrets/hf_token"}))


@pytest.mark.parametrize(
    "action",
    [
        trial(env="HF_TOKEN=abcdefgh"),
        trial(HF_TOKEN="abcdefgh"),
        replace(trial(), description="start it with HF_TOKEN=abcdefgh"),
        replace(trial(), why="HF_TOKEN=abcdefgh"),
        trial(argv="--token hf_abcdefghijklmnopqrstuvwxyz012345"),
    ],
    ids=["in a parameter", "as a parameter", "in the description", "in the reason", "by its shape"],
)
def test_law_10_no_action_carries_the_value_of_a_secret(action: Action) -> None:
    assert 10 in broken(type_host(SECRET), action)


def test_law_10_a_path_of_a_secret_is_no_secret() -> None:
    assert (
        broken(type_host(SECRET), trial(secrets="/etc/gpu-host-agent/secrets/hf_token", name="HF_TOKEN"))
        == set()
    )


def test_law_10_and_S13_neither_drift_nor_a_refusal_carries_it() -> None:
    drift = Drift("service", "qwen", "env", "HF_TOKEN=abcdefgh", "none")
    assert 10 in broken(type_host(SECRET), drifts=(drift,))
    assert 10 in broken(type_host(SECRET), refusals=(advice("run it with HF_TOKEN=abcdefgh"),))
    assert broken(type_host(SECRET), drifts=(replace(drift, desired="HF_TOKEN"),)) == set()


def test_the_planners_own_plans_for_these_hosts_break_none() -> None:
    for inputs in (type_host(), idle_host(), converged(), type_host(SNP), type_host(SECRET)):
        plan = plan_all(ALL, inputs)
        assert check_plan(plan, inputs, trajectory(ALL, plan, inputs)) == []


def test_a_bare_override_is_not_a_move() -> None:
    """The one write on a device that unbinds nothing."""
    held = idle_host(build.held(GPU, FOREIGN), build.function(GPU, driver_override=Absent()))
    assert broken(held, bind(GPU, driver="vfio-pci", verb="mend-override")) == set()


def test_law_3_a_service_starts_only_on_gpus_that_the_spec_names_for_it() -> None:
    base = type_host(None, split())
    assert broken(base, replace(trial(), touches=(build.UNIT, *FIRST))) == set()
    assert 3 in broken(base, replace(trial(), touches=(build.UNIT, *FIRST, GPU)))
    assert 3 in broken(base, replace(trial(), verb="prove", touches=(build.UNIT, GPU)))
