"""Benchmark figures: what one run measured, and what makes two runs comparable."""

from agent.core.record import Record

FORMULA = "v1: median over repeats of output tokens (usage) / wall seconds of the level"


class Quantiles(Record):
    """Seconds."""

    p50: float
    p95: float
    p99: float


class LevelResult(Record):
    """One concurrency level, the repeat of median throughput; latencies over all measured repeats (seconds)."""

    concurrency: int
    requests: int
    ok: int
    tokens: int
    expected_tokens: int
    wall: float
    throughput: float  # aggregate tokens per second
    per_request: float  # tokens per second of one request, median
    ttft: Quantiles
    itl: Quantiles  # inter-token latency
    e2e: Quantiles
    spread: float = 0.0  # (max - min) / median of throughput over repeats
    void: str = ""  # why the figures do not count, e.g. the client was the bottleneck
    errors: tuple[str, ...] = ()


class BenchmarkKey(Record):
    """Everything that makes figures comparable; a mismatch in any field means they are not compared."""

    formula: str
    model: str
    runtime: str  # sglang and its version
    driver: str
    gpus: tuple[str, ...]
    p2p: bool
    workload: str  # prompts, lengths, repeats
    simulated: bool


class BenchmarkResult(Record):
    levels: tuple[LevelResult, ...]
    key: BenchmarkKey
    started_at: float
    seconds: float
    complete: bool = True  # False: killed, or out of time
    note: str = ""


class Baseline(Record):
    """Promoted results of one key, newest last; at most the last ten."""

    key: BenchmarkKey
    results: tuple[BenchmarkResult, ...]
