"""What ``agent retry NAME`` means for the memory: a person takes back what the agent had concluded about NAME."""

from agent.core.memory import Memory, TrialRecord
from agent.core.verdict import P2PVerdict


def retried(memory: Memory, name: str, *, removed: bool = False) -> Memory:
    """``name`` is a service, a GPU or a unit. Rejections, failures, the used budget and revoked verdicts are forgotten.

    ``removed``: the spec has no service of that name. What the agent knew of one is forgotten as a whole: a unit that
    it left running is the operator's from now on.
    """
    if removed:
        memory = _without_service(memory, name)
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


def _without_service(memory: Memory, name: str) -> Memory:
    return memory.model_copy(
        update={
            "promoted": {n: p for n, p in memory.promoted.items() if n != name},
            "previous": {n: p for n, p in memory.previous.items() if n != name},
            "trials": {n: t for n, t in memory.trials.items() if n != name},
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
