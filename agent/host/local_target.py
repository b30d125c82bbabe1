"""The host itself as a place where services run."""

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import Process, TargetFacts, Unit
from agent.host import local_files
from agent.host.command import run_command
from agent.host.file_calls import FileCalls
from agent.host.manager import ServiceManager
from agent.host.nvidia_version import library_version
from agent.host.reading import names_in, unreadable
from agent.host.systemd_bus import local_manager
from agent.ports import NvmlPort

_JOURNAL_DEADLINE = 20.0
_READ_DEADLINE = 10.0  # seconds; less than an observation waits, so that it hears the reason
_WRITE_DEADLINE = 60.0  # seconds: a busy disk takes its time for what must outlast a power cut
_MAX_FILE = 4 << 20
_NULL = Path(os.devnull)
_SGLANG = Unknown("the SGLang version is its interpreter's to tell, and was not asked for", "NotObserved")


class LocalTarget:
    """``TargetPort`` for ``host``. With ``nvml`` its answer is also what NVML says from inside.

    ``manager`` is systemd of the machine whose files are at ``root``; by default ``local_manager`` finds it.
    ``reloaded`` is called after each ``daemon_reload``, also one that failed.
    """

    name = "host"

    def __init__(
        self,
        root: Path = Path("/"),
        nvml: NvmlPort | None = None,
        manager: ServiceManager | None = None,
        reloaded: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = root
        self._nvml = nvml
        self._manager = manager or local_manager(root)
        self._files = FileCalls("a file of this host")
        self._reloaded = reloaded

    async def facts(self) -> TargetFacts:
        local, nvml = await asyncio.gather(
            self._files.run("/", self._read, _READ_DEADLINE), self._nvml_fact()
        )
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
        return await self._manager.unit(name)

    async def process(self, pid: int) -> Process | None:
        """None: no such process, or only a zombie of it. Raises PermissionError for another user's environment."""
        directory = self._root / "proc" / str(pid)
        return await self._files.run(f"/proc/{pid}", lambda: read_process(directory, pid), _READ_DEADLINE)

    async def exists(self, path: str) -> bool:
        return await self._files.run(path, lambda: _exists(self._at(path)), _READ_DEADLINE)

    async def read_file(self, path: str) -> str | None:
        return await self._files.run(path, lambda: _read_bounded(self._at(path)), _READ_DEADLINE)

    async def write_file(self, path: str, text: str) -> None:
        await self._write(path, lambda: local_files.write_atomically(self._at(path), text.encode()))

    async def remove_file(self, path: str) -> None:
        await self._write(path, lambda: local_files.remove(self._at(path)))

    async def install_secrets(self, path: str, secrets: Mapping[str, str]) -> None:
        sources = {variable: self._at(source) for variable, source in secrets.items()}
        await self._write(path, lambda: local_files.write_secrets(self._at(path), sources))

    async def daemon_reload(self) -> None:
        try:
            await self._manager.reload()
        finally:  # one that was not answered may come about all the same
            self._reloaded()

    async def start_unit(self, name: str) -> None:
        await self._manager.start(name)

    async def stop_unit(self, name: str) -> None:
        await self._manager.stop(name)

    async def kill_unit(self, name: str) -> None:
        await self._manager.kill(name)

    async def reset_failed(self, name: str) -> None:
        await self._manager.reset_failed(name)

    async def unit_log(self, name: str, lines: int) -> tuple[str, ...]:
        argv = ("journalctl", "--no-pager", "--output=cat", f"--lines={lines}", f"--unit={name}")
        done = await run_command(argv, _JOURNAL_DEADLINE)
        if done.status != 0:
            raise OSError(f"journalctl for {name}: {done.stderr.strip()[:200] or f'status {done.status}'}")
        return tuple(done.stdout.splitlines()[-lines:])

    def endpoint(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    async def _write(self, path: str, call: Callable[[], None]) -> None:
        """One that is left behind may still happen: until then its path takes no other."""
        await self._files.run(path, call, _WRITE_DEADLINE)

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
        if path.resolve() == _NULL:
            return ""  # how an administrator takes a file away that a package or an agent writes
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))  # a FIFO would be waited for
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(data) > _MAX_FILE:
        raise OSError(errno.EFBIG, f"{path} is larger than {_MAX_FILE >> 20} MiB")
    return data.decode(errors="replace")
