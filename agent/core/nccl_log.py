"""What NCCL says in its log, at ``NCCL_DEBUG=INFO`` and above.

A route is the way from one rank to another ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"). Since NCCL 2.22 routes are
made, and told, at the first collective and not at init. Source: NCCL, src/transport/*.cc and src/transport.cc.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

# The number in brackets is a device index, or a bus id in hexadecimal before NCCL 2.18.
_ROUTE = re.compile(
    r"NCCL INFO Channel (?P<channel>\d+)(?:/\d+)? : (?P<source>\d+)\[[0-9a-fA-F]+\] -> (?P<destination>\d+)\[[0-9a-fA-F]+\]"
    r"(?: \[(?:send|receive)\])? via (?P<via>(?:P2P|SHM|NET|COLLNET)\b\S*(?: pointer\S*)?|direct shared memory)"
)
_OLD_WORDS = {"direct shared memory": "SHM/direct"}  # before NCCL 2.13
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)*)")
_WARNING = re.compile(r"NCCL WARN (?P<text>.*\S)")
# CUDA's error 217 where shared memory is set up: cuMem host memory needs peer access, which P2P off leaves disabled.
_HOST_MEMORY = re.compile(r"C(?:uda|UDA) failure 217\b.*peer access is not supported")


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """How data of one rank reaches another: ``via`` as NCCL writes it, over so many channels."""

    source: int
    destination: int
    via: str  # P2P/IPC, P2P/CUMEM/read, P2P/direct pointer, SHM/direct/direct, NET/Socket/0...
    channels: int = 1

    @property
    def transport(self) -> str:
        """P2P, SHM, NET or COLLNET."""
        return self.via.partition("/")[0]


def routes(lines: Iterable[str]) -> tuple[Route, ...]:
    """Every way that was set up, by ranks; both ends of one may tell it, and it is counted once."""
    channels: dict[tuple[int, int, str], set[int]] = {}
    for line in lines:
        if match := _ROUTE.search(line):
            key = (
                int(match["source"]),
                int(match["destination"]),
                _OLD_WORDS.get(match["via"], match["via"]),
            )
            channels.setdefault(key, set()).add(int(match["channel"]))
    return tuple(sorted(Route(*key, channels=len(found)) for key, found in channels.items()))


def transports(found: Iterable[Route]) -> tuple[str, ...]:
    return tuple(sorted({route.transport for route in found}))


def version(lines: Iterable[str]) -> str:
    """NCCL's own; "" where no line tells it."""
    return next((match[1] for line in lines if (match := _VERSION.search(line))), "")


def warnings(lines: Iterable[str]) -> tuple[str, ...]:
    """Each once, in their order."""
    return tuple(dict.fromkeys(match["text"] for line in lines if (match := _WARNING.search(line))))


def host_memory_failed(lines: Iterable[str]) -> bool:
    """NCCL could not share host memory because GPUs may not reach each other: NCCL_CUMEM_HOST_ENABLE=0 mends that."""
    return any(_HOST_MEMORY.search(line) for line in lines)


def not_effective(lines: Iterable[str], *, p2p: bool) -> str:
    """Why the log contradicts P2P off, naming the first pairs; "" where it does not. P2P on forbids no transport."""
    over = [route for route in routes(lines) if route.transport == "P2P"] if not p2p else []
    if not over:
        return ""
    named = ", ".join(f"rank {r.source} -> {r.destination} via {r.via}" for r in over[:3])
    more = f" and {len(over) - 3} more" if len(over) > 3 else ""
    return f"P2P is off, and NCCL's log shows that it uses P2P: {named}{more}"
