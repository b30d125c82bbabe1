"""Containers and other machines as places where services run: a shell and systemctl there, and nothing installed."""

import asyncio
import base64
import binascii
import errno
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from agent.core.fact import Fact, Unknown
from agent.core.observation import Process, TargetFacts, Unit
from agent.core.quantity import whole_number
from agent.host.container_network import container_address, shares_network
from agent.host.file_calls import FileCalls
from agent.host.nvidia_version import LIBRARY_DIRECTORIES
from agent.host.systemctl_show import parse_properties, parse_unit
from agent.host.target_batch import Batch
from agent.host.target_facts import nvml_fact, parse_inside, unreachable
from agent.host.target_names import host_of
from agent.host.target_script import NOT_THERE, Part

_MAX_FILE = 4 << 20
_MAX_TEXT = 512 << 10  # bytes of any other answer: all of them are taken apart in the event loop
_UNIT = re.compile(r"[A-Za-z0-9:_.\\][A-Za-z0-9:_.\\@-]{0,254}\.[a-z]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NVML_DEADLINE = 8  # seconds inside; together with the other facts it stays below the observer's own
_NVML_COMMAND_DEADLINE = 11.0
NVML_EVERY = (
    300.0  # seconds: nvidia-smi opens every GPU there, so it is asked again when something may have changed
)
_RELOAD_DEADLINE = 60.0  # generators of a large container take a while
_PATIENCE = 3.0  # seconds that nvidia-smi here waits for its turn; its own time is still to come

P = ParamSpec("P")
T = TypeVar("T")


def _understood(
    method: Callable[Concatenate["CommandTarget", P], Awaitable[T]],
) -> Callable[Concatenate["CommandTarget", P], Coroutine[Any, Any, T]]:
    """What a target says is anybody's words: whatever else taking them apart raises is an error of this target alone."""

    @wraps(method)
    async def read(self: "CommandTarget", /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(self, *args, **kwargs)
        except OSError:
            raise
        except Exception as error:
            said = f"{self.name}: its answer is not understood: {error!r:.200}"
            raise OSError(errno.EPROTO, said) from error

    return read


class CommandTarget:
    """``TargetPort`` for ``lxc:ID`` and ``ssh:user@host`` through an argv prefix (``target_names.prefix_for``).

    One object for one target, for as long as the agent runs: it remembers the address, and when NVML was asked.
    Reads and writes raise OSError where the target cannot be reached or answers nonsense, ``facts`` says so instead.

    ``alone`` is held while nvidia-smi runs in a container: its open devices are seen from this host, and would be taken
    for somebody's. ``root``: where this host's /proc and /sys are.
    """

    def __init__(
        self,
        name: str,
        prefix: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        *,
        alone: asyncio.Lock | None = None,
        root: Path = Path("/"),
    ) -> None:
        self.name = name
        self._batch = Batch(name, prefix)
        self._clock = clock
        self._files = FileCalls("a container's first process")
        self._alone = alone if alone is not None and name.startswith("lxc:") else asyncio.Lock()
        self._root = root
        self._host = host_of(name)
        self._reloads = 0
        self._nvml: tuple[object, float, Fact[str]] | None = (
            None  # what it was asked in, when, and the answer
        )

    async def facts(self) -> TargetFacts:
        try:
            return await self._facts()
        except OSError as error:
            return unreachable(error.strerror or str(error))

    @_understood
    async def _facts(self) -> TargetFacts:
        directories = [f"/{directory}" for directory in LIBRARY_DIRECTORIES]
        part, _ = await asyncio.gather(self._batch.ask("facts", *directories), self._find_host(anew=True))
        inside = parse_inside(_text(self._answer(part, "facts")))
        return inside.with_nvml(await self._nvml_fact(inside))

    def devices_may_be_gone(self) -> None:
        """Look at NVML again: a reload of systemd, here or in what holds it, may cut a container off its GPUs."""
        self._nvml = None
        self._reloads += 1

    async def _nvml_fact(self, place: object) -> Fact[str]:
        now, reloads = self._clock(), self._reloads
        if self._nvml is not None and self._nvml[0] == place and now - self._nvml[1] < NVML_EVERY:
            return self._nvml[2]
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._alone.acquire()
        except TimeoutError:
            return Unknown(
                "NVML is being asked elsewhere on this host; it is this target's turn later", "NotObserved"
            )
        try:
            fact = await self._ask_nvml()
        except OSError as error:
            return Unknown(error.strerror or str(error), "TargetUnreachable")
        finally:
            self._alone.release()
        if reloads == self._reloads:  # else the answer may be older than the reload
            self._nvml = (place, now, fact)
        return fact

    async def _ask_nvml(self) -> Fact[str]:
        try:
            part = await self._batch.tell("nvml", str(_NVML_DEADLINE), deadline=_NVML_COMMAND_DEADLINE)
        except TimeoutError:
            return Unknown(f"nvidia-smi did not answer within {_NVML_COMMAND_DEADLINE:g} s", "NvmlTimeout")
        return nvml_fact(replace(part, output=part.output[:_MAX_TEXT]))

    # -- units ------------------------------------------------------------------------------------------------------

    @_understood
    async def unit(self, name: str) -> Unit:
        part, _ = await asyncio.gather(self._batch.ask("unit", _unit_name(name)), self._find_host())
        properties = parse_properties(_text(self._answer(part, f"systemctl show {name}")))
        numbers = {whole_number(word) for word in properties.get("Pids", "").split()}
        pids = tuple(sorted(number for number in numbers if number is not None))
        return parse_unit(properties.get("Id") or name, properties, pids)

    @_understood
    async def process(self, pid: int) -> Process | None:
        part = await self._batch.ask("process", str(pid))
        if part.status == NOT_THERE:
            return None
        encoded, _, environ = self._answer(part, f"process {pid}").partition(b"\n\n")
        try:
            argv, entries = (base64.b64decode(b"".join(data.split())) for data in (encoded, environ))
        except binascii.Error as error:
            raise OSError(errno.EIO, f"{self.name}: process {pid}: its answer was cut short") from error
        words = tuple(_text(word) for word in argv.removesuffix(b"\0").split(b"\0"))
        pairs = (_text(entry).partition("=") for entry in entries.split(b"\0"))
        return Process(pid, words, {name: value for name, found, value in pairs if found})

    async def daemon_reload(self) -> None:
        self.devices_may_be_gone()
        await self._do("daemon_reload", deadline=_RELOAD_DEADLINE)

    async def start_unit(self, name: str) -> None:
        await self._do("start_unit", _unit_name(name))

    async def stop_unit(self, name: str) -> None:
        await self._do("stop_unit", _unit_name(name))

    async def kill_unit(self, name: str) -> None:
        """No error where there is nothing to kill."""
        await self._do("kill_unit", _unit_name(name))

    async def reset_failed(self, name: str) -> None:
        """No error where the unit has not failed, or is not loaded."""
        await self._do("reset_failed", _unit_name(name))

    @_understood
    async def unit_log(self, name: str, lines: int) -> tuple[str, ...]:
        part = await self._batch.ask("unit_log", _unit_name(name), str(lines), str(_MAX_TEXT))
        text = _text(self._answer(part, f"journalctl for {name}")).removesuffix("\n")
        return tuple(text.split("\n")[-lines:]) if text and lines > 0 else ()

    # -- files ------------------------------------------------------------------------------------------------------

    async def exists(self, path: str) -> bool:
        part = await self._batch.ask("exists", _absolute(path))
        return part.status != NOT_THERE and self._answer(part, path) is not None

    @_understood
    async def read_file(self, path: str) -> str | None:
        part = await self._batch.ask("read_file", _absolute(path), str(_MAX_FILE + 1))
        if part.status == NOT_THERE:
            return None
        data = self._answer(part, path, most=_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise OSError(errno.EFBIG, f"{self.name}: {path} is larger than {_MAX_FILE >> 20} MiB")
        return _text(data)

    async def write_file(self, path: str, text: str) -> None:
        try:
            encoded = base64.b64encode(text.encode()).decode()
        except UnicodeEncodeError as error:
            raise OSError(errno.EILSEQ, f"{self.name}: {path}: the text is not Unicode") from error
        await self._do("write_file", _absolute(path), encoded)

    async def remove_file(self, path: str) -> None:
        await self._do("remove_file", _absolute(path))

    async def install_secrets(self, path: str, secrets: Mapping[str, str]) -> None:
        """As ``EnvironmentFile=`` reads it. The values are read, checked and quoted there, and never come here."""
        words: list[str] = []
        for variable, source in secrets.items():
            if not _VARIABLE.fullmatch(variable):
                raise OSError(errno.EINVAL, f"{variable!r} is no name of an environment variable")
            words += [variable, _absolute(source)]
        await self._do("install_secrets", _absolute(path), *words)

    # -- the network ------------------------------------------------------------------------------------------------

    def endpoint(self, port: int) -> str:
        """As ``facts`` or ``unit`` found it last. Before, and in a container without an address, a name that leads nowhere:
        whoever asks there gets an error, and not the answer of something else.
        """
        return f"http://{self._host or 'no-address.invalid'}:{port}"

    async def _find_host(self, *, anew: bool = False) -> None:
        """Loopback where the container has this host's network, else the address that it says it has."""
        if self.name.startswith("ssh:") or (self._host and not anew):
            return
        part, shared = await asyncio.gather(
            self._batch.ask("network"),
            self._files.run("/proc", partial(shares_network, self.name, self._root), _PATIENCE),
        )
        words = _text(part.output[:_MAX_TEXT]).split()
        self._host = "127.0.0.1" if shared else container_address(words, self._root)

    # -- answers ----------------------------------------------------------------------------------------------------

    async def _do(self, *call: str, deadline: float | None = None) -> None:
        part = await (
            self._batch.tell(*call) if deadline is None else self._batch.tell(*call, deadline=deadline)
        )
        self._answer(part, " ".join((call[0].replace("_", " "), *call[1:2])))

    def _answer(self, part: Part, what: str, most: int = _MAX_TEXT) -> bytes:
        if part.status == 0 and len(part.output) > most:
            raise OSError(errno.EFBIG, f"{self.name}: {what}: the answer is larger than {most >> 10} KiB")
        if part.status == 0:
            return part.output
        words = part.words.rpartition("\n")[2][:300] or f"status {part.status}"
        code = errno.ENOENT if part.status == NOT_THERE else errno.EIO
        raise OSError(code, f"{self.name}: {what}: {words}")


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise OSError(errno.EINVAL, f"{path!r}: expected a path from the root")
    return path


def _unit_name(name: str) -> str:
    """Not a pattern, which would mean many units, and not an option."""
    if not _UNIT.fullmatch(name):
        raise OSError(errno.EINVAL, f"{name!r} is no name of a unit")
    return name
