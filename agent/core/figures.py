"""From single measurements to the figures of one concurrency level; pure arithmetic, in bounded memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.core.bench import LevelResult, Quantiles

_STEP = math.log(1.01)
_LEAST = 1e-7  # shorter is no duration that a socket could show

CPU_LIMIT = 0.85  # of one CPU; an event loop busier than this delays what it measures
LAG_SHARE = 0.20  # of the time between two chunks of a stream
LAG_FLOOR = 0.005  # seconds; timers on a healthy host are late by less than this
LAG_SAMPLES = 20  # fewer say nothing about a 95th percentile


class Histogram:
    """Counts of positive numbers in bins one percent wide: at most some thousand bins however long the run.

    A quantile is off by at most half a percent.
    """

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self.count = 0

    def add(self, value: float, count: int = 1) -> None:
        number = round(math.log(max(value, _LEAST)) / _STEP)
        self._bins[number] = self._bins.get(number, 0) + count
        self.count += count

    def quantile(self, fraction: float) -> float:
        """By nearest rank; 0.0 when nothing was added."""
        rank, seen = fraction * self.count, 0
        for number in sorted(self._bins):
            seen += self._bins[number]
            if seen >= rank:
                return math.exp(number * _STEP)
        return 0.0

    def quantiles(self) -> Quantiles:
        return Quantiles(p50=self.quantile(0.50), p95=self.quantile(0.95), p99=self.quantile(0.99))


@dataclass(slots=True)
class Samples:
    """All measured requests of one level, in seconds (``rate``: tokens per second)."""

    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)  # one entry per token
    gap: Histogram = field(default_factory=Histogram)  # one entry per read that brought tokens
    e2e: Histogram = field(default_factory=Histogram)
    rate: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True)
class Repeat:
    """One measured repeat of a level. ``tokens``: of the requests that were answered, by the server's usage."""

    requests: int
    ok: int
    tokens: int
    expected_tokens: int
    wall: float

    @property
    def throughput(self) -> float:
        return self.tokens / self.wall if self.wall > 0 else 0.0

    @property
    def flaw(self) -> tuple[int, int]:
        return self.requests - self.ok, abs(self.expected_tokens - self.tokens)


def level_result(
    concurrency: int,
    repeats: Sequence[Repeat],
    samples: Samples,
    *,
    void: str = "",
    errors: Sequence[str] = (),
) -> LevelResult:
    """The level's figures: the repeat of median throughput, the lower of two.

    If requests failed or tokens are missing anywhere, the worst repeat stands for the level instead: a median
    must not hide a failure.
    """
    by_speed = sorted(repeats, key=lambda r: r.throughput)
    middle = by_speed[(len(by_speed) - 1) // 2]
    worst = max(repeats, key=lambda r: r.flaw)
    chosen = worst if any(worst.flaw) else middle
    median = middle.throughput
    return LevelResult(
        concurrency=concurrency,
        requests=chosen.requests,
        ok=chosen.ok,
        tokens=chosen.tokens,
        expected_tokens=chosen.expected_tokens,
        wall=chosen.wall,
        throughput=chosen.throughput,
        per_request=samples.rate.quantile(0.5),
        ttft=samples.ttft.quantiles(),
        itl=samples.itl.quantiles(),
        e2e=samples.e2e.quantiles(),
        spread=(by_speed[-1].throughput - by_speed[0].throughput) / median if median else 0.0,
        void=void,
        errors=tuple(errors),
    )


def client_bottleneck(cpu_share: float, lag: Histogram, gap: float) -> str:
    """Why the client, not the server, set these figures; "" when it did not.

    ``cpu_share``: of one CPU, over the level. ``lag``: seconds by which the client's own timers were late.
    ``gap``: median seconds between two reads of one stream, in the same time as ``lag``.
    """
    if cpu_share > CPU_LIMIT:
        return f"the client was the bottleneck: it used {cpu_share:.0%} of a CPU (limit {CPU_LIMIT:.0%})"
    late, limit = lag.quantile(0.95), max(LAG_FLOOR, LAG_SHARE * gap)
    if lag.count >= LAG_SAMPLES and late > limit:
        return (
            f"the client was the bottleneck: it was {late * 1000:.1f} ms late (95th percentile,"
            f" limit {limit * 1000:.1f} ms)"
        )
    return ""
