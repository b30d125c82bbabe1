"""The trial as a state machine: pure, so that every transition can be replayed in a test.

    render -> start -> ready -> effective -> smoke -> benchmark -> judge -> promoted
       any phase fails or passes its deadline  -> rollback (or hold)
       judge is inconclusive, first attempt    -> once more from assert-stopped
       the spec is edited meanwhile            -> superseded

Preflight, drain, stop and assert-stopped come before it as plan actions of their own, because driver changes stand
between them and the start; ``assert-stopped`` is repeated here at no cost.
"""

from dataclasses import dataclass
from typing import Literal

from agent.core.memory import Outcome, Phase

TRIAL_PHASES: tuple[Phase, ...] = (
    "assert-stopped", "render", "start", "ready", "effective", "smoke", "benchmark", "judge",
)  # fmt: skip
PROVE_PHASES: tuple[Phase, ...] = ("ready", "effective", "smoke", "benchmark", "judge")
RESTORE_PHASES: tuple[Phase, ...] = (
    "stop",
    "assert-stopped",
    "render",
    "start",
    "ready",
    "effective",
    "smoke",
)

PhaseResult = Literal["ok", "failed", "timeout", "inconclusive", "superseded"]
StepKind = Literal["phase", "again", "restore", "stop", "finish"]


@dataclass(frozen=True, slots=True)
class Step:
    """What a trial does next: a phase, or how it ends."""

    kind: StepKind
    phase: Phase | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class TrialState:
    """Where a trial stands: which sequence, which phase has just ended, which attempt this is."""

    phases: tuple[Phase, ...]
    phase: Phase
    attempt: int
    has_last_good: bool
    on_failure: Literal["rollback", "hold"]


def next_step(state: TrialState, result: PhaseResult) -> Step:
    """The one transition function of a trial."""
    if result == "superseded":
        return Step("finish", outcome="superseded")
    if result == "ok":
        index = state.phases.index(state.phase) + 1
        if index < len(state.phases):
            return Step("phase", state.phases[index])
        return Step("finish", outcome="promoted")
    if result == "inconclusive" and state.attempt == 1:
        return Step("again")
    if state.phase == "assert-stopped":
        # Something still holds the GPUs or the port: neither revision could start, and nothing was started.
        return Step("finish", outcome="failed")
    if state.on_failure == "hold" or not state.has_last_good:
        return Step("stop", outcome="held")
    return Step("restore", outcome="rolled-back")


def after_restore(result: PhaseResult) -> Outcome:
    """How a trial ends once the last good revision was started again."""
    if result == "superseded":
        return "superseded"
    return "rolled-back" if result == "ok" else "failed"


def deadline_of(phase: Phase, *, start: float, drain: float, stop: float, benchmark: float) -> float:
    """Seconds that a phase may take. Every phase has a deadline; every deadline has an outcome."""
    return {
        "preflight": 60.0,
        "drain": drain,
        "stop": stop,
        "assert-stopped": 60.0,
        "render": 60.0,
        "start": 60.0,
        "ready": start,
        "effective": 60.0,
        "smoke": 300.0,
        "benchmark": benchmark,
        "judge": 10.0,
    }[phase]
