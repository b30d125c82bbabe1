"""Law 9 from the other side: Unknown is not broken. What cannot be read takes nothing away from anybody."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from agent.core.fact import Absent, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.observation import Observation
from agent.core.plan import Disruption, render_plan
from agent.core.resolve import resolve
from agent.kind import plan_all
from agent.kinds import ALL
from tests.core.build import type_host
from tests.core.verdicts import converged

LOST = Unknown("it did not answer within 15 s", "Timeout")
WORLDS = {"P2P off": converged(), "P2P on": converged(result="good"), "as found": type_host()}


def one_unknown(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every variant of this data in which one fact is Unknown, with the path of that fact."""
    if isinstance(value, Known | Absent):
        yield path, LOST
        if isinstance(value, Known):
            yield from ((p, Known(v)) for p, v in one_unknown(value.value, path))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from ((p, {**value, key: v}) for p, v in one_unknown(inner, f"{path}[{key}]"))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            inner = getattr(value, field.name)
            yield from (
                (p, replace(value, **{field.name: v})) for p, v in one_unknown(inner, f"{path}.{field.name}")
            )


def variants(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    obs: Observation
    for path, obs in one_unknown(inputs.obs):
        yield path, replace(inputs, obs=obs)


@pytest.mark.parametrize("name", ["P2P off", "P2P on"])
def test_no_single_unknown_fact_disturbs_a_converged_host(name: str) -> None:
    seen = 0
    for path, inputs in variants(WORLDS[name]):
        plan = plan_all(ALL, inputs)
        assert plan.disruption is Disruption.NONE, f"{path}\n{render_plan(plan)}"
        assert not plan.actions, f"{path}\n{render_plan(plan)}"
        seen += 1
    assert seen > 300


def test_a_gpu_is_moved_only_while_its_own_facts_are_known() -> None:
    """On the host as found: with any fact about a moving function unknown, that card stays where it is."""
    moving = ("81", "91", "e1", "f1")
    relevant = (
        ".driver",
        ".driver_override",
        ".iommu_group",
        ".boot_vga",
        ".virtual_functions",
        "persistence_mode",
    )
    for path, inputs in variants(WORLDS["as found"]):
        bus = next((b for b in moving if f"[0000:{b}:00." in path), "")
        if not bus or not (path.endswith(relevant) or ".holders[" in path):
            continue
        targets = {a.target for a in plan_all(ALL, inputs).actions if a.verb == "bind"}
        assert f"0000:{bus}:00.0" not in targets, path


def test_every_unknown_is_told_somewhere_in_the_plan_or_the_conditions_stay_away_from_true() -> None:
    clean = WORLDS["P2P off"]
    quiet = {c.type: c.status for k in ALL for c in k.conditions(clean, resolve(clean), plan_all(ALL, clean))}
    for path, inputs in variants(clean):
        if not path.startswith((".pci", ".services")) or path.endswith((".health", "numa_node", "serial")):
            continue
        if not any(w in path for w in ("driver", "unit", "process", "files", "0].iommu_group")):
            continue
        resolved, plan = resolve(inputs), plan_all(ALL, inputs)
        now = {c.type: c.status for k in ALL for c in k.conditions(inputs, resolved, plan)}
        if "[0000:41" in path or ":01.1]" in path:
            continue  # not the spec's business
        assert plan.refusals or now != quiet, path
