"""systemd's part in a test: commands really run, each in a process of its own, and show in a fake tree of cgroups."""

import errno
import subprocess
from pathlib import Path

from agent.core.observation import Unit
from agent.host.manager import TransientCommand


class ProcessManager:
    """``ServiceManager`` for transient commands. Units stay loaded after their end, until another of the name starts."""

    def __init__(self, root: Path) -> None:
        self.hierarchy = root / "sys/fs/cgroup"
        self.hierarchy.mkdir(parents=True)
        (self.hierarchy / "cgroup.controllers").write_text("cpu memory\n")
        self.commands: list[TransientCommand] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.silent = False

    async def run(self, command: TransientCommand) -> None:
        self._answer()
        before = self.processes.get(command.unit)
        if before is not None and before.poll() is None:
            raise OSError(errno.EBUSY, f"{command.unit} still runs")
        self.commands.append(command)
        process = subprocess.Popen(command.argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.processes[command.unit] = process
        group = self._group(command)
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.procs").write_text(f"{process.pid}\n")

    async def unit(self, name: str) -> Unit:
        self._answer()
        process = self.processes.get(name)
        if process is None:
            return Unit(name, "not-found", "inactive", "dead")
        status = process.poll()
        if status is None:
            return Unit(name, "loaded", "activating", "start", process.pid)
        if status == 0:
            return Unit(name, "loaded", "active", "exited", result="success")
        result = "signal" if status < 0 else "exit-code"
        return Unit(name, "loaded", "failed", "failed", result=result, exit_status=abs(status))

    async def close(self) -> None:
        self.end()

    def reap(self) -> None:
        """Empty the cgroups of what has ended, as the kernel does."""
        for command in self.commands:
            if self.processes[command.unit].poll() is not None:
                (self._group(command) / "cgroup.procs").write_text("")

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    async def reload(self) -> None:
        self._answer()

    async def start(self, name: str) -> None:
        raise OSError(errno.ENOENT, f"no unit {name}")

    async def stop(self, name: str) -> None:
        raise OSError(errno.ENOENT, f"no unit {name}")

    async def kill(self, name: str) -> None:
        raise OSError(errno.ENOENT, f"no unit {name}")

    async def reset_failed(self, name: str) -> None:
        self.processes.pop(name, None)

    def _group(self, command: TransientCommand) -> Path:
        """A slice's dashes are levels in the tree (systemd.slice(5))."""
        words = command.properties.get("Slice", "system.slice").removesuffix(".slice").split("-")
        levels = ["-".join(words[:n]) + ".slice" for n in range(1, len(words) + 1)]
        return self.hierarchy.joinpath(*levels, command.unit)

    def _answer(self) -> None:
        if self.silent:
            raise TimeoutError("systemd does not answer")
