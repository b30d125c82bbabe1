"""What operators and hosts do to a rig, in the words of the case tests."""

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

import tests.rig
from agent.core.status import ServiceStatus
from agent.loop.store import leave_request
from agent.sim import systemd
from agent.sim.merge import merge
from agent.sim.state import TargetState, UnitEnd, UnitState
from tests.rig import Rig

UNIT = "sglang-qwen.service"
TARGET = "lxc:129"
INFERENCE = ("0000:01:00.0", "0000:11:00.0", "0000:61:00.0", "0000:71:00.0")

# A host on which peer DMA is right: the IOMMU passes through, so SEV-SNP is off.
PASSTHROUGH = """
set:
  groups: {"*": {type: identity}}
  sevSnp: false
"""
ANY_PLATFORM = {"iommu": "any", "sevSnp": "any"}

# At the rig's compression a level lasts milliseconds: on a busy machine its figures are far off, and no test here is
# about a little slower.
CALM = {"regression": {"throughput": "99%", "latencyP50": "9999%", "latencyP95": "9999%"}}

# The next revision, told apart from the promoted one by a flag that scenarios can name.
CANDIDATE = {"max-running-requests": 64}
WHEN = "when: {flag: max-running-requests, exists: true}"


def recipe(**changes: Any) -> str:
    """The first recipe with the quick gate and without an opinion on speed."""
    data: Any = json.loads(tests.rig.recipe(**qwen(gate=CALM)))
    data["spec"] = merge(data["spec"], changes)
    return json.dumps(data, indent=2)


def rig(
    root: Path,
    *,
    spec: str | None = None,
    scenario: str | Path | None = None,
    factor: float | None = tests.rig.FACTOR,
) -> AbstractAsyncContextManager[Rig]:
    return tests.rig.rig(root, spec=spec or recipe(), scenario=scenario, factor=factor)


def patient_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health as asked for after a restart of the agent, also on a machine too busy to bring up a server in 150 ms."""
    monkeypatch.setattr("agent.loop.health.TIMEOUT", 1000.0)


def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits after failures; and on a busy machine the first request is not given up and asked again, since
    scenarios count requests."""
    monkeypatch.setattr("agent.loop.execute.BACKOFF_FIRST", 0.05)
    monkeypatch.setattr("agent.loop.lifecycle.READY_TIMEOUT", 1000.0)


def qwen(**changes: Any) -> dict[str, Any]:
    """A change of the recipe's one service."""
    return {"services": {"qwen": changes}}


def on_any_platform(**changes: Any) -> str:
    """The recipe for a host whose IOMMU mode and SEV-SNP the spec leaves open."""
    return recipe(**{"platform": ANY_PLATFORM, **changes})


def service(rig: Rig, name: str = "qwen") -> ServiceStatus:
    return next(s for s in rig.status().services if s.name == name)


def target(rig: Rig) -> TargetState:
    return rig.world.state.targets[TARGET]


def unit(rig: Rig) -> UnitState:
    return target(rig).units[UNIT]


def starts(rig: Rig) -> int:
    """How often a start of the service was asked for in the host's whole life."""
    return rig.world.writes.count(f"target.start_unit {TARGET} {UNIT}")


def stops(rig: Rig) -> int:
    return rig.world.writes.count(f"target.stop_unit {TARGET} {UNIT}")


def service_dies(rig: Rig, *log: str) -> None:
    """The main process is killed, as by the kernel or by its own launcher."""
    with rig.world.change():
        end = UnitEnd(at=rig.world.sim_now(), result="signal", status=9, log=list(log))
        systemd.finish(rig.world, TARGET, UNIT, end)


def kernel_says(rig: Rig, line: str, times: int = 1) -> None:
    with rig.world.change():
        rig.world.log(line, times)


def asks(rig: Rig, verb: str, argument: str) -> None:
    """``agent approve`` and ``agent retry``."""
    leave_request(rig.agent.paths.state, verb, argument)


def phases(rig: Rig, name: str = "qwen") -> list[str]:
    """The phases of the last trial and how each ended: ``ready ok``."""
    return [f"{n.phase} {n.result}" for n in rig.memory.trials[name].notes]


def journal(rig: Rig) -> list[dict[str, Any]]:
    text = (rig.agent.paths.state / "journal.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def files_under(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


async def promoted_then(agent: Rig, **changes: object) -> str:
    """A promoted revision, then the candidate with these changes; the promoted revision's id."""
    await agent.converge()
    good = service(agent).revision
    assert agent.status().ready == "True"
    agent.write_spec(recipe(**qwen(args=CANDIDATE, **changes)))
    await agent.converge()
    return good


def assert_rolled_back(agent: Rig, good: str, reason: str, message: str) -> None:
    """The last good revision runs, and the operator reads why and what to do."""
    shown = service(agent)
    assert shown.revision == shown.promoted == good
    assert shown.health == "ok"
    assert "--max-running-requests" not in unit(agent).argv
    assert shown.trial is not None
    assert (shown.trial.outcome, shown.trial.restored) == ("rolled-back", good)
    assert shown.trial.reason == reason
    condition = agent.condition("ServiceReady/qwen")
    assert (condition.status, condition.reason) == ("False", "RolledBack")
    assert message in condition.message
    assert "agent retry qwen" in condition.next_step
    assert agent.status().ready == "False"


async def wait_out_backoff(agent: Rig) -> None:
    left = max(agent.memory.retry_after.values(), default=0.0) - agent.host.ports.clock.now()
    await agent.host.ports.clock.sleep(max(0.0, left + 0.01) * agent.factor if agent.factor else 0.0)
