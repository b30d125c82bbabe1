"""What the condition of a service's P2P says of a verdict's details."""

from typing import Any

from agent.core.condition import Condition
from agent.core.model import with_memory
from agent.core.p2p_speed import COLLAPSES, NOT_DIRECT
from agent.core.plan import Plan
from agent.core.resolve import resolve
from agent.core.verdict import STAYS, P2PVerdict, PathVerdict, fingerprint, worst
from agent.kinds.p2p import P2PKind
from tests.core.build import GPUS, type_host

A, B, C, D = GPUS[:4]


def path(source: str, destination: str, name: str, result: Any = "good", detail: str = "") -> PathVerdict:
    return PathVerdict(source=source, destination=destination, path=name, result=result, detail=detail)


def said(*paths: PathVerdict) -> Condition:
    inputs = type_host()
    verdict = P2PVerdict(
        gpus=(A, B, C, D), fingerprint=fingerprint(inputs.obs, GPUS[:4]), result=worst(p.result for p in paths),
        paths=paths, controls_ok=True, tested_at=inputs.now,
    )  # fmt: skip
    inputs = with_memory(inputs, verdicts=(verdict,))
    (condition,) = P2PKind().conditions(inputs, resolve(inputs), Plan(inputs.generation))
    return condition


def test_right_data_at_an_odd_speed_is_good_and_says_what_is_odd():
    slow = f"{NOT_DIRECT}; 10 GB/s, by way of the host 10 GB/s"
    condition = said(
        path(A, B, "copy-push", detail=slow),
        path(A, B, "copy-pull", detail=slow),
        path(B, A, "copy-push", detail=slow),
        path(A, C, "concurrent", detail=f"{COLLAPSES}; 2 GB/s while all pairs send, 50 GB/s alone"),
        path(C, A, "store"),
    )
    assert (condition.status, condition.reason) == ("True", "Good")
    assert f"{A} -> {B} and 1 more: {NOT_DIRECT} (10 GB/s" in condition.message
    assert f"{A} -> {C}: {COLLAPSES} (2 GB/s" in condition.message
    assert f"{C} -> {A}" not in condition.message


def test_the_same_finding_at_different_offsets_is_said_once():
    zeros = [
        path(A, b, "copy-push", "corrupt", f"zeros; pattern address, offset {n}")
        for n, b in enumerate((B, C, D))
    ]
    condition = said(*zeros, path(B, A, "load"))
    assert condition.message.count("zeros over copy-push") == 1
    assert "offset" not in condition.message


def test_a_process_that_cannot_be_killed_is_named_and_only_a_reboot_ends_it():
    condition = said(path(A, B, "copy-push", "hung", f"no end within 30 s; pid 4711 {STAYS} (D, nv_wait)"))
    assert (condition.status, condition.reason) == ("False", "Hung")
    assert "pid 4711" in condition.message
    assert "reboot" in condition.next_step
    assert not said(path(A, B, "copy-push", "hung", "no end within 30 s (pid 4711, S)")).next_step
