"""What lives under the state directory: memory, the kernel log's position, the accepted spec, operators' requests."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from agent.core.errors import TransientError
from agent.core.kernel_log_state import KernelLogState, from_file, to_file
from agent.core.memory import Memory

_KERNEL_LOG = "kernel-log.json"


class StateError(TransientError):
    """The agent's own state cannot be written: neither the host's doing nor a defect, and no action is to blame."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"{path} cannot be written: {error.strerror or error}",
            reason="StateUnusable",
            next_step=f"free space on its file system or mend it (df -h {path.parent}); the agent goes on by itself",
        )


@contextlib.contextmanager
def own_state(path: Path) -> Iterator[None]:
    """OSError of work on our own files becomes StateError: they must not be taken for errors of the host."""
    try:
        yield
    except OSError as error:
        raise StateError(path, error) from error


def write_all(fd: int, data: bytes) -> None:
    """Every byte, or OSError: one write may take only a part of them, for instance on a disk that is filling up."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = True) -> None:
    """The whole file or the old one, never half: temporary file, fsync, rename, fsync of the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        try:
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if sync:
        sync_directory(path.parent)


def remove_leftovers(directory: Path) -> None:
    """Temporary files of agents that were killed while they wrote. Only for who holds the directory's lock."""
    for path in directory.glob(".*.*"):
        if path.suffix[1:].isdigit():
            with contextlib.suppress(OSError):  # in nobody's way
                path.unlink()


def sync_directory(path: Path) -> None:
    """Names in it, as they are now, outlast a power cut."""
    directory = os.open(path, os.O_RDONLY)
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
        self._kernel_log = saved_kernel_log(directory)

    @property
    def memory(self) -> Memory:
        return self._memory

    def _load(self) -> Memory:
        path = self.directory / "memory.json"
        problems: list[str] = []
        for candidate in (path, path.with_suffix(".json.old")):
            if not candidate.exists():
                continue
            try:
                memory = Memory.model_validate_json(candidate.read_bytes())
                self._say(problems, "the state before its last change is used")
                return memory  # noqa: TRY300 - the loop tries the next one
            except ValidationError as error:
                aside = candidate.with_name(candidate.name + ".unreadable")
                candidate.replace(aside)
                problems.append(
                    f"{candidate} could not be read ({error.error_count()} errors) and was kept as {aside.name}"
                )
        self._say(problems, "the agent begins anew: verdicts, promoted revisions and baselines are lost")
        return Memory()

    def _say(self, problems: list[str], consequence: str) -> None:
        if problems:
            self.problem = "; ".join([*problems, consequence])

    def save(self, memory: Memory) -> None:
        if memory == self._memory:
            return
        path = self.directory / "memory.json"
        with own_state(path):
            self._keep_old(path)
            write_atomic(path, memory.model_dump_json().encode())
        self._memory = memory

    def _keep_old(self, path: Path) -> None:
        """The file as it is becomes its own predecessor; where there is none, the predecessor there is stays."""
        temporary = path.with_name(f".{path.name}.old.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink(missing_ok=True)
            os.link(path, temporary)
            temporary.replace(path.with_suffix(".json.old"))

    def update(self, **changes: object) -> Memory:
        self.save(self._memory.model_copy(update=changes))
        return self._memory

    @property
    def kernel_log(self) -> KernelLogState:
        """As it was saved last."""
        return self._kernel_log

    def save_kernel_log(self, state: KernelLogState) -> None:
        """Once a pass is enough: lines since the last save are read again after a restart, and counted once.

        Nor is anything lost where it cannot be written. Not synced: it means something only to this boot, and within
        a boot the page cache has it.
        """
        if state == self._kernel_log:
            return
        with contextlib.suppress(OSError):
            write_atomic(self.directory / _KERNEL_LOG, to_file(state), sync=False)
            self._kernel_log = state

    def accepted_text(self) -> str | None:
        path = self.directory / "spec.accepted.yaml"
        return path.read_text() if path.exists() else None

    def stage_text(self, text: str) -> None:
        """Write the spec that is about to be accepted; it is in force once the memory has its digest."""
        path = self.directory / "spec.staged.yaml"
        with own_state(path):
            write_atomic(path, text.encode())

    def staged_text(self) -> str | None:
        path = self.directory / "spec.staged.yaml"
        return path.read_text() if path.exists() else None

    def settle_staged(self, *, accepted: bool) -> None:
        """End an acceptance: the staged spec becomes the accepted one, or is dropped."""
        staged = self.directory / "spec.staged.yaml"
        with own_state(staged):
            if accepted:
                staged.replace(self.directory / "spec.accepted.yaml")
            else:
                staged.unlink()
            sync_directory(self.directory)

    @property
    def requests(self) -> Path:
        """Where ``agent approve`` and ``agent retry`` leave their requests: only root can write here."""
        path = self.directory / "requests"
        path.mkdir(exist_ok=True, mode=0o700)
        return path

    def take_requests(self) -> Iterator[tuple[str, str]]:
        """(verb, argument) of every request, oldest first; each is removed once the caller comes for the next.

        A kill in between leaves it, and it is taken again: what it asks for is the same twice.
        """
        with own_state(self.directory / "requests"):
            files = [p for p in self.requests.iterdir() if p.is_file()]
            files.sort(key=lambda p: p.stat().st_mtime_ns)
        for path in files:
            verb, _, argument = path.name.partition("=")
            if argument:
                yield verb, argument
            with own_state(path):
                path.unlink(missing_ok=True)


def saved_kernel_log(directory: Path) -> KernelLogState:
    """What the running agent, or the last one, saved of the kernel log; nothing where there is nothing to read."""
    try:
        return from_file((directory / _KERNEL_LOG).read_bytes())
    except OSError:
        return KernelLogState()


def leave_request(directory: Path, verb: str, argument: str) -> None:
    """Ask the agent for something: an empty file whose name says it all, so that it is whole or not there."""
    requests = directory / "requests"
    requests.mkdir(parents=True, exist_ok=True, mode=0o700)
    (requests / f"{verb}={argument}").touch(mode=0o600)
