"""What lives under the state directory: memory, the accepted spec, operators' requests."""

import contextlib
import os
from pathlib import Path

from pydantic import ValidationError

from agent.core.memory import Memory


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = True) -> None:
    """The whole file or the old one, never half: temporary file, fsync, rename, fsync of the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.write(fd, data)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    if sync:
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class Store:
    """Memory, saved on every change. A file that cannot be read is kept aside and its predecessor used."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.problem = ""
        self._memory = self._load()

    @property
    def memory(self) -> Memory:
        return self._memory

    def _load(self) -> Memory:
        path = self.directory / "memory.json"
        for candidate in (path, path.with_suffix(".json.old")):
            if not candidate.exists():
                continue
            try:
                return Memory.model_validate_json(candidate.read_bytes())
            except ValidationError as error:
                aside = candidate.with_name(candidate.name + ".unreadable")
                candidate.replace(aside)
                self.problem = f"{candidate} could not be read ({error.error_count()} errors) and was kept as {aside.name}"
        return Memory()

    def save(self, memory: Memory) -> None:
        if memory == self._memory:
            return
        path = self.directory / "memory.json"
        with contextlib.suppress(FileNotFoundError):
            old = path.with_suffix(".json.old")
            old.unlink(missing_ok=True)
            os.link(path, old)
        write_atomic(path, memory.model_dump_json().encode())
        self._memory = memory

    def update(self, **changes: object) -> Memory:
        self.save(self._memory.model_copy(update=changes))
        return self._memory

    def accepted_text(self) -> str | None:
        path = self.directory / "spec.accepted.yaml"
        return path.read_text() if path.exists() else None

    def accept_text(self, text: str) -> None:
        write_atomic(self.directory / "spec.accepted.yaml", text.encode())

    @property
    def requests(self) -> Path:
        """Where ``agent approve`` and ``agent retry`` leave their requests: only root can write here."""
        path = self.directory / "requests"
        path.mkdir(exist_ok=True, mode=0o700)
        return path

    def take_requests(self) -> list[tuple[str, str]]:
        """(verb, argument) of every request, oldest first; taking removes it."""
        found = []
        for path in sorted(self.requests.iterdir(), key=lambda p: p.stat().st_mtime_ns):
            verb, _, argument = path.name.partition("=")
            path.unlink()
            if argument:
                found.append((verb, argument))
        return found


def leave_request(directory: Path, verb: str, argument: str) -> None:
    """Ask the agent for something: an empty file whose name says it all, so that it is whole or not there."""
    requests = directory / "requests"
    requests.mkdir(parents=True, exist_ok=True, mode=0o700)
    (requests / f"{verb}={argument}").touch(mode=0o600)
