"""A target that cannot be reached because its name says not how."""

import errno
from collections.abc import Mapping
from typing import NoReturn

from agent.core.fact import Unknown
from agent.core.observation import Process, TargetFacts, Unit


class NoTarget:
    """``TargetPort`` whose every fact is Unknown, and whose every other method raises OSError with ``why``."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self._why = why

    async def facts(self) -> TargetFacts:
        unknown = Unknown(self._why, "TargetUnreachable")
        return TargetFacts(unknown, unknown, unknown, unknown, unknown, unknown)

    async def unit(self, name: str) -> Unit:
        self._cannot(name)

    async def process(self, pid: int) -> Process | None:
        self._cannot(f"process {pid}")

    async def exists(self, path: str) -> bool:
        self._cannot(path)

    async def read_file(self, path: str) -> str | None:
        self._cannot(path)

    async def write_file(self, path: str, text: str) -> None:  # noqa: ARG002 - the port's signature
        self._cannot(path)

    async def remove_file(self, path: str) -> None:
        self._cannot(path)

    async def install_secrets(self, path: str, secrets: Mapping[str, str]) -> None:  # noqa: ARG002 - likewise
        self._cannot(path)

    async def daemon_reload(self) -> None:
        self._cannot("its systemd")

    async def start_unit(self, name: str) -> None:
        self._cannot(name)

    async def stop_unit(self, name: str) -> None:
        self._cannot(name)

    async def kill_unit(self, name: str) -> None:
        self._cannot(name)

    async def reset_failed(self, name: str) -> None:
        self._cannot(name)

    async def unit_log(self, name: str, lines: int) -> tuple[str, ...]:  # noqa: ARG002 - likewise
        self._cannot(f"the journal of {name}")

    def endpoint(self, port: int) -> str:
        self._cannot(f"port {port}")

    def _cannot(self, what: str) -> NoReturn:
        raise OSError(errno.EINVAL, f"{what} in {self.name}: {self._why}")
