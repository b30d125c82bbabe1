"""The judgement of a benchmark: pass, fail or inconclusive; and the baselines it is judged against.

Hard facts first, then floors, then regression. What was measured can prove a failure; only a whole measurement
can prove a pass; no data proves nothing.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Literal

from agent.core.bench import Baseline, BenchmarkKey, BenchmarkResult, LevelResult
from agent.core.record import Record
from agent.core.spec import Gate

Verdict = Literal["pass", "fail", "inconclusive"]

KEEP = 10  # results of one baseline
LEARN_FROM = 3  # restarts; fewer say nothing about how much restarts differ
SPREADS = 3.0
LEARNED_LIMIT = 0.30  # learned noise never excuses more than this


class Comparison(Record):
    """One figure against a floor of the spec or the baseline; latencies in seconds, throughput in tokens per second."""

    concurrency: int
    figure: Literal["throughput", "latency p50", "latency p95"]
    basis: Literal["floor", "baseline"]
    measured: float
    reference: float
    tolerance: float = 0.0  # a fraction of the reference
    ok: bool

    def say(self) -> str:
        value = _rate if self.figure == "throughput" else _seconds
        text = f"C={self.concurrency}: {self.figure} {value(self.measured)}"
        if self.basis == "floor":
            return f"{text}, {'at least' if self.ok else 'below'} the floor of {value(self.reference)}"
        change = self.measured / self.reference - 1.0
        return f"{text}, {change:+.1%} against the baseline of {value(self.reference)} (tolerance {self.tolerance:.1%})"


class Judgement(Record):
    verdict: Verdict
    reason: str  # CamelCase, for conditions
    message: str
    comparisons: tuple[Comparison, ...] = ()


class _Failure(Record):
    reason: str
    message: str


def judge(result: BenchmarkResult | None, gate: Gate, baseline: Baseline | None) -> Judgement:
    """Judge one benchmark. A baseline with another key is never compared with."""
    if result is None or not sum(level.tokens for level in result.levels):
        return Judgement(verdict="inconclusive", reason="NoData", message=_no_data(result))
    same = baseline if baseline is not None and baseline.key == result.key else None
    comparisons = tuple(c for level in result.levels for c in _compare(level, gate, same))
    failures = [failure for level in result.levels for failure in _failures(level, gate, same)]
    if failures:
        ranked = sorted(failures, key=lambda f: _REASONS.index(f.reason))
        more = f"; and {len(ranked) - 2} more" if len(ranked) > 2 else ""
        message = "; ".join(f.message for f in ranked[:2]) + more
        return Judgement(verdict="fail", reason=ranked[0].reason, message=message, comparisons=comparisons)
    if gap := _gap(result, gate):
        return Judgement(
            verdict="inconclusive", reason=gap.reason, message=gap.message, comparisons=comparisons
        )
    reason, message = _praise(result, same, baseline)
    return Judgement(verdict="pass", reason=reason, message=message, comparisons=comparisons)


def certain_failure(level: LevelResult, gate: Gate, baseline: Baseline | None) -> str:
    """Why this level alone already decides a failure, or "": then the other levels need not be measured.

    ``baseline`` must be the one of this benchmark's own key.
    """
    found = _failures(level, gate, baseline) if level.tokens else []
    return found[0].message if found else ""


def baseline_for(baselines: tuple[Baseline, ...], key: BenchmarkKey) -> Baseline | None:
    return next((b for b in baselines if b.key == key), None)


def add_result(baselines: tuple[Baseline, ...], result: BenchmarkResult) -> tuple[Baseline, ...]:
    """The baselines with one more promoted result under its own key; the last ten are kept."""
    if baseline_for(baselines, result.key) is None:
        return (*baselines, Baseline(key=result.key, results=(result,)))
    return tuple(
        Baseline(key=b.key, results=(*b.results, result)[-KEEP:]) if b.key == result.key else b
        for b in baselines
    )


_REASONS = ("RequestsFailed", "WrongTokenCount", "BelowFloor", "ThroughputRegressed", "LatencyRegressed")


def _failures(level: LevelResult, gate: Gate, baseline: Baseline | None) -> list[_Failure]:
    """What this level proves; a level that cannot be used proves nothing."""
    if _unusable(level):
        return []
    where, said = f"C={level.concurrency}", f" ({level.errors[0]})" if level.errors else ""
    if level.ok < level.requests:
        text = f"{where}: {level.requests - level.ok} of {level.requests} requests failed{said}"
        return [_Failure(reason="RequestsFailed", message=text)]
    if level.tokens != level.expected_tokens:
        text = f"{where}: {level.tokens:,} tokens came where {level.expected_tokens:,} were asked for{said}"
        return [_Failure(reason="WrongTokenCount", message=text)]
    return [_Failure(reason=_reason(c), message=c.say()) for c in _compare(level, gate, baseline) if not c.ok]


def _reason(comparison: Comparison) -> str:
    if comparison.basis == "floor":
        return "BelowFloor"
    return "ThroughputRegressed" if comparison.figure == "throughput" else "LatencyRegressed"


def _unusable(level: LevelResult) -> str:
    """Why the level's figures do not count; "" when they do."""
    if level.void:
        return level.void
    figures = (level.throughput, level.wall, level.e2e.p50, level.e2e.p95)
    if level.requests < 1 or level.expected_tokens < 1:
        return "nothing was asked for"
    if level.tokens and not all(math.isfinite(f) and f > 0 for f in figures):
        return "the figures are not positive numbers"
    return ""


