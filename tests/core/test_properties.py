"""What must hold of every plan, for generated specs and hosts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.core.fact import Absent, Known
from agent.core.inputs import Inputs
from agent.core.laws import check_plan
from agent.core.observation import Pci
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage, render_plan
from agent.core.resolve import Resolved, resolve
from agent.core.spec import target_name
from agent.kind import converge, plan_all, trajectory
from agent.kinds import ALL
from tests.core.worlds import World, worlds


def plan(inputs: Inputs) -> Plan:
    return plan_all(ALL, inputs)


def shuffled(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    return dict(reversed(list(mapping.items())))


def reordered(inputs: Inputs) -> Inputs:
    """Equal inputs whose every mapping was filled in another order."""
    obs, memory, spec = inputs.obs, inputs.memory, inputs.spec
    if isinstance(obs.pci, Known):
        pci = obs.pci.value
        obs = replace(obs, pci=Known(Pci(shuffled(pci.functions), shuffled(pci.groups), pci.pending_unbinds)))
    if isinstance(obs.nvml, Known):
        obs = replace(obs, nvml=Known(replace(obs.nvml.value, gpus=shuffled(obs.nvml.value.gpus))))
    obs = replace(
        obs, holders=shuffled(obs.holders), services=shuffled(obs.services), targets=shuffled(obs.targets),
        host_files=shuffled(obs.host_files),
    )  # fmt: skip
    fields = {k: shuffled(v) for k, v in memory if isinstance(v, dict)}
    sections = {"gpus": shuffled(spec.gpus), "services": shuffled(spec.services)}
    host = inputs.host.model_copy(update={"spec": spec.model_copy(update=sections)})
    return replace(inputs, host=host, obs=obs, memory=memory.model_copy(update=fields))


@given(worlds())
def test_the_same_inputs_give_the_same_plan_byte_for_byte(world: World) -> None:
    first = render_plan(plan(world.inputs))
    assert render_plan(plan(world.inputs)) == first
    assert render_plan(plan(reordered(world.inputs))) == first


@given(worlds())
def test_no_plan_breaks_a_law(world: World) -> None:
    made = plan(world.inputs)
    assert check_plan(made, world.inputs, trajectory(ALL, made, world.inputs)) == []


@given(worlds())
def test_a_carried_out_plan_leads_to_no_actions_and_only_refused_drift(world: World) -> None:
    end, last = converge(ALL, world.inputs)
    assert not last.actions, render_plan(last)
    unexplained = [d for d in last.drifts if not any(explains(r, d, resolve(end)) for r in last.refusals)]
    assert not unexplained, render_plan(last)


def explains(refusal: Refusal, drift: Drift, resolved: Resolved) -> bool:
    """The refusal is about what differs: the same target, the card of the function, the GPUs of the service."""
    if refusal.kind != drift.kind:
        return False
    about = {drift.target, drift.field, drift.target[:-1] + "0"}
    about |= {name for name, s in resolved.services.items() if ",".join(s.gpus) == drift.target}
    return refusal.target in about


@given(worlds())
def test_every_plan_on_the_way_is_lawful_and_the_way_has_an_end(world: World) -> None:
    inputs = world.inputs
    for _ in range(12):
        made = plan(inputs)
        if not made.actions:
            return
        assert check_plan(made, inputs, trajectory(ALL, made, inputs)) == []
        for state, action in trajectory(ALL, made, inputs):
            inputs = next(k for k in ALL if k.name == action.kind).predict(action, state)
        inputs = replace(inputs, now=inputs.now + 1)
    raise AssertionError(render_plan(plan(inputs)))


@given(worlds())
def test_nothing_outside_the_spec_is_touched(world: World) -> None:
    """By the generator's own knowledge of which card stands where, not by the code's selection."""
    spec, memory = world.inputs.spec, world.inputs.memory
    units = {s.unit for s in spec.services.values()} | {*spec.policy.quiesce, *memory.stopped_units}
    held_by_services = {a for a, f in world.inputs.obs.holders.items() if isinstance(f, Known) and f.value}
    for action in plan(world.inputs).actions:
        for touched in {
            *action.touches,
            *(action.params if action.verb in {"bind", "mend-override"} else ()),
        }:
            if action.kind == "service" and touched in held_by_services:
                continue  # a service that stops lets go of everything it holds
            assert touched in units or world.driver_at(touched), action


@given(worlds())
def test_every_card_is_bound_to_the_driver_that_the_spec_wants_for_that_card(world: World) -> None:
    for action in plan(world.inputs).actions:
        if action.verb == "bind":
            for function, driver in action.params.items():
                wanted = world.driver_at(function)
                assert wanted, (function, driver)
                assert (driver == "vfio-pci") == (wanted == "vfio-pci"), (function, driver)


@given(worlds())
def test_a_plan_never_stops_a_service_or_unit_that_it_does_not_start_again(world: World) -> None:
    starts_again_what_it_stops(plan(world.inputs).actions, world.inputs)


def runs_what_was_rejected(name: str, inputs: Inputs) -> bool:
    """The one service that is stopped for good: its revision was rejected, and there is none to go back to."""
    service = resolve(inputs).services[name]
    return (
        name in inputs.memory.rejected
        and service.effective is None
        and any(r.reason == "RevisionRejected" for r in service.refusals)
    )


def starts_again_what_it_stops(actions: Sequence[Action], inputs: Inputs) -> None:
    index = {a.key: n for n, a in enumerate(actions)}
    for number, action in enumerate(actions):
        if action.key.startswith("service/stop/") and runs_what_was_rejected(action.target, inputs):
            assert f"service/trial/{action.target}" not in index
            assert f"service/preflight/{action.target}" not in index
        elif action.key.startswith("service/stop/"):
            assert index.get(f"service/trial/{action.target}", -1) > number
            assert index.get(f"service/preflight/{action.target}", len(actions)) < number
        if action.verb == "quiesce":
            assert index.get(f"driver-binding/restore-unit/{action.target}", -1) > number
            assert any(a.verb == "bind" for a in actions), (
                "a unit is stopped for a driver change and for nothing else"
            )
        if action.verb == "persistence-off":
            assert index.get(f"driver-binding/bind/{action.target}", -1) > number


@given(worlds())
def test_units_that_were_stopped_come_back_after_the_last_driver_change_and_once(world: World) -> None:
    made = plan(world.inputs)
    binds = [n for n, a in enumerate(made.actions) if a.verb == "bind"]
    for unit in world.inputs.memory.stopped_units:
        key = f"driver-binding/restore-unit/{unit}"
        found = [n for n, a in enumerate(made.actions) if a.key == key]
        waiting = key in {*world.inputs.memory.terminal, *world.inputs.memory.retry_after}
        assert len(found) == (not waiting)
        assert all(n > b for n in found for b in binds)


@given(worlds())
def test_nobody_loses_a_device_that_the_plan_did_not_take_from_him_in_order(world: World) -> None:
    """Law 1 by another reading than the law's own: who held the function, and is he gone before?"""
    obs, gone = world.inputs.obs, set[str]()
    services = {f"{s.unit}@{target_name(s.target)}" for s in world.inputs.spec.services.values()}
    for action in plan(world.inputs).actions:
        if action.verb == "stop":
            service = world.inputs.spec.services[action.target]
            gone.add(f"{service.unit}@{target_name(service.target)}")
        gone |= {f"{action.target}@host"} if action.verb == "quiesce" else set()
        gone |= {f"persistence@{action.target}"} if action.verb == "persistence-off" else set()
        for address in action.params if action.verb == "bind" else ():
            function = obs.function(address)
            assert function is not None
            if isinstance(function.driver, Absent) and address not in obs.holders:
                continue
            fact = obs.holders_of(address)
            assert isinstance(fact, Known), action
            for holder in fact.value:
                who = f"{holder.unit}@{f'lxc:{holder.container}' if holder.container else 'host'}"
                assert who in gone or (holder.kind == "persistence" and f"persistence@{action.target}" in gone), (
                    action, holder, services,
                )  # fmt: skip


