"""What the speeds of a P2P self-test tell: said beside right data, and never a verdict of its own."""

from collections.abc import Iterable, Sequence

from agent.core.verdict import PathVerdict

STAGED_MARGIN = 1.1  # a copy that is not faster than this many times the staged one may well be staged too
COLLAPSE = 0.5  # of a pair's fair share: less than half of it is no rounding and no unlucky order of copies
NOT_DIRECT = "no faster than staging"
COLLAPSES = "collapses under concurrency"
# Loads and stores are direct by their nature, however slow; only a copy can be staged without anybody being told.
_COPIES = ("copy-push", "copy-pull")


def with_speeds(paths: Sequence[PathVerdict], controls: Iterable[PathVerdict]) -> tuple[PathVerdict, ...]:
    """The same verdicts; where the data was right and the speed is odd, ``detail`` says so."""
    staged = {(c.source, c.destination): c.gbps for c in controls if c.path == "staged" and c.gbps}
    alone = {(p.source, p.destination): p.gbps for p in paths if p.path == "copy-push" and p.gbps}
    together = [(p.source, p.destination) for p in paths if p.path == "concurrent" and p.gbps]
    said = []
    for path in paths:
        pair = (path.source, path.destination)
        detail = path.detail
        if path.result == "good" and path.gbps is not None:
            if path.path in _COPIES and pair in staged:
                detail = _not_direct(path.gbps, staged[pair]) or detail
            if path.path == "concurrent" and pair in alone:
                detail = _collapse(path.gbps, alone[pair], _sharing(pair, together)) or detail
        said.append(path.model_copy(update={"detail": detail}))
    return tuple(said)


def _sharing(pair: tuple[str, str], together: Sequence[tuple[str, str]]) -> int:
    """How many pairs share the busier of its two links: what a GPU sends, and what a GPU receives."""
    return max(sum(a == pair[0] for a, _ in together), sum(b == pair[1] for _, b in together), 1)


def _not_direct(gbps: float, staged: float | None) -> str:
    if not staged or gbps > staged * STAGED_MARGIN:
        return ""
    return (
        f"{NOT_DIRECT}; {gbps:g} GB/s, by way of the host {staged:g} GB/s, so it is not proved to be direct"
    )


def _collapse(gbps: float, alone: float | None, sharing: int) -> str:
    if not alone or gbps >= COLLAPSE * alone / sharing:
        return ""
    share = f", where its share of the link is {alone / sharing:.3g}" if sharing > 1 else ""
    return f"{COLLAPSES}; {gbps:g} GB/s while all pairs send{share}, {alone:g} GB/s alone"