def _compare(level: LevelResult, gate: Gate, baseline: Baseline | None) -> Iterator[Comparison]:
    if _unusable(level) or not level.tokens:
        return
    floor = gate.require.get(level.concurrency)
    if floor is not None:
        yield Comparison(
            concurrency=level.concurrency,
            figure="throughput",
            basis="floor",
            measured=level.throughput,
            reference=floor,
            ok=level.throughput >= floor,
        )
    limits = gate.regression
    yield from _against(level, baseline, "throughput", limits.throughput)
    yield from _against(level, baseline, "latency p50", limits.latency_p50)
    yield from _against(level, baseline, "latency p95", limits.latency_p95)


_FIGURES: dict[str, Callable[[LevelResult], float]] = {
    "throughput": lambda level: level.throughput,
    "latency p50": lambda level: level.e2e.p50,
    "latency p95": lambda level: level.e2e.p95,
}


def _against(
    level: LevelResult,
    baseline: Baseline | None,
    figure: Literal["throughput", "latency p50", "latency p95"],
    allowed: float,
) -> Iterator[Comparison]:
    """Compare with the median of the baseline's restarts."""
    read = _FIGURES[figure]
    past = [
        read(old)
        for result in (baseline.results if baseline is not None else ())
        for old in result.levels
        if old.concurrency == level.concurrency and not _unusable(old) and old.tokens
    ]
    if not past:
        return
    reference, measured = statistics.median(past), read(level)
    change = measured / reference - 1.0
    loss = -change if figure == "throughput" else change
    tolerance = max(allowed, min(LEARNED_LIMIT, SPREADS * restart_spread(past)))
    yield Comparison(
        concurrency=level.concurrency,
        figure=figure,
        basis="baseline",
        measured=measured,
        reference=reference,
        tolerance=tolerance,
        ok=loss <= tolerance,
    )


def restart_spread(figures: list[float]) -> float:
    """How much restarts differ: sample standard deviation over median; 0.0 while there are too few to tell."""
    if len(figures) < LEARN_FROM:
        return 0.0
    return statistics.stdev(figures) / statistics.median(figures)


def _gap(result: BenchmarkResult, gate: Gate) -> _Failure | None:
    """What is missing for a pass."""
    if not result.complete:
        return _Failure(
            reason="Incomplete", message=f"the benchmark did not end: {result.note or 'no reason given'}"
        )
    measured = {level.concurrency: level for level in result.levels}
    for level in result.levels:
        if why := _unusable(level):
            return _Failure(reason="LevelVoid", message=f"C={level.concurrency} does not count: {why}")
        asked = level.concurrency * gate.benchmark.requests_per_slot
        if level.requests < asked:
            text = f"C={level.concurrency}: {level.requests} requests measured, {asked} are needed"
            return _Failure(reason="TooLittleData", message=text)
    missing = [str(c) for c in sorted({*gate.benchmark.concurrency, *gate.require}) if c not in measured]
    if missing:
        return _Failure(reason="LevelMissing", message=f"not measured: C={', C='.join(missing)}")
    return None


def _no_data(result: BenchmarkResult | None) -> str:
    if result is None:
        return "the benchmark gave no result"
    if not result.levels:
        return f"the benchmark measured no level{': ' + result.note if result.note else ''}"
    first = next((level.errors[0] for level in result.levels if level.errors), result.note)
    return f"no token came at any level{': ' + first if first else ''}"


def _praise(result: BenchmarkResult, same: Baseline | None, given: Baseline | None) -> tuple[str, str]:
    best = max(result.levels, key=lambda level: level.throughput)
    figures = f"{_rate(best.throughput)} at C={best.concurrency}"
    if same is not None and same.results:
        count = len(same.results)
        return (
            "WithinTolerance",
            f"{figures}, within tolerance of the baseline of {count} start{'s' * (count != 1)}",
        )
    if given is not None and given.key != result.key:
        differs = [n for n in BenchmarkKey.model_fields if getattr(given.key, n) != getattr(result.key, n)]
        return (
            "FirstFigures",
            f"{figures}; no baseline to compare with ({', '.join(differs)} differ): first figures",
        )
    return "FirstFigures", f"{figures}; no baseline: first figures"


def _rate(value: float) -> str:
    return f"{value:,.0f} tok/s" if value >= 1000 else f"{value:.1f} tok/s"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
