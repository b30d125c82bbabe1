"""The scenario's events: what happens by itself, at a time or after a number of port calls."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agent.sim import kernel, systemd
from agent.sim.initial import renumber
from agent.sim.merge import patched
from agent.sim.scenario import CALLS, Do, Event, LogEntry, SpecEdit, UnitDies
from agent.sim.state import UnitEnd
from agent.sim.yaml_text import ScenarioError

if TYPE_CHECKING:
    from agent.sim.world import World

NEVER = float("inf")


def count_call(world: "World", call: str) -> None:
    """Count a call that some event waits for; others cost nothing."""
    waiting = [
        e for i, e in enumerate(world.scenario.events) if call in e.after_calls and not _done(world, i)
    ]
    if waiting and call in CALLS:
        with world.change() as state:
            state.calls[call] = state.calls.get(call, 0) + 1
            _arm(world)


def _arm(world: "World") -> None:
    """Events whose calls have all been made begin to count their time."""
    for index, event in enumerate(world.scenario.events):
        reached = all(world.state.calls.get(call, 0) >= count for call, count in event.after_calls.items())
        if event.after_calls and reached and index not in world.state.events_armed:
            world.state.events_armed[index] = world.sim_now()


def _done(world: "World", index: int) -> bool:
    return index in world.state.events_done


def _time_of(world: "World", index: int, event: Event) -> float:
    if _done(world, index):
        return NEVER
    if not event.after_calls:
        return event.at
    return world.state.events_armed.get(index, NEVER) + event.at


def next_due(world: "World") -> float:
    return min((_time_of(world, i, e) for i, e in enumerate(world.scenario.events)), default=NEVER)


def pending(world: "World") -> bool:
    return any(not _done(world, index) for index in range(len(world.scenario.events)))


def run_due(world: "World", now: float) -> None:
    for index, event in enumerate(world.scenario.events):
        if _time_of(world, index, event) <= now:
            world.state.events_done.append(index)
            _do(world, event.do)


def _do(world: "World", do: Do) -> None:
    for entry in do.log if isinstance(do.log, tuple) else (do.log,) if do.log else ():
        line = entry if isinstance(entry, LogEntry) else LogEntry(text=entry)
        world.log(line.text, line.repeat)
    if do.reboot is not None:
        world.state = kernel.reboot(world, do.reboot, do.renumber or {})
        systemd.boot(world)
        apply_set(world, do.reboot.set)
    apply_set(world, do.set or {})
    if do.renumber and do.reboot is None:
        renumber(world.state, do.renumber)
    for address in do.rescan or ():
        kernel.rescan(world, address)
    if do.unit_dies is not None:
        _unit_dies(world, do.unit_dies)
    _do_to_services(world, do)


def _do_to_services(world: "World", do: Do) -> None:
    if do.server is not None:
        for target in world.state.targets.values():
            for unit in target.units.values():
                if unit.active_state == "active" and unit.holds is None:
                    unit.server = {**unit.server, **do.server.changes()}
        world.servers.rewrite()
    if do.fault is not None:
        world.state.added_faults.append(do.fault.model_dump(mode="json", exclude_none=True, by_alias=True))
    if do.vm_start is not None:
        kernel.vm_start(world, _vm(world, do.vm_start))
    if do.vm_stop is not None:
        kernel.vm_stop(world, _vm(world, do.vm_stop))
    for edit in do.edit_spec if isinstance(do.edit_spec, tuple) else (do.edit_spec,) if do.edit_spec else ():
        _edit_spec(world, edit)


def apply_set(world: "World", values: Mapping[str, Any]) -> None:
    if values:
        world.state = patched(world.state, values, "scenario event")
        systemd.settle(world)


def _vm(world: "World", name: str) -> str:
    if name not in world.state.vms:
        raise ScenarioError(
            (f"scenario event: no VM is called {name!r}; there are: {', '.join(world.state.vms)}",)
        )
    return name


def _unit_dies(world: "World", what: UnitDies) -> None:
    for target_name, target in world.state.targets.items():
        if what.target in (None, target_name) and what.unit in target.units:
            result, status = ("signal", what.signal) if what.signal else ("exit-code", what.status)
            end = UnitEnd(at=world.sim_now(), result=result, status=status, log=list(what.log))
            systemd.finish(world, target_name, what.unit, end)


def _edit_spec(world: "World", edit: SpecEdit) -> None:
    """Where the spec lies is the caller's knowledge; without a listener the edit is only counted."""
    world.state.spec_edits += 1
    if world.edit_spec is not None:
        world.edit_spec(edit)
