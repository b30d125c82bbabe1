"""What ``agent retry NAME`` means for the memory: a person takes back what the agent had concluded about NAME."""

from agent.core.memory import Memory, TrialRecord
from agent.core.verdict import P2PVerdict


def retried(memory: Memory, name: str) -> Memory:
    """``name`` is a service, a GPU or a unit. Rejections, failures, the used budget and revoked verdicts are forgotten."""
    mine = {k for k in (*memory.terminal, *memory.failures) if k.endswith(f"/{name}")}
    return memory.model_copy(
        update={
            "rejected": {n: r for n, r in memory.rejected.items() if n != name},
            "terminal": {k: v for k, v in memory.terminal.items() if k not in mine},
            "failures": {k: v for k, v in memory.failures.items() if k not in mine},
            "retry_after": {k: v for k, v in memory.retry_after.items() if k not in mine},
            "errors": {k: v for k, v in memory.errors.items() if k not in mine},
            "starts": (),
            "asked": tuple(sorted({*memory.asked, name})),
            "trials": {n: _measure_again(t) if n == name else t for n, t in memory.trials.items()},
            "verdicts": tuple(v for v in memory.verdicts if not (v.revoked and _concerns(v, name, memory))),
        }
    )


def _measure_again(trial: TrialRecord) -> TrialRecord:
    """A degraded verdict asked about again: the revision runs, and its figures are no longer taken as known."""
    return trial.model_copy(update={"outcome": "superseded"}) if trial.outcome == "degraded" else trial


def _concerns(verdict: P2PVerdict, name: str, memory: Memory) -> bool:
    if name in verdict.gpus:
        return True
    records = (memory.promoted.get(name), memory.trials.get(name))
    revisions = [r.revision for r in records if r is not None and r.revision is not None]
    return any(tuple(sorted(r.gpus)) == verdict.gpus for r in revisions)
