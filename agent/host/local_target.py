"""The host itself as a place where services run, and the places that this version cannot look into."""

import asyncio
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import Process, TargetFacts, Unit
from agent.host.command import run_command
from agent.host.nvidia_version import library_version
from agent.host.reading import names_in, unreadable
from agent.host.refusal import refuse
from agent.host.systemctl_show import show_unit
from agent.ports import NvmlPort

_JOURNAL_DEADLINE = 20.0
_MAX_FILE = 4 << 20
_SGLANG = Unknown("the SGLang version is its interpreter's to tell, and was not asked for", "NotObserved")


class ReadOnlyTarget:
    """The writes of a target, none of which this version does."""

    name = ""

    async def write_file(self, path: str, text: str) -> None:  # noqa: ARG002 - the port's signature
        refuse(f"writing {path} in {self.name}")

    async def remove_file(self, path: str) -> None:
        refuse(f"removing {path} in {self.name}")

    async def install_secrets(self, path: str, secrets: Mapping[str, str]) -> None:  # noqa: ARG002 - likewise
        refuse(f"writing secrets to {path} in {self.name}")

    async def daemon_reload(self) -> None:
        refuse(f"systemctl daemon-reload in {self.name}")

    async def start_unit(self, name: str) -> None:
        refuse(f"starting {name} in {self.name}")

    async def stop_unit(self, name: str) -> None:
        refuse(f"stopping {name} in {self.name}")

    async def kill_unit(self, name: str) -> None:
        refuse(f"killing {name} in {self.name}")

    async def reset_failed(self, name: str) -> None:
        refuse(f"resetting the failed state of {name} in {self.name}")


class LocalTarget(ReadOnlyTarget):
    """``TargetPort`` for ``host``. With ``nvml`` its answer is also what NVML says from inside."""

    name = "host"

    def __init__(self, root: Path = Path("/"), nvml: NvmlPort | None = None) -> None:
        self._root = root
        self._nvml = nvml

    async def facts(self) -> TargetFacts:
        local, nvml = await asyncio.gather(asyncio.to_thread(self._read), self._nvml_fact())
        user_driver, shm, nodes = local
        return TargetFacts(
            reachable=Known(value=True),
            user_driver=user_driver,
            nvml=nvml,
            shm_bytes=shm,
            device_nodes=nodes,
            sglang_version=_SGLANG,
        )

    async def unit(self, name: str) -> Unit:
        return await show_unit(name, self._root)

    async def process(self, pid: int) -> Process | None:
        """None: no such process, or only a zombie of it. Raises PermissionError for another user's environment."""
        return await asyncio.to_thread(read_process, self._root / "proc" / str(pid), pid)

    async def exists(self, path: str) -> bool:
        return await asyncio.to_thread(_exists, self._at(path))

    async def read_file(self, path: str) -> str | None:
        return await asyncio.to_thread(_read_bounded, self._at(path))

    async def unit_log(self, name: str, lines: int) -> tuple[str, ...]:
        argv = ("journalctl", "--no-pager", "--output=cat", f"--lines={lines}", f"--unit={name}")
        done = await run_command(argv, _JOURNAL_DEADLINE)
        if done.status != 0:
            raise OSError(f"journalctl for {name}: {done.stderr.strip()[:200] or f'status {done.status}'}")
        return tuple(done.stdout.splitlines()[-lines:])

    def endpoint(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _read(self) -> tuple[Fact[str], Fact[int], Fact[tuple[str, ...]]]:
        return library_version(self._root), _shm_bytes(self._root / "dev/shm"), self._device_nodes()

    def _device_nodes(self) -> Fact[tuple[str, ...]]:
        dev = self._root / "dev"
        try:
            names = names_in(dev)
        except OSError as error:
            return unreadable(dev, error)
        return Known(tuple(f"/dev/{n}" for n in names if n.startswith("nvidia") and not (dev / n).is_dir()))

    async def _nvml_fact(self) -> Fact[str]:
        if self._nvml is None:
            return Unknown("NVML was not asked in this target", "NotObserved")
        answer = await self._nvml.read()
        return Known("ok") if isinstance(answer, Known) else answer


class UnobservableTarget(ReadOnlyTarget):
    """A target of a sort that this version cannot read: every fact is Unknown, and every read says why."""

    def __init__(self, name: str) -> None:
        self.name = name
        sort = name.partition(":")[0]
        self._reason = f"reading {sort} targets is not offered by this version"

    async def facts(self) -> TargetFacts:
        unknown = Unknown(self._reason, "TargetNotOffered")
        return TargetFacts(unknown, unknown, unknown, unknown, unknown, unknown)

    async def unit(self, name: str) -> Unit:
        self._cannot(name)

    async def process(self, pid: int) -> Process | None:
        self._cannot(f"process {pid}")

    async def exists(self, path: str) -> bool:
        self._cannot(path)

    async def read_file(self, path: str) -> str | None:
        self._cannot(path)

    async def unit_log(self, name: str, lines: int) -> tuple[str, ...]:  # noqa: ARG002 - the port's signature
        self._cannot(f"the journal of {name}")

    def endpoint(self, port: int) -> str:
        self._cannot(f"port {port}")

    def _cannot(self, what: str) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, f"{what} in {self.name}: {self._reason}")


def read_process(directory: Path, pid: int) -> Process | None:
    """What was executed, and its environment, as they were at exec; a program that rewrites its title may have destroyed both."""
    try:
        argv = (directory / "cmdline").read_bytes()
        environ = (directory / "environ").read_bytes() if argv else b""
    except (FileNotFoundError, ProcessLookupError):
        return None
    if not argv:
        return None
    words = tuple(word.decode(errors="replace") for word in argv.removesuffix(b"\0").split(b"\0"))
    pairs = (entry.decode(errors="replace").partition("=") for entry in environ.split(b"\0"))
    return Process(pid, words, {name: value for name, found, value in pairs if found})


def _shm_bytes(path: Path) -> Fact[int]:
    try:
        stats = os.statvfs(path)
    except FileNotFoundError:
        return Absent(f"no {path}")
    except OSError as error:
        return unreadable(path, error)
    return Known(stats.f_blocks * stats.f_frsize)


def _exists(path: Path) -> bool:
    """Raises PermissionError where it cannot be told: that is not the same as no."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _read_bounded(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(data) > _MAX_FILE:
        raise OSError(errno.EFBIG, f"{path} is larger than {_MAX_FILE >> 20} MiB")
    return data.decode(errors="replace")
