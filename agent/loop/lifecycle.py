"""The phases of a service's life: preflight, drain, stop, assert stopped, render, start, ready, effective, smoke.

Each method is one phase: it returns when the phase holds, and raises ``PhaseFailedError`` with a reason for people.
Its service is the one as it runs or is to run: placed where its revision has it, which the spec may no longer do.
Deadlines are the caller's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.core.fact import Known, Unknown, value_or
from agent.core.inputs import Inputs
from agent.core.nccl_log import host_memory_failed, not_effective
from agent.core.observation import Gpu, ServiceFacts
from agent.core.preflight import preflight, unit_missing
from agent.core.render import SECRETS, port_of, served_name
from agent.core.resolve import matches
from agent.core.revision import Revision
from agent.core.smoke import check_answer
from agent.core.spec import Service, SmokePrompt, target_name
from agent.core.wedged import IDLE_MEMORY_MIB, computes_for_nobody
from agent.loop.observe import Observer
from agent.loop.p2p_cache import drop_stale
from agent.ports import Ports, TargetPort

POLL = 0.5
SMOKE_TOKENS = 256
READY_TIMEOUT = 60.0
PORT_TIMEOUT = 5.0  # a port that nobody has refuses at once; one that says nothing for so long is taken


class PhaseFailedError(Exception):
    """A phase ended badly: ``reason`` is a CamelCase word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Lifecycle:
    ports: Ports
    observer: Observer

    def target(self, service: Service) -> TargetPort:
        return self.ports.targets(target_name(service.target))

    async def preflight(self, name: str, service: Service, revision: Revision, inputs: Inputs) -> None:
        refusals = preflight(name, service, revision, inputs)
        unit = await self.target(service).unit(service.unit)
        if not refusals and unit.load_state == "not-found":
            refusals = [unit_missing(name, service)]
        if refusals:
            raise PhaseFailedError(refusals[0].reason, "; ".join(r.message for r in refusals))

    async def drain(self, service: Service, seconds: float) -> None:
        """Let running requests finish, for at most ``seconds``; a server that does not tell is stopped at once."""
        url = self.target(service).endpoint(port_of(service))
        deadline = self.ports.clock.monotonic() + seconds
        while self.ports.clock.monotonic() < deadline:
            if not await self._busy(url):
                return
            await self.ports.clock.sleep(POLL)

    async def _busy(self, url: str) -> bool:
        try:
            status, body = await self.ports.inference.get(url, "/server_info", 5.0)
        except OSError:
            return False
        return status == 200 and '"running_requests": 0' not in body and '"running_requests"' in body

    async def stop(self, service: Service, seconds: float) -> None:
        """Ask; past half of the time allowed, kill what is left of the cgroup."""
        target = self.target(service)
        await target.stop_unit(service.unit)
        started, killed = self.ports.clock.monotonic(), False
        while (await target.unit(service.unit)).active_state not in {"inactive", "failed"}:
            waited = self.ports.clock.monotonic() - started
            if waited > seconds / 2 and not killed:
                await target.kill_unit(service.unit)
                killed = True
            if waited > seconds:
                raise PhaseFailedError(
                    "StopTimeout", f"{service.unit} did not stop within {seconds:g} s, SIGKILL included"
                )
            await self.ports.clock.sleep(POLL)

    async def assert_stopped(self, service: Service, gpus: tuple[str, ...]) -> None:
        """Cgroup empty, port free, GPUs without processes and their memory idle; else nothing is started."""
        deadline = self.ports.clock.monotonic() + 30.0
        while (still := await self._still_there(service, gpus)) and self.ports.clock.monotonic() < deadline:
            await self.ports.clock.sleep(POLL)
        if still:
            raise PhaseFailedError(*still)

    async def _still_there(self, service: Service, gpus: tuple[str, ...]) -> tuple[str, str] | None:
        """The first reason, and all that was found: whoever must end something needs to know it all at once."""
        unit = await self.target(service).unit(service.unit)
        pids = ", ".join(map(str, unit.pids))
        if unit.active_state in {"active", "activating", "deactivating", "reloading"}:
            processes = f", with pids {pids}" if pids else ""
            return "NotStopped", f"{service.unit} is {unit.active_state}{processes}"
        found: list[tuple[str, str]] = []
        if pids:
            found.append(("StillHeld", f"processes of {service.unit} outlived it: pids {pids}"))
        if await self._port_taken(service):
            found.append(("PortTaken", f"something still answers on port {port_of(service)}"))
        found += await self._gpus_busy(gpus)
        return (found[0][0], "; ".join(message for _, message in found)) if found else None

    async def _port_taken(self, service: Service) -> bool:
        try:
            await self.ports.inference.get(
                self.target(service).endpoint(port_of(service)), "/v1/models", PORT_TIMEOUT
            )
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True

    async def _gpus_busy(self, gpus: tuple[str, ...]) -> list[tuple[str, str]]:
        drivers = [await self.ports.pci.read_driver(gpu) for gpu in gpus]
        if Known("nvidia") not in drivers:
            return []  # NVML would show none of them, and opening it may load modules
        nvml = await self.ports.nvml.read()
        if not isinstance(nvml, Known):
            return [("GpusUnknown", f"the GPUs' processes cannot be read: {nvml.reason}")]
        # Others are not on nvidia yet, or lost: the binding and the conditions say so.
        seen = {a: g.value for a, g in nvml.value.gpus.items() if a in gpus and isinstance(g, Known)}
        return busy(seen)

    async def render(self, name: str, service: Service, revision: Revision) -> str:
        """Write what differs, read it back; reload systemd where it has not read that yet. Returns a note.

        A reload may cut containers off their GPUs, so there is none without need; and the files may stand since a
        start that was cut short before its reload, so what was written just now is not all that counts.
        """
        target, wrote = self.target(service), False
        for path, text in revision.files.items():
            if await target.read_file(path) != text:
                await target.write_file(path, text)
                wrote = True
                if await target.read_file(path) != text:
                    raise PhaseFailedError(
                        "ReadBackFailed", f"{path} reads back different from what was written"
                    )
        if revision.secrets:
            await target.install_secrets(SECRETS.format(service=name), revision.secrets)
        if wrote or (await target.unit(service.unit)).needs_reload:
            await target.daemon_reload()
            await self._still_has_gpus(service)
        return await drop_stale(target, revision)

    async def _still_has_gpus(self, service: Service) -> None:
        nvml = (await self.target(service).facts()).nvml
        if isinstance(nvml, Unknown) and nvml.code.startswith("Nvml"):
            place = target_name(service.target)
            raise PhaseFailedError(
                "TargetLostGpus", f"NVML fails in {place} after daemon-reload: {nvml.reason}"
            )

    async def start(self, service: Service) -> None:
        target = self.target(service)
        await target.reset_failed(service.unit)
        await target.start_unit(service.unit)

    async def ready(self, service: Service) -> None:
        """Ready means: it generated what it was asked for. /health alone can lie."""
        target, url = self.target(service), self.target(service).endpoint(port_of(service))
        while True:
            unit = await target.unit(service.unit)
            if unit.active_state in {"failed", "inactive"}:
                log = "; ".join((await target.unit_log(service.unit, 3)) or ("no log",))
                message = (
                    f"{service.unit} ended ({unit.result or 'no result'}, status {unit.exit_status}): {log}"
                )
                raise PhaseFailedError("StartFailed", message)
            try:
                answer = await self.ports.inference.complete(
                    url, served_name(service), "Say one word.", 4, READY_TIMEOUT
                )
            except OSError:
                answer = None
            if answer is not None and answer.tokens > 0 and answer.text.strip():
                return
            await self.ports.clock.sleep(POLL)

    async def effective(self, name: str, service: Service, revision: Revision) -> str:
        """What runs is what was declared: process, files, P2P transport. Returns a note for status."""
        facts: ServiceFacts = await self.observer.service(name, service)
        same = matches(revision, facts)
        if same is None:
            reason = (
                facts.process.reason if isinstance(facts.process, Unknown) else "its files cannot be read"
            )
            raise PhaseFailedError("EffectiveUnknown", f"what {name} runs cannot be read: {reason}")
        if not same:
            raise PhaseFailedError(
                "NotEffective", f"{name} does not run the command or environment that was rendered"
            )
        log = await self.target(service).unit_log(service.unit, 2000)
        if contradiction := not_effective(log, p2p=revision.p2p):
            raise PhaseFailedError("NotEffective", contradiction)
        tokens = next(
            (line.partition("max_total_num_tokens=")[2] for line in log if "max_total_num_tokens=" in line),
            "",
        )
        return f"KV cache {tokens.split()[0].rstrip(',')} tokens" if tokens else ""

    async def host_memory(self, revision: Revision) -> str:
        """Why NCCL could not share host memory, by the log of a start without P2P; "" where it does not say that."""
        if revision.p2p or revision.env.get("NCCL_CUMEM_HOST_ENABLE") == "0":
            return ""
        log = await self.ports.targets(revision.target).unit_log(revision.unit, 2000)
        said = "NCCL's log says that with P2P off it cannot share host memory by cuMem (CUDA failure 217)"
        return said if host_memory_failed(log) else ""

    async def smoke(self, service: Service, prompts: tuple[SmokePrompt, ...]) -> None:
        url = self.target(service).endpoint(port_of(service))
        for prompt in prompts:
            try:
                answer = await self.ports.inference.complete(
                    url, served_name(service), prompt.ask, SMOKE_TOKENS, 120.0
                )
            except OSError as error:
                raise PhaseFailedError(
                    "SmokeFailed", f"{prompt.ask!r}: {error or type(error).__name__}"
                ) from error
            problem = check_answer(prompt, answer.text, answer.tokens, answer.finish)
            if problem:
                raise PhaseFailedError("SmokeFailed", f"{prompt.ask!r}: {problem}")


def busy(gpus: Mapping[str, Gpu]) -> list[tuple[str, str]]:
    """(reason, message) of everything on these GPUs that keeps a service from starting; a wedged GPU comes last."""
    found: list[tuple[str, str]] = []
    users: dict[int, list[str]] = {}
    wedged = []
    for address, gpu in sorted(gpus.items()):
        pids, used = value_or(gpu.pids, ()), value_or(gpu.memory_used, 0)
        for pid in pids:
            users.setdefault(pid, []).append(address)
        if isinstance(gpu.pids, Unknown):
            found.append(("GpusUnknown", f"the processes on {address} cannot be read: {gpu.pids.reason}"))
        elif not pids and used > IDLE_MEMORY_MIB:
            found.append(("StillHeld", f"{address} still holds {used} MiB without a visible process"))
        elif computes_for_nobody(gpu):
            message = f"{address} is 100 % busy without a process: only a reset or a reboot ends that"
            wedged.append(("GpuWedged", message))
    named = [("StillHeld", f"pid {pid} still uses {', '.join(users[pid])}") for pid in sorted(users)]
    return [*named, *found, *wedged]
