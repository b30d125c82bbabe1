"""Every ordered pair at once: what only breaks, or only crawls, while others are under way."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.selftest.driver import DriverError, Gpu, seconds_between
from agent.selftest.patterns import make, salt_for
from agent.selftest.transfer import GUARD, KIB, LARGE, Buffer, Piece, judge, poison

Pair = tuple[str, str]
Outcome = tuple[str, str, float | None]  # result, detail, GB/s
ROUNDS = ("copy-push", "store")
_STEP = 4 * KIB + 8  # between the slices of one random text that pairs send
_PAUSE = 0.0005
_PIECE = Piece(0, LARGE)


@dataclass(frozen=True, slots=True)
class Pace:
    """Copies of 4 MiB by each pair in one round, and seconds for it: both rounds end before the parent's deadline."""

    copies: int
    within: float


QUICK, FULL = Pace(8, 8.0), Pace(64, 24.0)


@dataclass(slots=True)
class Flight:
    """One pair's buffers, its own stream, and what is found out about it."""

    source: Buffer
    target: Buffer
    want: memoryview
    stream: Any
    ends: tuple[Any, Any] | None = None
    outcome: Outcome | None = None

    def begin(self, path: str) -> None:
        to, origin, engine = self.target.at(0), self.source.at(0), self.source.gpu
        if path == "store":
            engine.launch(to, origin, LARGE, self.stream)
        else:
            engine.copy((self.target.gpu, to), (self.source.gpu, origin), LARGE, self.stream)

    @property
    def broken(self) -> bool:
        return self.outcome is not None and self.outcome[0] in {"hung", "error"}

    def speed(self, copies: int) -> float:
        """GB/s of a round that has ended."""
        return copies * LARGE / 1e9 / max(seconds_between(*self.ends), 1e-9) if self.ends else 0.0


def prepare(gpus: Mapping[str, Gpu], pairs: Sequence[Pair], seed: int) -> dict[Pair, Flight]:
    """Buffers for each pair, and access of each source to its destination. One text for all bounds the host's memory."""
    text = memoryview(make("random", LARGE + len(pairs) * _STEP, salt_for(seed, "all", "at once")))
    flights = {}
    for number, (a, b) in enumerate(pairs):
        source, target = gpus[a], gpus[b]
        source.reach(target)
        size = LARGE + 2 * GUARD
        ends = [Buffer(gpu, gpu.allocate(size), LARGE) for gpu in (source, target)]
        want = text[number * _STEP : number * _STEP + LARGE]
        source.write(ends[0].at(0), want)
        flights[a, b] = Flight(ends[0], ends[1], want, source.new_stream())
    return flights


def run(gpus: Mapping[str, Gpu], pairs: Sequence[Pair], seed: int, *, full: bool) -> dict[Pair, Outcome]:
    """The outcome of each pair. A pair that has not ended in time is hung, and its process must end with it."""
    flights = prepare(gpus, pairs, seed)
    pace = FULL if full else QUICK
    speeds: dict[Pair, float] = {}
    for path in ROUNDS:
        flying = {pair: flight for pair, flight in flights.items() if flight.outcome is None}
        _fly(gpus, flying, path, pace)
        if broken := [pair for pair, flight in flying.items() if flight.broken]:
            # A context that has seen an error says nothing any more, and a GPU that hangs is not read to the end.
            short = ("not-run", f"cut short by {broken[0][0]} -> {broken[0][1]}", None)
            return {pair: flight.outcome or short for pair, flight in flights.items()}
        if path == "copy-push":
            speeds = {pair: flight.speed(pace.copies) for pair, flight in flying.items()}
        for flight in flying.values():
            if wrong := judge(flight.source, flight.target, _PIECE, flight.want):
                detail = f"{wrong}; {path} while all pairs send, pattern random, {_PIECE}"
                flight.outcome = ("corrupt", detail, None)
    return {pair: flight.outcome or ("good", "", speeds.get(pair)) for pair, flight in flights.items()}


def _fly(gpus: Mapping[str, Gpu], flights: Mapping[Pair, Flight], path: str, pace: Pace) -> None:
    """One round, to its end or to its deadline."""
    for flight in flights.values():
        poison(flight.target, _PIECE)
    for gpu in gpus.values():
        gpu.settle()
    begins = {pair: flight.source.gpu.mark(flight.stream) for pair, flight in flights.items()}
    for _ in range(
        pace.copies
    ):  # all pairs before the next copy of each: no one is done before the last begins
        for flight in flights.values():
            flight.begin(path)
    for pair, flight in flights.items():
        flight.ends = (begins[pair], flight.source.gpu.mark(flight.stream))
    until = time.monotonic() + pace.within
    left = list(flights.values())
    while left := [flight for flight in left if not _ended(flight, path)]:
        if time.monotonic() > until:
            for flight in left:
                detail = f"{path} while all pairs send had not ended after {pace.within:g} s"
                flight.outcome = ("hung", detail, None)
            return
        time.sleep(_PAUSE)


def _ended(flight: Flight, path: str) -> bool:
    try:
        return flight.source.gpu.is_done(flight.stream)
    except DriverError as error:
        flight.outcome = ("error", f"{path} while all pairs send: {error}", None)
        return True
