"""The target port of a simulated host: the host itself, its containers, machines reached by ssh."""

import errno
import os
from collections.abc import Mapping

from agent.core.fact import Absent, Known
from agent.core.observation import Process, TargetFacts, Unit
from agent.sim import systemd
from agent.sim.facts import known, patched
from agent.sim.holding import device_nodes
from agent.sim.nvml_codes import unknown_of
from agent.sim.scenario import Fault
from agent.sim.state import FileState, TargetState
from agent.sim.world import World


class SimTarget:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    async def _enter(self, call: str, item: str = "", *, write: bool = False) -> Fault | None:
        about = (self._name, item) if item else (self._name,)
        fault = await self._world.enter(f"target.{call}", *about, write=" ".join(about) if write else "")
        if call != "facts":
            self._state()
        return fault

    def _state(self) -> TargetState:
        target = self._world.state.targets.get(self._name)
        if target is None or not target.reachable:
            raise systemd.no_such_target(self._name)
        return target

    async def facts(self) -> TargetFacts:
        fault = await self._enter("facts")
        target = self._world.state.targets.get(self._name)
        if target is None or not target.reachable:
            there = Absent(f"there is no {self._name}") if target is None else Known(value=False)
            return TargetFacts(reachable=there)
        facts = self._facts(target)
        return patched(facts, fault.value) if fault is not None and fault.value else facts

    def _facts(self, target: TargetState) -> TargetFacts:
        state = self._world.state
        code = target.nvml_code or (18 if target.user_driver not in (None, state.driver_version) else 0)
        return TargetFacts(
            reachable=Known(value=True),
            user_driver=known(target.user_driver),
            nvml=unknown_of(code) if code else Known("ok"),
            shm_bytes=known(target.shm_bytes),
            device_nodes=Known(device_nodes(state, target)),
            sglang_version=known(target.sglang_version),
        )

    # -- units ------------------------------------------------------------------------------------------------------

    async def unit(self, name: str) -> Unit:
        fault = await self._enter("unit", name)
        self._world.servers.look(self._name, name)
        seen = systemd.show(self._state(), name)
        return patched(seen, fault.value) if fault is not None and fault.value else seen

    async def process(self, pid: int) -> Process | None:
        await self._enter("process", str(pid))
        for unit in self._state().units.values():
            if unit.main_pid == pid:
                return Process(pid, tuple(unit.argv), dict(unit.env))
        return None

    async def daemon_reload(self) -> None:
        fault = await self._enter("daemon_reload", write=True)
        if fault is None or not fault.succeed_without_effect:
            with self._world.change():
                systemd.daemon_reload(self._state())

    async def start_unit(self, name: str) -> None:
        fault = await self._enter("start_unit", name, write=True)
        if fault is None or not fault.succeed_without_effect:
            with self._world.change():
                systemd.start(self._world, self._name, name)
            self._world.servers.look(self._name, name)

    async def stop_unit(self, name: str) -> None:
        fault = await self._enter("stop_unit", name, write=True)
        if fault is None or not fault.succeed_without_effect:
            with self._world.change():
                systemd.stop(self._world, self._name, name)

    async def kill_unit(self, name: str) -> None:
        fault = await self._enter("kill_unit", name, write=True)
        if fault is None or not fault.succeed_without_effect:
            with self._world.change():
                systemd.kill(self._world, self._name, name)

    async def reset_failed(self, name: str) -> None:
        fault = await self._enter("reset_failed", name, write=True)
        if fault is None or not fault.succeed_without_effect:
            with self._world.change():
                systemd.reset_failed(self._world, self._name, name)

    async def unit_log(self, name: str, lines: int) -> tuple[str, ...]:
        await self._enter("unit_log", name)
        return systemd.log_lines(self._state(), name, lines, self._world.sim_now())

    def endpoint(self, port: int) -> str:
        self._world.tick()
        return self._world.servers.url(self._name, port)

    # -- files ------------------------------------------------------------------------------------------------------

    async def exists(self, path: str) -> bool:
        fault = await self._enter("exists", path)
        if fault is not None and fault.absent is not None:
            return False
        target = self._state()
        places = (*target.paths, *target.files, *device_nodes(self._world.state, target))
        return any(place == path or place.startswith(path.rstrip("/") + "/") for place in places)

    async def read_file(self, path: str) -> str | None:
        await self._enter("read_file", path)
        file = self._state().files.get(path)
        return file.text if file is not None else None

    async def write_file(self, path: str, text: str) -> None:
        fault = await self._enter("write_file", path, write=True)
        if fault is None or not fault.succeed_without_effect:
            with self._world.change():
                self._state().files[path] = FileState(text=text)

    async def remove_file(self, path: str) -> None:
        fault = await self._enter("remove_file", path, write=True)
        if fault is None or not fault.succeed_without_effect:
            with self._world.change():
                self._state().files.pop(path, None)

    async def install_secrets(self, path: str, secrets: Mapping[str, str]) -> None:
        fault = await self._enter("install_secrets", path, write=True)
        files = self._state().files
        lines = []
        for variable, source in secrets.items():
            if source not in files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
            value = files[source].text.rstrip("\r\n")
            if "\n" in value or "\r" in value:
                raise OSError(errno.EINVAL, "the secret has more than one line; expected one", source)
            lines.append(f"{variable}={value}\n")
        if fault is None or not fault.succeed_without_effect:
            with self._world.change():
                self._state().files[path] = FileState(text="".join(lines), mode=0o600)
