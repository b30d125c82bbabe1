"""Which of NVML's facts about a GPU need a hand, and which are normal work."""

from dataclasses import replace
from typing import Any

import pytest

from agent.core.condition import Condition
from agent.core.fact import Known, Unknown
from agent.core.gpu_facts import RemappedRows
from agent.core.gpu_health import gpu_health
from agent.core.model import with_gpu
from agent.core.resolve import resolve
from tests.core.build import GPUS, type_host

GPU = GPUS[0]


def health(**facts: Any) -> Condition:
    inputs = with_gpu(type_host(), GPU, lambda gpu: replace(gpu, **facts))
    return gpu_health(inputs, resolve(inputs))


def rows(*, pending: bool, failed: bool) -> Known[RemappedRows]:
    return Known(RemappedRows(1, 1, pending, failed))


def test_rows_that_were_remapped_and_are_done_with_are_no_fault():
    assert health(remapped_rows=rows(pending=False, failed=False)).status == "True"


@pytest.mark.parametrize(
    ("pending", "failed", "step"), [(True, False, "reset the GPU"), (False, True, "replace the GPU"), (True, True, "replace")]
)  # fmt: skip
def test_bad_memory_that_is_still_in_use_is_a_fault_with_its_cure(pending: bool, failed: bool, step: str):
    condition = health(remapped_rows=rows(pending=pending, failed=failed))
    assert (condition.status, condition.reason) == ("False", "GpuFault")
    assert condition.message.startswith(GPU)
    assert step in condition.next_step


@pytest.mark.parametrize(
    ("reason", "step"), [("hardware thermal slowdown", "fans"), ("hardware power brake", "power cables")]
)
def test_a_card_that_protects_itself_says_what_to_look_at(reason: str, step: str):
    condition = health(clock_reasons=Known(("idle", reason)))
    assert (condition.status, reason in condition.message) == ("False", True)
    assert step in condition.next_step


@pytest.mark.parametrize(
    "reason", ["idle", "software power cap", "software thermal slowdown", "hardware slowdown"]
)
def test_what_a_card_does_in_normal_work_is_no_fault(reason: str):
    assert health(clock_reasons=Known((reason,)), replays=Known(12)).status == "True"


@pytest.mark.parametrize("code", ["GpuLost", "GpuResetRequired"])
def test_D4_a_gpu_that_was_lost_between_two_questions_is_a_fault_told_once(code: str):
    lost = Unknown("NVML: GPU is lost (code 15)", code)
    condition = health(memory_used=lost, recovery_action=lost, vbios=lost)
    assert (condition.status, condition.message) == ("False", f"{GPU}: {lost.reason}")


def test_what_an_older_driver_does_not_tell_is_no_gap():
    unknown = Unknown("Function Not Found", "NvmlFunctionNotFound")
    assert health(remapped_rows=unknown, clock_reasons=unknown, recovery_action=unknown).status == "True"
