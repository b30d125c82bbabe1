"""What systemd does in a target: loading unit files, starting, stopping, restarting, and what it says of a unit."""

import errno
import os
from typing import TYPE_CHECKING

from agent.core.observation import Unit
from agent.sim import services
from agent.sim.conditions import Started
from agent.sim.holding import on_nvidia, unit_pids
from agent.sim.state import LoadedUnit, TargetState, UnitEnd, UnitState, WorldState
from agent.sim.unitfile import environment_file, expand_argv, load_unit

if TYPE_CHECKING:
    from agent.sim.world import World

FOLDERS = ("/etc/systemd/system", "/usr/lib/systemd/system")
BASE_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "HOME": "/root", "LANG": "C.UTF-8"}
STOP_SECONDS = 1.0
FOUND_RUNNING = 600.0  # seconds that a unit found active has been running
START_LIMIT = 5
START_LIMIT_WINDOW = 10.0
CATCH_UP = 100  # restarts made up for in one look after a long time without one
NEVER = float("inf")
SIGKILL = 9


# -- unit files -------------------------------------------------------------------------------------------------------


def daemon_reload(target: TargetState) -> None:
    """Read every unit file and drop-in anew; what runs goes on as it was started."""
    for name in _unit_names(target):
        unit = target.units.setdefault(name, UnitState())
        texts = _texts(target, name)
        unit.loaded = load_unit(name, texts) if texts else None


def _unit_names(target: TargetState) -> list[str]:
    found = {path.rpartition("/")[2] for path in target.files if path.rpartition("/")[0] in FOLDERS}
    return sorted({name for name in found if name.endswith(".service")} | set(target.units))


def _texts(target: TargetState, name: str) -> list[str]:
    """The fragment (/etc wins) and the drop-ins by file name; none without a fragment."""
    fragments = [f"{folder}/{name}" for folder in FOLDERS if f"{folder}/{name}" in target.files]
    if not fragments:
        return []
    drop_ins = {
        path.rpartition("/")[2]: path
        for folder in reversed(FOLDERS)
        for path in target.files
        if path.startswith(f"{folder}/{name}.d/") and path.endswith(".conf")
    }
    return [target.files[path].text for path in (fragments[0], *(drop_ins[key] for key in sorted(drop_ins)))]


def settle(world: "World") -> None:
    """After a scenario's ``set``: load units that are new, and give processes to units declared active."""
    now = world.sim_now()
    for target_name, target in world.state.targets.items():
        if any(unit.loaded is None for unit in target.units.values()):
            daemon_reload(target)
        for name, unit in target.units.items():
            if unit.active_state == "active" and not unit.main_pid and unit.loaded is not None:
                _begin(world, target_name, name, now - FOUND_RUNNING, found=True)
            elif unit.active_state in ("inactive", "failed") and unit.main_pid:
                unit.main_pid, unit.gpus, unit.end = 0, [], None


def boot(world: "World") -> None:
    """After a boot: nothing of before runs, units are read anew, enabled ones start."""
    for target_name, target in world.state.targets.items():
        target.files = {
            path: file for path, file in target.files.items() if not path.startswith(("/run/", "/dev/"))
        }
        for name, unit in target.units.items():
            target.units[name] = UnitState(enabled=unit.enabled, holds=unit.holds)
        daemon_reload(target)
        for name, unit in target.units.items():
            if unit.enabled and unit.loaded is not None:
                _begin(world, target_name, name, world.sim_now())


# -- jobs -------------------------------------------------------------------------------------------------------------


def start(world: "World", target_name: str, name: str) -> None:
    unit = _loaded(world, target_name, name)
    if unit.active_state == "deactivating":
        unit.start_queued = True
    elif unit.active_state in ("inactive", "failed") or unit.restart_at is not None:
        unit.restarts = 0
        _begin(world, target_name, name, world.sim_now())


def _loaded(world: "World", target_name: str, name: str) -> UnitState:
    unit = world.state.targets[target_name].units.get(name)
    if unit is None or unit.loaded is None:
        raise _not_found(name)
    if unit.loaded.bad:
        raise OSError(errno.EINVAL, f"Unit {name} has a bad unit file setting: {unit.loaded.bad}", name)
    return unit


def _not_found(name: str) -> OSError:
    return OSError(errno.ENOENT, f"Unit {name} not found.", name)


