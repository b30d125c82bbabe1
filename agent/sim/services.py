"""What becomes of an SGLang process that was just started: it serves, hangs or crashes, as the host's state decides.

The rules are those that operators of such hosts have met; they are a model and measure nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING

from agent.core.nccl import strtoll
from agent.sim import kernel
from agent.sim.conditions import Started, holds, nccl_value
from agent.sim.holding import on_nvidia
from agent.sim.scenario import Crash
from agent.sim.state import TargetState, UnitEnd, UnitState

if TYPE_CHECKING:
    from agent.sim.world import World

SHM_NEEDED = 1 << 30
SIGKILL = 9


@dataclass(slots=True)
class Fate:
    """How a start goes on. ``crash`` and ``hang`` exclude each other; neither: it serves after loading."""

    crash: Crash | None = None
    hang: bool = False
    gpus: list[str] = field(default_factory=list)
    log: list[tuple[float, str]] = field(default_factory=list)  # (seconds after the start, line)


def begin(world: "World", target_name: str, name: str, unit: UnitState, *, scripted: bool) -> None:
    """Decide the fate of a process whose argv and environment stand, and write it into the unit.

    ``scripted``: the scenario's faults apply. What ran before the scenario began is not struck by them.
    """
    target = world.state.targets[target_name]
    p2p = _p2p_on(target, unit)
    started = Started(unit.argv, unit.env, p2p)
    unit.p2p = p2p
    fate = _fate(world, target_name, name, started, scripted=scripted)
    unit.gpus = fate.gpus
    for after, line in fate.log:
        unit.log.append((unit.started_at + after, line))
    if fate.crash is not None:
        signal = fate.crash.signal
        unit.end = UnitEnd(
            at=unit.started_at + fate.crash.after,
            result="signal" if signal else "exit-code" if fate.crash.status else "success",
            status=signal or fate.crash.status,
            log=list(fate.crash.log),
        )
        return
    unit.hung = fate.hang
    if not fate.hang:
        change = world.faults.strike("server", (target_name, name), started) if scripted else None
        unit.server = change.changes() if change is not None else {}
        unit.load_seconds = unit.server.get("load_seconds", world.profile.serving.load_seconds)
        _say_loading(world, target, unit, started)


def _p2p_on(target: TargetState, unit: UnitState) -> bool:
    files = {path: file.text for path, file in target.files.items()}
    return strtoll(nccl_value("NCCL_P2P_DISABLE", unit.env, files) or "0")[0] == 0


def _fate(world: "World", target_name: str, name: str, started: Started, *, scripted: bool) -> Fate:
    target = world.state.targets[target_name]
    if (crash := _cannot_run(world, target, started)) is not None:
        return Fate(crash=crash)
    fate = Fate(gpus=_gpus(world, started)[: started.tensor_parallel])
    rule = world.faults.strike("service.start", (target_name, name), started) if scripted else None
    if rule is not None and rule.crash is not None:
        fate.crash = rule.crash
        return fate
    if rule is not None and rule.hang:
        fate.hang = True
        return fate
    if (crash := _gpu_trouble(world, target, name, started, fate.gpus)) is not None:
        fate.crash = crash
        return fate
    _communicate(world, target, started, fate)
    return fate


def _cannot_run(world: "World", target: TargetState, started: Started) -> Crash | None:
    python = started.argv[0]
    if python not in target.paths and python not in target.files:
        return Crash(
            status=203, after=0.0, log=(f"Failed at step EXEC spawning {python}: No such file or directory",)
        )
    model = started.flag("model-path", "model") or ""
    if not _exists(target, model):
        return Crash(status=1, after=3.0, log=(f"OSError: {model} is not a local folder",))
    if target.nvml_code:
        return Crash(
            status=1, after=2.0, log=(f"NVMLError {target.nvml_code}: NVML failed in this container",)
        )
    if target.user_driver != world.state.driver_version:
        line = (
            f"Failed to initialize NVML: Driver/library version mismatch (NVML library {target.user_driver})"
        )
        return Crash(status=1, after=2.0, log=(line,))
    return None


def _exists(target: TargetState, path: str) -> bool:
    known = (*target.paths, *target.files)
    return any(path == one or one.startswith(path.rstrip("/") + "/") for one in known)


def _gpus(world: "World", started: Started) -> list[str]:
    """The GPUs that CUDA shows the process, in its order: by UUID, or by index over bus order."""
    seen = on_nvidia(world.state)
    visible = started.env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return seen
    chosen: list[str] = []
    for item in visible.split(","):
        match = [
            address
            for index, address in enumerate(seen)
            if item == str(index)
            or (item.startswith("GPU-") and world.state.gpus[address].uuid.startswith(item))
        ]
        if len(match) != 1:
            break  # CUDA stops at the first device that it does not know
        chosen += match
    return chosen


def _gpu_trouble(
    world: "World", target: TargetState, name: str, started: Started, gpus: list[str]
) -> Crash | None:
    wanted = started.tensor_parallel
    if len(gpus) < wanted:
        line = f"RuntimeError: CUDA error: invalid device ordinal ({len(gpus)} GPUs visible, tensor parallel {wanted})"
        return Crash(status=1, after=5.0, log=(line,))
    for other_name, other in ((n, u) for t in world.state.targets.values() for n, u in t.units.items()):
        for orphan in other.orphans:
            if orphan.port == started.port:
                return _port_taken(started)
            if set(orphan.gpus) & set(gpus):
                return _out_of_memory("the model's weights")
        if other_name != name and other.argv and other.active_state == "active" and other.holds is None:
            if Started(other.argv, other.env).port == started.port:
                return _port_taken(started)
            if set(other.gpus) & set(gpus):
                return _out_of_memory("the model's weights")
    p2p_off_over_shm = not started.p2p and wanted > 1
    if p2p_off_over_shm and target.shm_bytes is not None and target.shm_bytes < SHM_NEEDED:
        line = (
            "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-0001: No space left on device"
        )
        return Crash(status=1, after=20.0, log=(line,))
    return None


def _port_taken(started: Started) -> Crash:
    line = f"ERROR: [Errno 98] error while attempting to bind on address ('0.0.0.0', {started.port}): address already in use"
    return Crash(status=1, after=5.0, log=(line,))


def _out_of_memory(what: str) -> Crash:
    """The launcher kills itself when a scheduler dies: status 9, which is not the kernel's OOM killer."""
    line = f"torch.OutOfMemoryError: CUDA out of memory while allocating {what}"
    return Crash(signal=SIGKILL, after=15.0, log=(line,))


