"""A GPU that computes for nobody: how long, and what speaks against it."""

from dataclasses import replace
from typing import Any

import pytest

from agent.core.fact import Absent, Known, Unknown
from agent.core.gpu_health import gpu_health
from agent.core.inputs import Inputs
from agent.core.model import with_gpu, with_memory
from agent.core.observation import Holder
from agent.core.resolve import resolve
from agent.core.wedged import WEDGED_AFTER, busy_alone, way_out
from tests.core.build import GPUS, type_host

GPU = GPUS[0]
NO_RESETS: Known[tuple[str, ...]] = Known(())
WEDGED: dict[str, Any] = {"utilization": Known(100), "pids": Known(()), "memory_used": Known(4)}


def host(*holders: Holder, **facts: Any) -> Inputs:
    inputs = with_gpu(type_host(), GPU, lambda gpu: replace(gpu, **{**WEDGED, **facts}))
    return replace(inputs, obs=replace(inputs.obs, holders={**inputs.obs.holders, GPU: Known(holders)}))


def test_the_time_runs_from_the_first_observation_and_ends_with_the_first_rest():
    obs = host().obs
    first = busy_alone({}, obs, 100.0)
    assert first == {GPU: 100.0}
    assert busy_alone(first, obs, 130.0) == first
    assert busy_alone(first, host(utilization=Known(99)).obs, 130.0) == {}


@pytest.mark.parametrize(
    "facts",
    [
        {"pids": Known((7,))},
        {"graphics_pids": Known((7,))},
        {"pids": Unknown("no permission")},
        {"memory_used": Known(40_000)},
        {"memory_used": Unknown("not read")},
        {"utilization": Unknown("not read")},
        {"utilization": Absent()},
    ],
)
def test_what_works_or_cannot_be_read_is_not_wedged(facts: dict[str, Any]):
    assert busy_alone({}, host(**facts).obs, 100.0) == {}


def test_a_process_that_nvml_does_not_show_speaks_against_it_and_a_watcher_does_not():
    assert busy_alone({}, host(Holder("process", "/dev/nvidia0", 7)).obs, 1.0) == {}
    for watcher in (
        Holder("persistence", "persistence mode"),
        Holder("process", "/dev/nvidia0", 8, "nvidia-persiste"),
    ):
        assert busy_alone({}, host(watcher).obs, 1.0) == {GPU: 1.0}


def test_an_observation_without_nvml_neither_starts_nor_ends_it():
    blind = replace(host().obs, nvml=Unknown("the child hung"))
    assert busy_alone({GPU: 5.0}, blind, 100.0) == {GPU: 5.0}


@pytest.mark.parametrize(("seconds", "status"), [(WEDGED_AFTER - 1, "True"), (WEDGED_AFTER, "False")])
def test_one_minute_of_it_is_a_condition(seconds: float, status: str):
    inputs = host()
    inputs = with_memory(inputs, busy_alone={GPU: inputs.now - seconds})
    condition = gpu_health(inputs, resolve(inputs))
    assert condition.status == status
    if status == "False":
        assert (condition.reason, GPU in condition.message) == ("GpuWedged", True)
        assert condition.next_step


def test_the_next_step_is_what_the_card_can_do():
    assert way_out(Known(("flr", "bus"))).startswith("reset")
    assert way_out(Unknown("not read")).startswith("reset")  # nvidia-smi says whether it can
    for none in (Absent(), NO_RESETS):
        assert way_out(none).startswith("reboot")