def _begin(world: "World", target_name: str, name: str, at: float, *, found: bool = False) -> None:
    """Fork and exec: argv and environment are fixed from here on. ``found``: it runs since before the scenario."""
    target = world.state.targets[target_name]
    unit = target.units[name]
    loaded = unit.loaded
    if loaded is None:
        return
    given = bool(unit.argv) and unit.active_state == "active"  # a scenario may state what runs
    unit.restart_at, unit.end, unit.start_queued = None, None, False
    unit.hung, unit.ready, unit.server, unit.gpus, unit.load_seconds = False, False, {}, [], None
    if not given:
        env = {**BASE_ENV, **loaded.environment}
        for entry in loaded.environment_files:
            file = target.files.get(entry.removeprefix("-"))
            if file is None and not entry.startswith("-"):
                unit.active_state, unit.sub_state, unit.result = "failed", "failed", "resources"
                say(unit, at, f"{name}: Failed to load environment files: No such file or directory")
                return
            env |= environment_file(file.text) if file is not None else {}
        unit.env, unit.argv = env, expand_argv(loaded.exec_start, env)
    unit.active_state, unit.sub_state, unit.result, unit.exit_status = "active", "running", "success", 0
    unit.started_at, unit.main_pid = at, world.state.next_pid
    world.state.next_pid += 64
    if Started(unit.argv, unit.env).is_sglang:
        services.begin(world, target_name, name, unit, scripted=not found)
    elif unit.holds is not None:
        unit.gpus = [a for a in on_nvidia(world.state) if unit.holds == ["*"] or a in unit.holds]


def stop(world: "World", target_name: str, name: str) -> None:
    unit = world.state.targets[target_name].units.get(name)
    if unit is None or (unit.loaded is None and unit.active_state in ("inactive", "failed")):
        raise _not_found(name)
    unit.start_queued = False
    if unit.restart_at is not None:
        unit.restart_at, unit.active_state, unit.sub_state = None, "inactive", "dead"
        return
    if unit.active_state != "active":
        return
    now, loaded = world.sim_now(), unit.loaded or LoadedUnit()
    rule = world.faults.strike("service.stop", (target_name, name), Started(unit.argv, unit.env, unit.p2p))
    unit.active_state, unit.sub_state = "deactivating", "stop-sigterm"
    timeout = UnitEnd(at=now + loaded.stop_timeout, result="timeout", status=SIGKILL)
    if rule is not None:
        unit.end = UnitEnd(at=now + rule.delay) if rule.delay and not rule.hang else timeout
    else:
        unit.end = timeout if world.servers.terminate(target_name, name) else UnitEnd(at=now + STOP_SECONDS)
    if unit.end.at > timeout.at:
        unit.end = timeout


def kill(world: "World", target_name: str, name: str) -> None:
    """SIGKILL to the whole cgroup, and to nothing outside it. Where there is none, nothing is to be killed."""
    unit = world.state.targets[target_name].units.get(name)
    if unit is None:
        return
    unit.orphans = [orphan for orphan in unit.orphans if not orphan.in_cgroup]
    unit.orphans_after_stop = [orphan for orphan in unit.orphans_after_stop if not orphan.in_cgroup]
    if unit.main_pid:
        finish(world, target_name, name, UnitEnd(at=world.sim_now(), result="signal", status=SIGKILL))


def reset_failed(world: "World", target_name: str, name: str) -> None:
    unit = world.state.targets[target_name].units.get(name)
    if unit is not None:
        unit.restarts = 0
        if unit.active_state == "failed":
            unit.active_state, unit.sub_state, unit.result = "inactive", "dead", "success"


# -- processes that end -----------------------------------------------------------------------------------------------


def next_due(state: WorldState) -> float:
    due = NEVER
    for target in state.targets.values():
        for unit in target.units.values():
            due = min(
                due,
                unit.end.at if unit.end else NEVER,
                NEVER if unit.restart_at is None else unit.restart_at,
                _ready_at(unit),
            )
    return due


def _ready_at(unit: UnitState) -> float:
    if unit.active_state != "active" or unit.ready or unit.load_seconds is None:
        return NEVER
    return unit.started_at + unit.load_seconds