@given(worlds())
def test_a_service_starts_only_on_gpus_that_are_then_on_nvidia_and_left_by_other_services(
    world: World,
) -> None:
    made = plan(world.inputs)
    for state, action in trajectory(ALL, made, world.inputs):
        if action.key.startswith("service/trial/"):
            service = resolve(state).services[action.target]
            for gpu in service.effective.gpus if service.effective else ():
                function = state.obs.function(gpu)
                assert function is not None
                assert function.driver == Known("nvidia"), (gpu, action)
                assert (
                    gpu not in state.memory.quarantine
                    or state.memory.quarantine[gpu].boot_id == "another boot"
                )


@given(worlds())
def test_a_self_test_runs_only_on_gpus_that_are_then_on_nvidia(world: World) -> None:
    made = plan(world.inputs)
    for state, action in trajectory(ALL, made, world.inputs):
        if action.verb == "selftest":
            for gpu in action.params["gpus"].split(","):
                function = state.obs.function(gpu)
                assert function is not None
                assert function.driver == Known("nvidia")


@given(worlds())
def test_required_p2p_is_never_started_without_a_good_verdict_or_a_test_before_it(world: World) -> None:
    actions = plan(world.inputs).actions
    resolved = resolve(world.inputs)
    for action in actions:
        if action.key.startswith("service/trial/"):
            service = resolved.services[action.target]
            if service.service.p2p == "required" and len(service.gpus) > 1 and not service.p2p.on:
                tests = [
                    a for a in actions if a.verb == "selftest" and a.params["gpus"] == ",".join(service.gpus)
                ]
                assert tests and tests[0].stage < Stage.START


@given(worlds())
def test_every_condition_can_be_said_once_and_the_unknown_is_never_true(world: World) -> None:
    resolved, made = resolve(world.inputs), plan(world.inputs)
    found = [c for kind in ALL for c in kind.conditions(world.inputs, resolved, made)]
    assert len({c.type for c in found}) == len(found)
    truth = {c.type: c.status for c in found}
    if made.actions:
        assert (
            "False" in truth.values()
            or "Unknown" in truth.values()
            or all(a.disruption <= Disruption.LIVE for a in made.actions)
        )
    for drift in made.drifts:
        if drift.kind == "driver-binding" and drift.field == "driver":
            assert truth["DriversBound"] != "True"


@given(worlds(most=3), st.data())
def test_an_action_that_must_wait_takes_its_whole_set_with_it(world: World, data: st.DataObject) -> None:
    """Whatever waits, what is left is a lawful plan of whole sets."""
    actions = plan(world.inputs).actions
    if not actions:
        return
    action: Action = data.draw(st.sampled_from(actions))
    memory = world.inputs.memory.model_copy(update={"retry_after": {action.key: world.inputs.now + 60}})
    waiting = replace(world.inputs, memory=memory)
    left = plan(waiting)
    assert action.key not in {a.key for a in left.actions}
    # A self-test that waits is an obstacle to testing; everything else that waits says Backoff, and only that.
    reasons = {"Backoff", "NotTestable"} if action.key.startswith("p2p/selftest/") else {"Backoff"}
    assert any(r.reason in reasons and "tried again in" in r.message for r in left.refusals)
    assert check_plan(left, waiting, trajectory(ALL, left, waiting)) == []
    starts_again_what_it_stops(left.actions, waiting)
