"""The laws against actions that change an IOMMU group's type."""

import pytest

from agent.core.fact import Absent, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.laws import check_plan
from agent.core.memory import Quarantine
from agent.core.observation import Holder
from agent.core.plan import Action, Disruption, Stage, make_plan
from agent.kind import plan_all, trajectory
from agent.kinds import ALL
from tests.core import build
from tests.core.build import BOOT, LAST, SPLIT, Change, audio_of, spec, type_host
from tests.core.verdicts import rules_written

GPU = LAST[0]
CARD = (GPU, audio_of(GPU))
GROUP = 48
MOVED = (build.on("vfio-pci", *LAST), rules_written)


def host(*changes: Change, **platform: str) -> Inputs:
    wanted = spec(platform={"iommu": "translated", **platform}, gpus=SPLIT)
    return type_host(wanted, *MOVED, *changes)


def change(kind: str = "DMA", touches: tuple[str, ...] = CARD, group: int = GROUP) -> Action:
    return Action(
        "platform", "set-group-type", f"iommu-group-{group}", "set it", Stage.PREPARE, Disruption.NONE,
        params={"group": str(group), "type": kind}, touches=touches,
    )  # fmt: skip


def broken(inputs: Inputs, action: Action) -> set[int]:
    plan = make_plan(1, [action], [], [])
    return {v.law for v in check_plan(plan, inputs, trajectory(ALL, plan, inputs))}


def test_a_free_group_of_selected_cards_on_vfio_may_change() -> None:
    assert broken(host(), change()) == set()
    assert broken(host(build.function(GPU, driver=Absent())), change()) == set()


@pytest.mark.parametrize(
    "fact",
    [Known((Holder("process", "/dev/vfio/48", 7, "qemu"),)), Unknown("no answer")],
    ids=["held", "unknown"],
)
def test_law_1_the_group_of_a_device_that_is_or_may_be_held_does_not_change(fact: object) -> None:
    assert 1 in broken(host(build.holders_are(audio_of(GPU), fact)), change())  # type: ignore[arg-type]


def test_law_1_the_group_of_a_device_that_a_driver_of_the_host_uses_does_not_change() -> None:
    assert 1 in broken(host(build.on("nvidia", GPU)), change())
    assert 1 in broken(host(build.function(GPU, driver=Unknown("no answer"))), change())


def test_law_2_the_group_of_a_device_out_of_reach_does_not_change() -> None:
    assert 2 in broken(host(build.pending(GPU)), change())


def test_law_3_every_member_of_the_group_is_selected_and_named_by_the_action() -> None:
    assert 3 in broken(host(), change(touches=(GPU,)))
    shared = build.in_group(GROUP, *CARD, build.NIC)
    assert 3 in broken(host(shared), change())
    assert 3 in broken(host(shared), change(touches=(*CARD, build.NIC)))
    assert 3 in broken(host(), change(group=99))


def test_law_5_with_snp_in_the_spec_no_group_leaves_translation() -> None:
    assert 5 in broken(host(sevSnp="enabled"), change("identity"))
    assert 5 not in broken(host(sevSnp="enabled"), change("DMA-FQ"))


@pytest.mark.parametrize(
    "changes",
    [
        (build.holders_are(GPU, Unknown("no answer")),),
        (build.held(audio_of(GPU), Holder("vm", "VM 101")),),
        (build.in_group(GROUP, *CARD, build.NIC),),
        (build.pending(GPU),),
        (build.function(GPU, driver=Unknown("no answer")),),
    ],
    ids=["unknown", "held", "shared", "pending", "driver-unknown"],
)
def test_the_planner_leaves_a_group_alone_that_the_laws_forbid_and_says_why(
    changes: tuple[Change, ...],
) -> None:
    inputs = host(*changes, build.group_type(Known("identity"), GPU))
    plan = plan_all(ALL, inputs)
    assert not [a for a in plan.actions if a.verb == "set-group-type"]
    assert any(r.reason in {"IommuMode", "NotObserved"} for r in plan.refusals)
    assert check_plan(plan, inputs, trajectory(ALL, plan, inputs)) == []


def test_a_quarantined_card_of_this_boot_keeps_its_groups_type() -> None:
    entry = Quarantine(address=GPU, reason="RebootRequired", message="stuck", boot_id=BOOT, at=0.0)
    inputs = host(build.group_type(Known("identity"), GPU), build.with_memory(quarantine={GPU: entry}))
    assert not [a for a in plan_all(ALL, inputs).actions if a.verb == "set-group-type"]