def advance(world: "World", now: float) -> None:
    for target_name, target in world.state.targets.items():
        for name in target.units:
            if (died := world.servers.take_death(target_name, name)) is not None:
                _server_died(world, target_name, name, died)
    for _ in range(CATCH_UP):
        if next_due(world.state) > now:
            return
        for target_name, target in world.state.targets.items():
            for name, unit in target.units.items():
                _step(world, target_name, name, unit, now)


def _step(world: "World", target_name: str, name: str, unit: UnitState, now: float) -> None:
    if _ready_at(unit) <= now:
        unit.ready = True
    if unit.end is not None and unit.end.at <= now:
        finish(world, target_name, name, unit.end)
    if unit.restart_at is not None and unit.restart_at <= now:
        unit.restarts += 1
        _begin(world, target_name, name, unit.restart_at)


def _server_died(world: "World", target_name: str, name: str, status: int) -> None:
    unit = world.state.targets[target_name].units[name]
    if unit.active_state == "deactivating":
        finish(world, target_name, name, UnitEnd(at=world.sim_now()))
        return
    result, code = ("signal", -status) if status < 0 else ("exit-code" if status else "success", status)
    words = [str(line) for line in unit.server.get("dying_words") or ()]
    finish(world, target_name, name, UnitEnd(at=world.sim_now(), result=result, status=code, log=words))


def finish(world: "World", target_name: str, name: str, end: UnitEnd) -> None:
    """The main process is gone: what is left of it, and whether it is started again."""
    unit = world.state.targets[target_name].units[name]
    stopping, queued = unit.active_state == "deactivating", unit.start_queued
    world.servers.end(target_name, name)
    for line in end.log:
        say(unit, end.at, line)
    unit.main_pid, unit.gpus, unit.end, unit.hung, unit.ready = 0, [], None, False, False
    unit.argv, unit.env = [], {}
    unit.orphans, unit.orphans_after_stop = [*unit.orphans, *unit.orphans_after_stop], []
    unit.result, unit.exit_status = end.result, end.status
    failed = end.result != "success"
    unit.active_state, unit.sub_state = ("failed", "failed") if failed else ("inactive", "dead")
    if queued:
        _begin(world, target_name, name, end.at)
    elif not stopping:
        _restart(unit, end, failed)


def _restart(unit: UnitState, end: UnitEnd, failed: bool) -> None:
    loaded = unit.loaded
    if loaded is None or not (loaded.restart == "always" or (loaded.restart == "on-failure" and failed)):
        return
    if unit.restarts >= START_LIMIT - 1 and loaded.restart_seconds * START_LIMIT < START_LIMIT_WINDOW:
        unit.result = "start-limit-hit"
        return
    unit.active_state, unit.sub_state = "activating", "auto-restart"
    unit.restart_at = end.at + loaded.restart_seconds


def say(unit: UnitState, at: float, text: str) -> None:
    """One line to the unit's journal, at a simulated time that may still be to come."""
    unit.log.append((at, text))
    del unit.log[:-2000]


# -- what is seen -----------------------------------------------------------------------------------------------------


def show(target: TargetState, name: str) -> Unit:
    """``systemctl show``."""
    unit = target.units.get(name)
    if unit is None or (unit.loaded is None and not unit.main_pid):
        return Unit(name, "not-found", "inactive", "dead")
    return Unit(
        name=name,
        load_state=_load_state(unit),
        active_state=unit.active_state,
        sub_state=unit.sub_state,
        main_pid=unit.main_pid,
        result=unit.result,
        exit_status=unit.exit_status,
        restarts=unit.restarts,
        pids=unit_pids(unit),
        needs_reload=_needs_reload(target, name, unit),
    )


def _load_state(unit: UnitState) -> str:
    if unit.loaded is None:
        return "not-found"  # and what was started from its file may still run
    return "bad-setting" if unit.loaded.bad else "loaded"


def _needs_reload(target: TargetState, name: str, unit: UnitState) -> bool:
    """Whether another daemon-reload would read something else than the last one did."""
    texts = _texts(target, name)
    return (load_unit(name, texts) if texts else None) != unit.loaded


def log_lines(target: TargetState, name: str, lines: int, now: float) -> tuple[str, ...]:
    unit = target.units.get(name)
    if unit is None:
        return ()
    past = [text for at, text in sorted(unit.log, key=lambda entry: entry[0]) if at <= now]
    return tuple(past[-lines:]) if lines > 0 else ()


def no_such_target(name: str) -> OSError:
    return OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH), name)
