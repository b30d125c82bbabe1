"""The edges of the agent: one small Protocol per edge.

Adapters translate, bound their time and raise; they decide nothing and never retry. Reads return facts or raise
``OSError``/``TimeoutError``; the observer turns what was raised into Unknown. Writes raise ``OSError`` with the
kernel's errno. ``agent/host`` has the real adapters, ``agent/sim`` a whole simulated host; one contract suite
runs on both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.core.bench import LevelResult
from agent.core.fact import Fact
from agent.core.nccl_verdict import NcclStep
from agent.core.observation import Holder, Nvml, Pci, Platform, Process, TargetFacts, Unit
from agent.core.spec import BenchmarkSpec
from agent.core.verdict import PathVerdict

START_WITHIN = 20.0  # seconds; an unbind is written some 30 ms after it was asked for, on a host at ease


class Clock(Protocol):
    def now(self) -> float:
        """Wall clock, seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that only go forward; compressed on a simulated host, like ``sleep``."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class PlatformPort(Protocol):
    async def read(self) -> Platform: ...

    async def load_module(self, name: str) -> None:
        """modprobe NAME. Success says nothing: read the driver link afterwards."""
        ...

    async def make_device_nodes(self) -> None:
        """Make what ``nvidia_nodes`` says is missing, by nvidia-modprobe. Success says nothing: read it afterwards.

        Raises FileNotFoundError where that program is not installed.
        """
        ...

    async def set_module_parameter(self, module: str, parameter: str, value: str) -> None:
        """Write /sys/module/MODULE/parameters/PARAMETER."""
        ...

    async def refresh_boot_loader(self) -> None:
        """Make the boot loader's own files anew from what an operator edits, by this host's own command.

        Returns when the command has ended well. Success says nothing: read ``next_cmdline`` afterwards.
        """
        ...


class PciPort(Protocol):
    """sysfs verbs. None of them verifies: reading back is the caller's."""

    async def read(self) -> Pci: ...

    async def read_driver(self, address: str) -> Fact[str]:
        """The driver link of one function."""
        ...

    async def set_override(self, address: str, driver: str) -> None:
        """Write driver_override; "" clears it."""
        ...

    async def start_unbind(self, address: str, driver: str, within: float = START_WITHIN) -> None:
        """Begin writing ADDRESS to the driver's unbind file where it can be abandoned; returns at once.

        It is written within so many seconds of this call or never. TimeoutError and ConnectionError leave open
        whether it was begun: until those seconds are over it may still come.
        """
        ...

    async def unbind_state(self, address: str) -> str:
        """One of: running, done, "failed: ERRNO", or none: none of ours is pending, of an earlier run neither.

        What is known of the waiting task may follow running, as in "running: state D in nv_pci_remove".
        Raises OSError where that cannot be told: the device is then left alone.
        """
        ...

    async def probe(self, address: str) -> None:
        """Write drivers_probe. Succeeds also when nothing was bound."""
        ...

    async def set_group_type(self, group: int, group_type: str) -> None:
        """Write /sys/kernel/iommu_groups/GROUP/type."""
        ...


class NvmlPort(Protocol):
    """Called only while at least one GPU is on nvidia: opening NVML may load modules."""

    async def read(self) -> Fact[Nvml]: ...

    async def set(self, address: str, setting: str, value: str) -> None:
        """One setting of one GPU. Success says nothing: read it afterwards.

        persistence-mode, ecc, mig: on or off. power-limit: watts. locked-graphics-clocks, locked-memory-clocks: as
        ``quantity.parse_clocks`` reads them. compute-mode: a word of the spec.
        """
        ...


class HoldersPort(Protocol):
    async def read(self, addresses: Iterable[str]) -> Mapping[str, Fact[tuple[Holder, ...]]]:
        """Everything that holds each function's driver, over every process in every namespace."""
        ...


@dataclass(frozen=True, slots=True)
class KernelLines:
    """Kernel log lines after a cursor: (wall clock seconds, text).

    ``gap``: lines were lost. ``more``: a bound was met, and lines are left for another read. ``fresh``: the cursor
    means nothing in this boot, so these lines begin with its first one: what was known of the log before is void.
    """

    lines: tuple[tuple[float, str], ...]
    cursor: str
    gap: bool = False
    more: bool = False
    fresh: bool = False


class KernelLogPort(Protocol):
    async def read(self, cursor: str) -> KernelLines:
        """Lines after ``cursor``; "" means from the start of this boot."""
        ...