def _communicate(world: "World", target: TargetState, started: Started, fate: Fate) -> None:
    """The first collective: garbled peers make NCCL wait for ever."""
    fate.log.append((4.0, "Init torch distributed begin."))
    bad = [a for a in fate.gpus if kernel.translated(world.state, a)]
    over_peers = started.p2p and started.tensor_parallel > 1
    if over_peers and bad:
        unit_age = max(0.0, world.sim_now() - _started_at(target, started))
        kernel.page_faults(world, list(permutations(fate.gpus, 2)), ago=unit_age)
        fate.hang = True
    # SGLang drops its custom all-reduce by itself on more than two GPUs without NVLink.
    custom = started.tensor_parallel == 2 and started.flag("disable-custom-all-reduce") is None
    if custom and bad and not fate.hang:
        kernel.page_faults(world, list(permutations(fate.gpus, 2)))
        fate.hang = True
    if started.env.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE") and started.tensor_parallel > 1:
        fate.log += [(12.0, line) for line in _transport(started)]


def _started_at(target: TargetState, started: Started) -> float:
    return max((u.started_at for u in target.units.values() if u.argv is started.argv), default=0.0)


def _transport(started: Started) -> Iterator[str]:
    via = "P2P/CUMEM" if started.p2p else "SHM/direct/direct"
    for rank in range(started.tensor_parallel):
        peer = (rank + 1) % started.tensor_parallel
        yield f"NCCL INFO Channel 00/0 : {rank}[{rank}] -> {peer}[{peer}] via {via}"


def _say_loading(world: "World", target: TargetState, unit: UnitState, started: Started) -> None:
    load = unit.load_seconds or 0.0
    tokens = unit.server.get("max_total_tokens", world.profile.serving.max_total_tokens)
    version = unit.server.get("version", target.sglang_version)
    lines = (
        (
            0.02,
            f"sglang {version} server_args: tp_size={started.tensor_parallel}, port={started.port} (simulated)",
        ),
        (0.3, "Load weight begin."),
        (0.8, "Load weight end."),
        (0.9, f"max_total_num_tokens={tokens}, chunked_prefill_size=8192, context_len=262144"),
        (1.0, "The server is fired up and ready to roll!"),
    )
    for share, line in lines:
        unit.log.append((unit.started_at + share * load, line))


def speeds(world: "World", unit: UnitState) -> list[tuple[int, float]]:
    """The profile's table under every effect whose condition this start meets."""
    started = Started(unit.argv, unit.env, unit.p2p and len(unit.gpus) > 1)
    table = []
    for concurrency, speed in world.profile.serving.speeds:
        factor = 1.0
        for effect in world.profile.serving.effects:
            within = effect.min_concurrency <= concurrency <= effect.max_concurrency
            if within and holds(effect.when, started):
                factor *= effect.factor
        table.append((concurrency, speed * factor))
    return table
