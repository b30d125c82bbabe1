"""NVML through a short-lived child (``nvml_child``): codes become facts, units become the observation's."""

import asyncio
import errno
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from agent.core.fact import Absent, Fact, Known, Unknown, say, value_or
from agent.core.observation import Gpu, Nvml
from agent.core.record import Record
from agent.host.clock_locks import ClockLocks
from agent.host.command import StuckError, run_command
from agent.host.file_calls import FileCalls
from agent.host.nvidia_version import library_version, module_version
from agent.host.nvml_facts import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    VERSION_MISMATCH,
    confidential_compute,
    fact,
    fault_fact,
    gpu_facts,
)
from agent.host.nvml_lasting import ASKED_EVERY, LastingFacts
from agent.host.nvml_settings import CLOCKS, UNITS, write_request
from agent.host.nvml_wire import Answer, Fault, Outcome, ReadRequest, WriteRequest
from agent.host.reading import PCI_ADDRESS, names_in, read_text

R = TypeVar("R", bound=Record)

_CHILD = "agent.host.nvml_child"
_CHILD_NAME = "gpu-agent-nvml"  # what it calls itself; the kernel keeps 15 bytes
_LOOK_DEADLINE = 5.0  # seconds
DEADLINE = 20.0  # seconds; opening an idle GPU without persistence mode takes a few
_STUCK = "an earlier NVML query still sleeps in the kernel"
# nvmlReturn_t -> what a write fails with; EIO for every other.
ERRNOS: Mapping[int, int] = {
    INVALID_ARGUMENT: errno.EINVAL,
    NOT_SUPPORTED: errno.EOPNOTSUPP,
    4: errno.EPERM,
    6: errno.ENODEV,
    9: errno.ENODEV,
    10: errno.ETIMEDOUT,
    12: errno.ENOENT,
    FUNCTION_NOT_FOUND: errno.ENOSYS,
    VERSION_MISMATCH: errno.EPROTO,
    19: errno.EBUSY,
}


class ChildFailedError(Exception):
    """The child ended without an answer that can be read."""