class TargetPort(Protocol):
    """One place where services run: this host, a container, a machine reached by ssh."""

    async def facts(self) -> TargetFacts: ...

    async def unit(self, name: str) -> Unit:
        """``systemctl show``; load_state "not-found" where there is none."""
        ...

    async def process(self, pid: int) -> Process | None: ...

    async def exists(self, path: str) -> bool: ...

    async def read_file(self, path: str) -> str | None: ...

    async def write_file(self, path: str, text: str) -> None:
        """Atomically, mode 0644, parents made."""
        ...

    async def remove_file(self, path: str) -> None: ...

    async def install_secrets(self, path: str, secrets: Mapping[str, str]) -> None:
        """Write VARIABLE=value lines, values read from the given files in the target, to ``path`` with mode 0600."""
        ...

    async def daemon_reload(self) -> None: ...

    async def start_unit(self, name: str) -> None:
        """Ask for a start; returns when the job is queued, not when the service is ready."""
        ...

    async def stop_unit(self, name: str) -> None: ...

    async def kill_unit(self, name: str) -> None:
        """SIGKILL to every process of the unit's cgroup."""
        ...

    async def reset_failed(self, name: str) -> None: ...

    async def unit_log(self, name: str, lines: int) -> tuple[str, ...]:
        """The last lines of the unit's journal."""
        ...

    def endpoint(self, port: int) -> str:
        """Base URL at which that port of the target can be reached from here."""
        ...


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer: its text (reasoning included), completion tokens by ``usage``, finish reason."""

    text: str
    tokens: int
    finish: str


class InferencePort(Protocol):
    """An OpenAI-compatible server over HTTP."""

    async def get(self, url: str, path: str, timeout: float) -> tuple[int, str]:
        """Status and body. Raises OSError or TimeoutError."""
        ...

    async def complete(self, url: str, model: str, ask: str, max_tokens: int, timeout: float) -> Completion:
        """One chat completion at temperature 0."""
        ...

    async def benchmark_level(
        self,
        url: str,
        model: str,
        spec: BenchmarkSpec,
        concurrency: int,
        progress: Callable[[int, int], None],
    ) -> LevelResult:
        """One level: a discarded warm-up wave, then ``repeats`` measured ones. ``progress(done, total)`` in requests."""
        ...


class P2PTestPort(Protocol):
    async def run(
        self,
        gpus: Sequence[str],
        progress: Callable[[str], None],
        *,
        full: bool = False,
        seed: int | None = None,
    ) -> "P2PTestResult":
        """Test every ordered pair of these GPUs. Every step has a deadline inside.

        ``full``: more patterns and sizes, and nearly all memory. ``seed``: of an earlier test, to repeat its data.
        """
        ...


@dataclass(frozen=True, slots=True)
class P2PTestResult:
    """``lacks``: what is not installed on this host, cuda-bindings or libcuda, so that nothing could be tested."""

    paths: tuple[PathVerdict, ...]
    controls_ok: bool
    control_detail: str = ""
    controls: tuple[PathVerdict, ...] = ()
    seed: int | None = None
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class NcclSteps:
    """What an NCCL check told. ``ended``: why it was given up before it finished; "" where it was not."""

    steps: tuple[NcclStep, ...]
    ended: str = ""


class NcclCheckPort(Protocol):
    async def run(
        self,
        target: str,
        python: str,
        env: Mapping[str, str],
        request: Mapping[str, object],
        limit: float,
    ) -> NcclSteps:
        """Run the check in a target with a service's interpreter and environment, for ``limit`` seconds at most.

        Nothing of it is left there, whatever comes of it, except processes that the kernel does not let go: they are
        in its last steps. Raises OSError where it cannot be started.
        """
        ...


class NotifyPort(Protocol):
    """sd_notify, one assignment per call, such as ``READY=1``."""

    def send(self, state: str) -> None: ...


class Permit(Protocol):
    """Asked before a disruptive plan; a door for a fleet lock later."""

    async def acquire(self, plan_id: str, disruption: str) -> str:
        """Why not; "" when granted."""
        ...

    async def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SpecText:
    """What a spec source holds now: the whole text, never half of it."""

    text: str
    origin: str  # for error messages: a path


class SpecSource(Protocol):
    async def read(self) -> SpecText:
        """Raises OSError (missing, unreadable) or ``SpecError`` (wrong owner or mode)."""
        ...


@dataclass(frozen=True, slots=True)
class Ports:
    """Every edge of one host. ``simulated`` names the profile, or is "" on a real host."""

    clock: Clock
    platform: PlatformPort
    pci: PciPort
    nvml: NvmlPort
    holders: HoldersPort
    kernel_log: KernelLogPort
    targets: Callable[[str], TargetPort]  # by target_name()
    inference: InferencePort
    p2p_test: P2PTestPort
    simulated: str = ""
    nccl_check: NcclCheckPort | None = None  # a simulated host has no interpreter to ask
