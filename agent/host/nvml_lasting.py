"""Facts that NVML need not be asked at each pass, because only another card or another driver changes them.

P2P status alone takes three calls for each ordered pair: 168 with 8 GPUs, 720 with 16.
"""

from collections.abc import Hashable, Iterator, Mapping
from itertools import chain

from agent.host.nvml_facts import FUNCTION_NOT_FOUND, NOT_SUPPORTED
from agent.host.nvml_wire import Answer, Cell, LastingAnswer

ASKED_EVERY = 600.0  # seconds


class LastingFacts:
    """What was answered last, as long as it holds: for one set of GPUs, each bound once to one driver."""

    def __init__(self) -> None:
        self._kept: Mapping[str, LastingAnswer] = {}
        self._for: tuple[Hashable, float] | None = None

    def due(self, bindings: Hashable, now: float, every: float) -> bool:
        """``bindings``: what tells apart two bindings of the same GPU. ``now`` and ``every`` in seconds."""
        return self._for is None or self._for[0] != bindings or now - self._for[1] >= every

    def take(self, answer: Answer, bindings: Hashable, now: float) -> None:
        """An answer to a request for them. One with a fault that may go away is asked for again at the next pass."""
        self._kept = answer.lasting
        self._for = (bindings, now) if all(map(_settled, _cells(answer.lasting))) else None

    def notice(self, there: frozenset[str]) -> None:
        """An answer to another request. A GPU that was lost and has come back makes all due."""
        if not there <= self._kept.keys():
            self._for = None

    def of(self, address: str, there: frozenset[str]) -> LastingAnswer | None:
        """``there``: the GPUs that NVML opened now. The way to one that is lost is not what it was."""
        kept = self._kept.get(address)
        if kept is None or kept.p2p.keys() <= there:
            return kept
        return kept.model_copy(update={"p2p": {peer: way for peer, way in kept.p2p.items() if peer in there}})


def _cells(lasting: Mapping[str, LastingAnswer]) -> Iterator[Cell[str] | Cell[int]]:
    for one in lasting.values():
        yield from (one.vbios, one.bar1_total, one.max_link_width)
        yield from chain.from_iterable((way.read, way.write, way.atomics) for way in one.p2p.values())


def _settled(cell: Cell[str] | Cell[int]) -> bool:
    return cell.fault is None or cell.fault.code in {NOT_SUPPORTED, FUNCTION_NOT_FOUND}
