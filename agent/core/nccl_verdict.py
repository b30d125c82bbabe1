"""What the steps of an NCCL check come to: pure, from the lines that its processes told until they ended or were ended."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent.core.nccl_log import Route, host_memory_failed, not_effective, routes, version, warnings
from agent.core.record import Record
from agent.core.verdict import PairResult

MOST_NAMED = 4


class NcclStep(Record):
    """One line of the check's journal. Which fields it has depends on ``step``.

    begin, end, ready, done, failed, crashed: of one rank. hung, left, log, alive, finished: of the launcher.
    """

    step: str
    rank: int | None = None
    what: str = ""  # import, init, all_reduce, all_gather, send, leave
    size: int | None = None  # elements of four bytes
    repeat: int | None = None
    source: int | None = None  # ranks
    destination: int | None = None
    wrong: int | None = None  # elements
    first: int | None = None  # index of the first wrong one, and what stood there
    got: int | None = None
    want: int | None = None
    origin: int | None = None  # rank whose part of an all_gather is wrong
    torch: str = ""
    nccl: str = ""
    detail: str = ""
    line: str = ""
    pids: tuple[int, ...] = ()
    at: float = 0.0  # seconds of the target's monotonic clock

    def name(self) -> str:
        """The step in words, the same from every rank that takes part."""
        if self.source is not None:
            return f"send from rank {self.source} to {self.destination} ({self.size} elements)"
        return f"{self.what} of {self.size} elements" if self.size is not None else self.what


@dataclass(frozen=True, slots=True)
class NcclRun:
    """How one run of the check ended. ``good``: every rank did every step, and every element was right."""

    result: PairResult
    detail: str = ""
    findings: tuple[str, ...] = ()  # what was wrong where; bounded
    routes: tuple[Route, ...] = ()
    warnings: tuple[str, ...] = ()
    torch: str = ""
    nccl: str = ""
    left: tuple[int, ...] = ()  # pids that outlived SIGKILL in the target
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NcclCheck:
    """The check of one service. ``control``: the same with P2P off; None where it was not run."""

    service: str
    target: str
    gpus: tuple[str, ...]
    p2p: bool
    why: str  # why P2P is on or off
    run: NcclRun
    control: NcclRun | None


def judge(steps: Sequence[NcclStep], world: int, *, p2p: bool, ended: str = "") -> NcclRun:
    """``p2p``: whether it ran with P2P. ``ended``: why nobody listens any more although it did not finish; "" else."""
    lines = [step.line for step in steps if step.step == "log"]
    result, detail = _result(steps, world, ended)
    contradiction = not_effective(lines, p2p=p2p)
    if result == "good" and contradiction:
        result, detail = "error", contradiction
    told = [step.nccl for step in steps if step.nccl]
    return NcclRun(
        result=result,
        detail=detail,
        findings=_findings(steps),
        routes=routes(lines),
        warnings=warnings(lines),
        torch=next((step.torch for step in steps if step.torch), ""),
        nccl=version(lines) or (told[0] if told else ""),
        left=tuple(pid for step in steps if step.step == "left" for pid in step.pids),
        advice=_advice(lines, p2p=p2p),
    )


def _result(steps: Sequence[NcclStep], world: int, ended: str) -> tuple[PairResult, str]:
    """Wrong data outweighs what came of it: processes that see garbage may hang or die afterwards."""
    wrong = [step for step in steps if step.wrong]
    if wrong:
        return "corrupt", _wrong(wrong[0])
    failed = [step for step in steps if step.step in {"failed", "crashed"}]
    if failed:  # first who died, then who failed first: the others only saw it go
        worst = min(failed, key=lambda step: (step.step != "crashed", step.at))
        began = _open(steps).get(worst.rank) if worst.rank is not None else None
        before = began is not None and began.what == "import"
        said = f" in {began.name()}" if began is not None else ""
        return "not-run" if before else "error", f"rank {worst.rank}{said}: {worst.detail}"
    hung = next((step for step in steps if step.step == "hung"), None)
    if hung is not None or ended:
        why = hung.detail if hung is not None else ended
        return "hung", f"{_open_words(steps) or 'nothing was begun'}: {why}"
    done = {step.rank for step in steps if step.step == "done"}
    if len(done) < world or not any(step.step == "finished" for step in steps):
        return "error", f"it ended early: {len(done)} of {world} processes finished"
    return "good", ""


def _wrong(step: NcclStep) -> str:
    part = f", the part of rank {step.origin}" if step.origin is not None else ""
    return (
        f"{step.name()}: {step.wrong} elements wrong on rank {step.rank}{part}; "
        f"the first at {step.first}: {step.got} instead of {step.want}"
    )


def _findings(steps: Sequence[NcclStep]) -> tuple[str, ...]:
    wrong = [_wrong(step) for step in steps if step.wrong]
    failed = [f"rank {s.rank}: {s.detail}" for s in steps if s.step in {"failed", "crashed"}]
    found = list(dict.fromkeys(wrong + failed))
    more = len(found) - 20
    return (*found[:20], *((f"and {more} more",) if more > 0 else ()))


def _open(steps: Sequence[NcclStep]) -> dict[int, NcclStep]:
    """By rank: the step that it began and did not end."""
    found: dict[int, NcclStep] = {}
    for step in steps:
        if step.rank is None:
            continue
        if step.step == "begin":
            found[step.rank] = step
        elif step.step in {"end", "done"}:
            found.pop(step.rank, None)
    return found


def _open_words(steps: Sequence[NcclStep]) -> str:
    """As "all_reduce of 1 elements (ranks 0, 1)". Who is furthest behind comes first: the others wait for it."""
    by_name: dict[str, list[int]] = {}
    ended = Counter(step.rank for step in steps if step.step == "end")
    for rank, step in sorted(_open(steps).items(), key=lambda item: (ended[item[0]], item[0])):
        by_name.setdefault(step.name(), []).append(rank)
    words = [
        f"{name} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        for name, ranks in by_name.items()
    ]
    more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return ", ".join(words[:MOST_NAMED]) + more


def _advice(lines: Sequence[str], *, p2p: bool) -> tuple[str, ...]:
    if host_memory_failed(lines) and not p2p:
        return ("with P2P off here, NCCL_CUMEM_HOST_ENABLE: 0 is needed under nccl: in the spec",)
    return ()
