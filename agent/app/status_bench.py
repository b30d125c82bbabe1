"""The benchmark table of a service's status."""

from agent.app.status_file import Document, number, rows, section, text, words
from agent.app.status_page import Page, table

HEADS = ("C", "aggregate tok/s", "per-request", "TTFT p50/p95", "ITL p50", "ok", "wall")
WIDE_HEADS = (
    "C", "aggregate tok/s", "per-request", "TTFT p50/p95/p99", "ITL p50/p95/p99", "e2e p50/p95", "ok", "tokens",
    "expected", "wall", "spread",
)  # fmt: skip
UNSURE = "?"


def benchmark_lines(service: Document, page: Page) -> list[str]:
    result = section(service, "benchmark")
    levels = rows(result, "levels")
    if not levels:
        what = (
            "what runs has not been measured"
            if text(service, "revision")
            else "nothing runs that was measured"
        )
        return page.labelled("benchmark", what, page.style.unsure)
    key = section(result, "key")
    told = [page.ago(number(service, "measured_at")), f"P2P {'on' if key.get('p2p') else 'off'}"]
    told += [text(key, "runtime"), text(key, "workload")]
    if key.get("simulated") is not False:
        told.insert(0, "SIMULATED FIGURES")
    if result.get("complete") is not True:
        told.append("INCOMPLETE")
    told += [text(result, "note")]
    paint = page.style.unsure if key.get("simulated") is not False else str
    lines = page.labelled("benchmark", ", ".join(filter(None, told)), paint)
    heads = WIDE_HEADS if page.wide else HEADS
    row = _wide_row if page.wide else _row
    drawn = _drawn([heads, *(row(level) for level in levels)], page)
    lines.append("  " + page.style.strong(drawn[0]))
    for level, line in zip(levels, drawn[1:], strict=True):
        flaws = _flaws(level)
        lines.append("  " + (page.style.bad(line) if flaws else line))
        lines += (
            page.labelled("", f"C={text(level, 'concurrency')} {flaws}", page.style.bad, 2) if flaws else []
        )
    if page.wide and (formula := text(key, "formula")):
        lines += page.labelled("", f"{formula}; {text(key, 'model')}, driver {text(key, 'driver')}")
    return lines


def _drawn(lines: list[tuple[str, ...]], page: Page) -> list[str]:
    """Closer together where the page is too narrow for it otherwise."""
    drawn = table(lines)
    return drawn if page.wide or len(drawn[0]) + 2 <= page.width else table(lines, gap=1)


def _row(level: Document) -> tuple[str, ...]:
    return (
        _figure(number(level, "concurrency"), 0),
        _figure(number(level, "throughput"), 1),
        _figure(number(level, "per_request"), 1),
        _duration(section(level, "ttft"), ("p50", "p95"), 0),
        _duration(section(level, "itl"), ("p50",), 1),
        f"{_count(number(level, 'ok'))}/{_count(number(level, 'requests'))}",
        f"{_figure(number(level, 'wall'), 1)} s",
    )


def _wide_row(level: Document) -> tuple[str, ...]:
    concurrency, aggregate, each, _, _, ok, wall = _row(level)
    every = ("p50", "p95", "p99")
    spread = number(level, "spread")
    return (
        concurrency,
        aggregate,
        each,
        _duration(section(level, "ttft"), every, 0),
        _duration(section(level, "itl"), every, 1),
        _duration(section(level, "e2e"), ("p50", "p95"), 0),
        ok,
        _figure(number(level, "tokens"), 0),
        _figure(number(level, "expected_tokens"), 0),
        wall,
        UNSURE if spread is None else f"{spread:.1%}",
    )


def _figure(value: float | None, digits: int) -> str:
    if value is None:
        return UNSURE
    return f"{value:,.{digits}f}" if abs(value) < 1e7 else f"{value:.3g}"


def _count(value: float | None) -> str:
    return UNSURE if value is None else f"{value:g}"


def _duration(seconds: Document, names: tuple[str, ...], digits: int) -> str:
    """Quantiles in milliseconds; in seconds from ten seconds on."""
    values = [number(seconds, name) for name in names]
    long = any(v is not None and v >= 10 for v in values)
    told = [_figure(None if v is None else v if long else v * 1000, 1 if long else digits) for v in values]
    return "/".join(told) + (" s" if long else " ms")


def _flaws(level: Document) -> str:
    """Why this row does not count, or not in full."""
    found = []
    if void := text(level, "void"):
        found.append(f"does not count: {void}")
    ok, requests = number(level, "ok"), number(level, "requests")
    if ok is None or ok != requests:
        found.append("not every request was answered")
    if number(level, "tokens") != number(level, "expected_tokens"):
        found.append("the token count is not the expected one")
    return "; ".join([*found, *words(level, "errors")])
