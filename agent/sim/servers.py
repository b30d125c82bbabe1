"""The HTTP servers of running services: child processes of whoever looks at the host, one per service.

A child dies with its parent; the simulated service does not. Another process that loads the same state starts its
own child when it first needs one, with as much loading left as the simulated time says.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.sim import services
from agent.sim.conditions import Started
from agent.sim.state import UnitState

if TYPE_CHECKING:
    from agent.sim.world import World

PROGRAM = Path(__file__).with_name("server.py")
START_SECONDS = 10.0  # real seconds that a child may take to answer
END_SECONDS = 5.0  # real seconds that a killed child may take to go

Key = tuple[str, str]  # target, unit


class Child:
    """One server process, and the simulated main process that it stands for."""

    def __init__(self, process: "subprocess.Popen[bytes]", main_pid: int, url: str, config: Path) -> None:
        self.process = process
        self.main_pid = main_pid
        self.url = url
        self.config = config


class Servers:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._children: dict[Key, Child] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._dead_ends: dict[bool, socket.socket] = {}

    def url(self, target_name: str, port: int) -> str:
        """Where that port of the target answers; an address that refuses connections when nothing has it."""
        target = self._world.state.targets.get(target_name)
        for name, unit in target.units.items() if target is not None else ():
            if unit.active_state in ("active", "deactivating") and unit.argv and unit.holds is None:
                started = Started(unit.argv, unit.env)
                child = self._child((target_name, name), unit) if started.port == port else None
                if child is not None:
                    return child.url
        orphans = [o for unit in target.units.values() for o in unit.orphans] if target is not None else []
        return self._dead_end(taken=any(orphan.port == port for orphan in orphans))

    def _dead_end(self, *, taken: bool) -> str:
        """An address that refuses connections, or one of an orphan that has the port and never answers."""
        end = self._dead_ends.get(taken)
        if end is None:
            end = self._dead_ends[taken] = socket.socket()
            end.bind(("127.0.0.1", 0))
            if taken:
                end.listen(64)
        return f"http://127.0.0.1:{end.getsockname()[1]}"

    def _child(self, key: Key, unit: UnitState) -> Child | None:
        child = self._children.get(key)
        if child is not None and child.main_pid == unit.main_pid:
            return child
        serves = unit.active_state == "active" and unit.load_seconds is not None and unit.end is None
        return self._start(key, unit) if serves else None

    def look(self, target_name: str, name: str) -> None:
        """Make sure that an active service of this name has its server."""
        target = self._world.state.targets.get(target_name)
        unit = target.units.get(name) if target is not None else None
        if unit is not None and unit.holds is None and unit.argv:
            self._child((target_name, name), unit)

    def _start(self, key: Key, unit: UnitState) -> Child:
        self.end(*key)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="simulated-host-")
        config = Path(self._folder.name) / f"{len(self._children)}-{unit.main_pid}.json"
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener_port = listener.getsockname()[1]
            url = f"http://127.0.0.1:{listener_port}"
            settings = self._config(key, unit)
            _write(config, {**settings, "fd": listener.fileno()})
            if settings["load_seconds"] == 0.0:
                # It has been serving all along as far as the host knows: whoever connects waits for the child,
                # and is not refused.
                listener.listen(1024)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM), str(config)],
                pass_fds=(listener.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        child = Child(process, unit.main_pid, url, config)
        self._children[key] = child
        if settings["load_seconds"] == 0.0:
            _wait_until_it_answers(listener_port)
        return child

    def _config(self, key: Key, unit: UnitState) -> dict[str, Any]:
        world, serving, own = self._world, self._world.profile.serving, unit.server
        target = world.state.targets[key[0]]
        started = Started(unit.argv, unit.env)
        model = started.flag("model-path", "model") or ""
        load = unit.load_seconds or 0.0
        return {
            "parent_pid": os.getpid(),
            "time_factor": world.state.factor,
            "load_seconds": max(0.0, unit.started_at + load - world.sim_now()),
            "served_model": started.flag("served-model-name") or model,
            "model_path": model,
            "version": own.get("version") or target.sglang_version or "",
            "argv": list(unit.argv),
            "max_total_tokens": own.get("max_total_tokens", serving.max_total_tokens),
            "speeds": services.speeds(world, unit),
            "factor": own.get("factor", 1.0),
            "ttft_seconds": own.get("ttft_seconds", serving.ttft_seconds),
            "answers": own.get("answers", [a.model_dump() for a in serving.answers]),
            "default_answer": own.get("default_answer", serving.default_answer),
            "chunk_seconds": serving.chunk_seconds,
            "drain_seconds": own.get("drain_seconds", serving.drain_seconds),
            "sigterm": own.get("sigterm", "drain"),
            "faults": {
                name: own[name] for name in ("health", "answer", "after_requests", "requests") if name in own
            },
            "server_info": own.get("server_info", {}),
        }

    def rewrite(self) -> None:
        """Tell running servers what a scenario has changed about them."""
        for key, child in self._children.items():
            unit = self._world.state.targets[key[0]].units[key[1]]
            if child.main_pid == unit.main_pid:
                before = json.loads(child.config.read_text(encoding="utf-8"))
                _write(child.config, {**before, **self._config(key, unit)})

    # -- ends -------------------------------------------------------------------------------------------------------

    def any_died(self) -> bool:
        return any(child.process.poll() is not None for child in self._children.values())

    def take_death(self, target_name: str, name: str) -> int | None:
        """The exit status of a unit's server that has ended by itself since last asked."""
        key = (target_name, name)
        child = self._children.get(key)
        if child is None or child.process.poll() is None:
            return None
        del self._children[key]
        unit = self._world.state.targets[target_name].units[name]
        return child.process.returncode if child.main_pid == unit.main_pid else None

    def terminate(self, target_name: str, name: str) -> bool:
        """SIGTERM to a unit's server. False when it has none here."""
        child = self._children.get((target_name, name))
        if child is None:
            return False
        child.process.send_signal(signal.SIGTERM)
        return True

    def end(self, target_name: str, name: str) -> None:
        """SIGKILL to a unit's server, if it has one here."""
        child = self._children.pop((target_name, name), None)
        if child is not None:
            child.process.kill()
            child.process.wait(END_SECONDS)

    def end_strays(self) -> None:
        """End servers whose service another process has stopped or started anew meanwhile."""
        for key, child in list(self._children.items()):
            target = self._world.state.targets.get(key[0])
            unit = target.units.get(key[1]) if target is not None else None
            if unit is None or unit.main_pid != child.main_pid:
                self.end(*key)

    def close(self) -> None:
        for key in list(self._children):
            self.end(*key)
        while self._dead_ends:
            self._dead_ends.popitem()[1].close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _wait_until_it_answers(port: int) -> None:
    """Real seconds that this machine takes to start a process must not pass as the simulated server's slowness."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/v1/models")
        connection.getresponse().read()


def _write(path: Path, config: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(config), encoding="utf-8")
    with contextlib.suppress(FileNotFoundError):
        before = path.stat().st_mtime_ns
        status = temporary.stat()
        if status.st_mtime_ns <= before:
            os.utime(temporary, ns=(before + 1_000_000, before + 1_000_000))
    temporary.replace(path)
