"""Every plan has a golden case: inputs under ``cases``, the expected text under ``golden/KIND/CASE.txt``.

After a wanted change run the tests once with UPDATE_GOLDEN=1 and read the difference.
"""

import os
from pathlib import Path

import pytest

from agent.core.inputs import Inputs
from agent.core.laws import check_plan
from agent.core.plan import render_plan
from agent.kind import plan_all, trajectory
from agent.kinds import ALL
from tests.core.cases import driver_binding, gpu_settings, p2p, platform, service

GOLDEN = Path(__file__).parent / "golden"
KINDS: dict[str, dict[str, Inputs]] = {
    "driver-binding": driver_binding.CASES,
    "gpu-settings": gpu_settings.CASES,
    "p2p": p2p.CASES,
    "platform": platform.CASES,
    "service": service.CASES,
}
EVERY = [(kind, name) for kind, cases in KINDS.items() for name in cases]


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=[f"{kind}/{name}" for kind, name in EVERY])
def test_the_plan_is_as_written(kind: str, name: str) -> None:
    inputs = KINDS[kind][name]
    plan = plan_all(ALL, inputs)
    assert check_plan(plan, inputs, trajectory(ALL, plan, inputs)) == []
    file = GOLDEN / kind / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(render_plan(plan))
    assert render_plan(plan) == file.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {(f.parent.name, f.stem) for f in GOLDEN.glob("*/*.txt")} == set(EVERY)


@pytest.mark.parametrize("kind", KINDS)
def test_the_empty_plan_is_among_the_cases_of_every_kind(kind: str) -> None:
    assert "nothing to do" in (GOLDEN / kind / "nothing-to-do.txt").read_text()
