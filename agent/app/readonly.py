"""Looking without touching: ``plan`` and ``observe`` write nothing and need no lock."""

from agent.app.paths import Paths
from agent.app.wiring import Choice, open_host
from agent.core.errors import AgentError, SpecError, TerminalError
from agent.core.inputs import Inputs
from agent.core.laws import check_plan
from agent.core.memory import Memory
from agent.core.observation import Observation
from agent.core.plan import Plan
from agent.core.settle import barred
from agent.core.spec import GpuHost
from agent.core.spec_load import LoadedSpec, load
from agent.kind import plan_all, trajectory
from agent.kinds import ALL
from agent.loop.absorb import absorb
from agent.loop.health import HealthProbe
from agent.loop.observe import Observer
from agent.loop.specs import adopt
from agent.loop.store import saved_kernel_log

EMPTY_SPEC = {"apiVersion": "gpu-host/v1", "kind": "GpuHost", "metadata": {"name": "none"}, "spec": {}}


async def plan_only(choice: Choice, paths: Paths) -> tuple[Plan, str, bool, str]:
    """The plan for the spec file as it is now, why it would not be executed ("" when it would), whether an approval
    would let it, and the simulated host's profile ("" on a real host).
    """
    inputs, simulated = await inputs_now(choice, paths)
    plan = plan_all(ALL, inputs)
    violations = check_plan(plan, inputs, trajectory(ALL, plan, inputs))
    blocked, approvable = barred(plan, inputs, violations)
    return plan, blocked, approvable, simulated


async def inputs_now(choice: Choice, paths: Paths) -> tuple[Inputs, str]:
    """What a pass would begin with now, for the spec file as it is; and the simulated host's profile."""
    loaded = _load(paths)
    memory = adopt(remembered(paths), _in_force(paths), loaded)
    obs, simulated, now = await _observe(choice, paths, loaded.spec, memory)
    known = absorb(memory, obs, now)
    return Inputs(loaded.spec, memory.generation, obs, known, now, bool(simulated)), simulated


async def observe_only(choice: Choice, paths: Paths) -> tuple[Observation, str]:
    """Every fact of this host; with a spec that can be read, also its targets and services."""
    obs, simulated, _ = await _observe(choice, paths, spec_or_none(paths), remembered(paths))
    return obs, simulated


def spec_or_none(paths: Paths) -> GpuHost:
    """The spec; one that says nothing where there is none that can be read."""
    try:
        return load(paths.spec.read_text(encoding="utf-8"), str(paths.spec)).spec
    except (OSError, UnicodeDecodeError, SpecError):
        return GpuHost.model_validate(EMPTY_SPEC)


async def _observe(
    choice: Choice, paths: Paths, host: GpuHost, memory: Memory
) -> tuple[Observation, str, float]:
    opened = open_host(choice, paths, lambda: host.spec.platform.modules)
    ports = opened.ports
    health = HealthProbe(ports)
    try:
        # Where the daemon's records end, this goes on: lines that the kernel has overwritten since are in them only.
        observer = Observer(ports, health, kernel_log=saved_kernel_log(paths.state))
        return await observer.observe(host, memory), ports.simulated, ports.clock.now()
    except (AgentError, OSError):
        raise
    except Exception as error:
        # A defect of an adapter: the person who asked gets a sentence, and can report it.
        step = "report it with this line: it is a defect of the agent"
        raise TerminalError(
            f"reading the host failed: {error!r}", reason="ReadFailed", next_step=step
        ) from error
    finally:
        await health.close()
        await opened.close()


def _load(paths: Paths) -> LoadedSpec:
    try:
        return load(paths.spec.read_text(encoding="utf-8"), str(paths.spec))
    except FileNotFoundError as error:
        step = "write one there (specs/ has recipes), or name one with --spec FILE"
        raise TerminalError(
            f"{paths.spec}: there is no spec", reason="SpecMissing", next_step=step
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError((f"{paths.spec}:1:1: found bytes that are not UTF-8, expected text",)) from error


def _in_force(paths: Paths) -> GpuHost | None:
    """The spec that the daemon accepted last, if one ever was."""
    accepted = paths.state / "spec.accepted.yaml"
    try:
        return load(accepted.read_text(encoding="utf-8"), str(accepted)).spec
    except (OSError, SpecError):
        return None


def remembered(paths: Paths) -> Memory:
    path = paths.state / "memory.json"
    return Memory.model_validate_json(path.read_bytes()) if path.exists() else Memory()
