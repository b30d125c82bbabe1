"""Conditions merged, fingerprints taken, and the sentence in which a pass ends."""

from typing import Any

import pytest

from agent.core.condition import Condition, Truth, merge
from agent.core.fact import Absent, Known, Unknown
from agent.core.p2p_decision import holds
from agent.core.report import sentence
from agent.core.status import ready_of
from agent.core.verdict import P2PVerdict, PathVerdict, fingerprint, worst
from tests.core import build
from tests.core.build import FIRST, LAST, made, type_host
from tests.core.verdicts import verdict


def condition(kind: str, status: Truth, message: str = "", since: float = 0.0) -> Condition:
    return Condition(type=kind, status=status, reason="Because", message=message, last_transition=since)


def test_a_condition_keeps_the_time_of_its_last_change_of_status() -> None:
    old = (condition("A", "True", "one", since=10.0), condition("B", "True", since=10.0))
    new = (condition("B", "Unknown"), condition("A", "True", "two"), condition("C", "False"))
    merged = merge(old, new, now=50.0)
    assert [(c.type, c.last_transition) for c in merged] == [("A", 10.0), ("B", 50.0), ("C", 50.0)]
    assert merged[0].message == "two"


def test_a_condition_that_is_no_longer_said_is_gone_and_comes_back_as_new() -> None:
    first = merge((), (condition("A", "True"),), now=1.0)
    assert merge(first, (), now=2.0) == ()
    assert merge((), (condition("A", "True"),), now=3.0)[0].last_transition == 3.0


def bridge(address: str) -> str:
    return build.known_pci(type_host()).functions[address].bridges[0]


INGREDIENTS: dict[str, build.Change] = {
    "another boot": build.platform(boot_id=Known("another")),
    "another kernel command line": build.platform(cmdline=Known(("ro", "iommu=pt"))),
    "another driver": build.platform(nvidia_driver=Known("580.95")),
    "another card": build.gpu_with(FIRST[1], uuid=Known("GPU-ffffffff-0000-4000-8000-000000000000")),
    "another group type": build.group_type(Known("identity"), FIRST[2]),
    "no IOMMU": build.function(FIRST[2], iommu_group=Absent()),
    "ACS set again": build.function(bridge(FIRST[3]), acs_ctl=Known(0)),
    "a card out of NVML's sight": build.nvml_of(FIRST[0], None),
    "NVML fails": lambda inputs: build.with_obs(inputs, nvml=Unknown("error 18")),
    "the boot unknown": build.platform(boot_id=Unknown("unreadable")),
}


@pytest.mark.parametrize("name", INGREDIENTS)
def test_P16_every_ingredient_of_a_fingerprint_voids_a_verdict_when_it_changes(name: str) -> None:
    before = made(type_host(), verdict("good"))
    after = INGREDIENTS[name](before)
    assert fingerprint(after.obs, FIRST) != fingerprint(before.obs, FIRST)
    assert holds(before.memory.verdict_for(FIRST), before.obs, FIRST)
    assert not holds(after.memory.verdict_for(FIRST), after.obs, FIRST)


UNRELATED: dict[str, build.Change] = {
    "another card of another group": build.gpu_with(
        LAST[0], uuid=Known("GPU-eeeeeeee-0000-4000-8000-000000000000")
    ),
    "a driver change of the others": build.on("vfio-pci", *LAST),
    "a power limit": build.gpu_with(FIRST[0], power_limit=Known(450)),
    "a link that idles at another speed": build.function(FIRST[0], link_speed=Known("2.5 GT/s PCIe")),
    "a process": build.held(FIRST[0], build.serving(FIRST[0])),
}


@pytest.mark.parametrize("name", UNRELATED)
def test_D7_what_does_not_bear_on_dma_leaves_a_verdict_alone(name: str) -> None:
    before = made(type_host(), verdict("good"))
    assert fingerprint(UNRELATED[name](before).obs, FIRST) == fingerprint(before.obs, FIRST)


def test_a_fingerprint_does_not_depend_on_the_order_of_the_gpus() -> None:
    assert fingerprint(type_host().obs, reversed(FIRST)) == fingerprint(type_host().obs, FIRST)


def test_P9_a_verdict_names_exactly_the_pair_and_the_direction() -> None:
    gpus = tuple(f"0000:0{n}:00.0" for n in range(8))
    paths = tuple(
        PathVerdict(source=a, destination=b, path="store", result="corrupt" if (a, b) == (gpus[2], gpus[7]) else "good")
        for a in gpus for b in gpus if a != b
    )  # fmt: skip
    found = P2PVerdict(
        gpus=gpus, fingerprint="", result=worst(p.result for p in paths), paths=paths, controls_ok=True
    )
    assert found.bad_pairs() == ((gpus[2], gpus[7]),)
    assert found.summary() == "1 of 56 ordered pairs corrupt"


def test_the_worst_of_no_results_is_no_result() -> None:
    assert worst([]) == "not-run"
    assert worst(["good", "unsupported", "corrupt", "error", "hung"]) == "hung"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"blocked": "policy.mode is observe", "failed": "x", "done": 1}, "Blocked: policy.mode is observe."),
        ({"failed": "0000:81:00.0: held", "done": 2, "pending": 9}, "Stopped after 2 of 9 actions: 0000:81:00.0: held."),
        ({"notes": ("P2P self-test: all good", "qwen: promoted"), "done": 9}, "P2P self-test: all good; qwen: promoted."),
        ({"done": 1}, "Done: 1 action."),
        ({"done": 2}, "Done: 2 actions."),
        ({"facts": {"idle": "Waiting: a card is held."}}, "Waiting: a card is held."),
        ({}, "Converged: nothing to do."),
    ],
)  # fmt: skip
def test_a_pass_ends_in_one_plain_sentence_the_worst_first(said: dict[str, Any], expected: str) -> None:
    whole = {"blocked": "", "done": 0, "failed": "", "notes": (), "pending": 0, "facts": {}, **said}
    assert sentence(**whole) == expected


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], "Unknown"),
        ([("A", "True"), ("B", "True")], "True"),
        ([("A", "True"), ("B", "Unknown")], "Unknown"),
        ([("A", "Unknown"), ("B", "False")], "False"),
        ([("A", "True"), ("P2PVerified/qwen", "False")], "True"),
        ([("P2PVerified/qwen", "True")], "Unknown"),
    ],
)
def test_ready_is_the_worst_of_what_counts(states: list[tuple[str, Truth]], expected: str) -> None:
    assert ready_of(tuple(condition(kind, status) for kind, status in states)) == expected