class ChildNvml:
    """``NvmlPort``. The child holds its devices for a fraction of a second and is gone when a call returns.

    ``env`` is added to the environment of the child. ``alone`` is held while a child lives, so that whoever looks
    for holders does not take it for one, and that a write and a reading never meet.

    A write raises PermissionError, TimeoutError or another OSError (``ERRNOS``) with NVML's words. Reading back is
    the caller's: NVML can take a setting and not keep it, as a power limit without persistence mode.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        deadline: float = DEADLINE,
        env: Mapping[str, str] | None = None,
        alone: asyncio.Lock | None = None,
        lasting_every: float = ASKED_EVERY,
    ) -> None:
        self._root = root
        self._deadline = deadline
        self._alone = alone or asyncio.Lock()
        # -P below keeps the working directory off the child's path: a pynvml.py there must not run as root.
        package_parent = str(Path(__file__).resolve().parents[2])
        self._env = {**os.environ, "PYTHONPATH": package_parent, **(env or {})}
        self._locks = ClockLocks(root)
        self._lasting = LastingFacts()
        self._lasting_every = lasting_every
        self._reading: asyncio.Task[Fact[Nvml]] | None = None
        self._stuck: asyncio.subprocess.Process | None = None
        self._inherited: tuple[int, ...] | None = None  # by an agent before this one
        self._looks = FileCalls("earlier NVML queries")

    async def read(self) -> Fact[Nvml]:
        """Absent: no GPU is on nvidia, so NVML was not opened. Callers at the same time share one child."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)

    async def set(self, address: str, setting: str, value: str) -> None:
        request = write_request(address, setting, value)
        if (setting, value) != ("persistence-mode", "on"):
            self._locks.forget(address, setting)
        await self._write(request, f"setting {setting} to {value}{UNITS.get(setting, '')}")
        if setting in CLOCKS:
            self._locks.note(address, setting, value)

    async def _read(self) -> Fact[Nvml]:
        async with self._alone:
            addresses = self._on_nvidia()
            if not addresses:
                return Absent("no GPU is bound to nvidia, so NVML was not opened")
            if why := await self._in_the_way():
                return Unknown(why, "NvmlStuck")
            bindings, now = tuple((a, self._locks.binding(a)) for a in addresses), time.monotonic()
            lasting = self._lasting.due(bindings, now, self._lasting_every)
            try:
                answer = await self._ask(ReadRequest(addresses=addresses, lasting=lasting), Answer)
            except TimeoutError:
                return Unknown(f"NVML did not answer within {self._deadline:g}s", "NvmlTimeout")
            except ChildFailedError as error:
                return Unknown(str(error), "NvmlChildFailed")
        if answer.fault is None and lasting:
            self._lasting.take(answer, bindings, now)
        return self._translate(answer)

    async def _write(self, request: WriteRequest, doing: str) -> None:
        def failed(number: int, why: str) -> OSError:
            return OSError(number, f"{doing} failed: {why}", request.address)

        async with self._alone:
            if request.address not in self._on_nvidia():
                raise failed(errno.ENODEV, "the GPU is not bound to nvidia, so NVML was not opened")
            if why := await self._in_the_way():
                raise failed(errno.EBUSY, why)
            try:
                outcome = await self._ask(request, Outcome)
            except TimeoutError:
                raise failed(errno.ETIMEDOUT, f"NVML did not answer within {self._deadline:g}s") from None
            except ChildFailedError as error:
                raise failed(errno.EIO, str(error)) from error
        if outcome.fault is not None:
            raise failed(ERRNOS.get(outcome.fault.code, errno.EIO), self._fault(outcome.fault).reason)

    def _on_nvidia(self) -> tuple[str, ...]:
        bound = names_in(self._root / "sys/bus/pci/drivers/nvidia")
        return tuple(name for name in bound if PCI_ADDRESS.fullmatch(name))

    async def _in_the_way(self) -> str:
        """Why no child is started now: one of ours, or of an agent before this one, sleeps in the kernel.

        With each restart one more would sleep beside it.
        """
        if self._stuck is not None and self._stuck.returncode is None:
            return _STUCK
        try:
            sleeps = await self._looks.run("/proc", self._inherits, _LOOK_DEADLINE)
        except OSError as error:
            return f"whether an earlier NVML query still sleeps in the kernel cannot be told: {error}"
        return _STUCK if sleeps else ""

    def _inherits(self) -> bool:
        processes = self._root / "proc"
        if self._inherited is None:
            self._inherited = tuple(int(name) for name in names_in(processes) if name.isdecimal())
        self._inherited = tuple(pid for pid in self._inherited if _sleeping_child(processes / str(pid)))
        return bool(self._inherited)

    async def _ask(self, request: Record, kind: type[R]) -> R:
        """Raises TimeoutError, ChildFailedError, or OSError where no child can be started."""
        argv = (sys.executable, "-P", "-m", _CHILD, request.model_dump_json(), _CHILD_NAME)
        try:
            done = await run_command(argv, self._deadline, self._env)
        except StuckError as error:
            self._stuck = error.process
            raise
        if done.status != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ChildFailedError(f"the NVML child ended with status {done.status}: {last[:200]}")
        try:
            return kind.model_validate_json(done.stdout)
        except ValidationError as error:
            first = error.errors()[0]["msg"]
            message = f"the NVML child's answer has {error.error_count()} errors, such as {first}"
            raise ChildFailedError(message) from error

    def _translate(self, answer: Answer) -> Fact[Nvml]:
        if answer.fault is not None:
            return self._fault(answer.fault)
        there = frozenset(gpu.address for gpu in answer.gpus)
        self._lasting.notice(there)
        gpus: dict[str, Fact[Gpu]] = {
            gpu.address: Known(gpu_facts(gpu, self._lasting.of(gpu.address, there), self._locks))
            for gpu in answer.gpus
        }
        for closed in answer.closed:
            gpus[closed.address or f"nvml-index-{closed.index}"] = fault_fact(closed.fault)
        return Known(
            Nvml(
                driver_version=fact(answer.driver_version),
                nvml_version=fact(answer.nvml_version),
                cuda_version=fact(answer.cuda_version, lambda v: f"{v // 1000}.{v % 1000 // 10}"),
                gpus=dict(sorted(gpus.items())),
                confidential_compute=confidential_compute(answer.confidential_compute),
            )
        )

    def _fault(self, fault: Fault) -> Unknown:
        """What befell the whole call; of a version mismatch with both versions."""
        unknown = fault_fact(fault)
        if fault.code != VERSION_MISMATCH:
            return unknown
        module, library = say(module_version(self._root)), say(library_version(self._root))
        return Unknown(
            f"{unknown.reason}: the kernel module is {module}, the library is {library}", unknown.code
        )


def _sleeping_child(process: Path) -> bool:
    """One of root's or of ours with the child's name, in the kernel and out of reach of signals.

    ``stat`` tells name and state at once. Never ``cmdline``: it is answered under the lock of the process's memory map,
    which a child that sleeps in the driver's mmap or in its own end keeps, and so may any process that has nothing to
    do with NVML.
    """
    stat = value_or(read_text(process / "stat"), "")
    _, _, name = stat.rpartition(")")[0].partition("(")
    if name != _CHILD_NAME or stat.rpartition(")")[2].split()[:1] != ["D"]:
        return False
    try:
        return process.stat().st_uid in (0, os.geteuid())  # any user may give any process that name
    except FileNotFoundError:
        return False
