"""The child of the P2P self-test: ``python -m agent.selftest.p2p_worker REQUEST``.

REQUEST is JSON: ``{"mode": "control", "gpu": ADDRESS}``, ``{"mode": "pair", "source": ..., "destination": ...,
"paths": [...]}`` or ``{"mode": "concurrent", "pairs": [[SOURCE, DESTINATION], ...]}``, each with ``full`` and ``seed``.
It prints one JSON object a line: a step's "begin" before it and its "end" after it, so that the last begin without an
end names a step that hangs. The process ends with the first error: a context that has seen one is not used again.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from agent.selftest import concurrent
from agent.selftest.driver import Gpu, MissingError, StepError, open_gpu, start
from agent.selftest.patterns import Patterns, salt_for
from agent.selftest.transfer import GUARD, LARGE, Lane, allocate, host_bounce, path_of

STAGED = "staged"
PULLED = frozenset({"copy-pull", "load"})
Json = dict[str, Any]


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class StepFailedError(Exception):
    """A step of this process ended in an error, which has been told."""


def step(what: str, path: str, source: str, destination: str, work: Callable[[], Json]) -> Json:
    """Raises StepFailedError after an error."""
    named = {"what": what, "path": path, "source": source, "destination": destination}
    say(step="begin", **named)
    try:
        found = work()
    except MissingError as error:
        say(step="end", **named, result="error", detail=str(error), missing=error.what)
        raise StepFailedError from error
    except StepError as error:
        say(step="end", **named, result="error", detail=str(error))
        raise StepFailedError from error
    say(step="end", **named, **found)
    return found


def opened(addresses: Sequence[str], needed: int) -> list[Gpu]:
    """Raises StepError, also where less than ``needed`` bytes are free."""
    start()
    gpus = [open_gpu(address) for address in addresses]
    for gpu in gpus:
        if (free := gpu.free_memory()) < needed:
            have = f"{free >> 20} MiB of its memory are free, {(needed >> 20) + 1} MiB are needed"
            raise StepError(f"{gpu.address} is in use: {have}")
    return gpus


def control(gpu: str, seed: int, full: bool) -> None:  # noqa: ARG001 - one form of request for all modes
    def work() -> Json:
        (device,) = opened([gpu], LARGE + 4 * GUARD)
        patterns = Patterns(salt_for(seed, gpu, gpu), keep=False)
        return verdict(host_bounce(device, allocate(device, full=False), patterns))

    step("control", "host-bounce", gpu, gpu, work)


def verdict(wrong: str, gbps: float | None = None) -> Json:
    return {"result": "corrupt", "detail": wrong} if wrong else {"result": "good", "gbps": gbps}


def pair(source: str, destination: str, paths: Sequence[str], seed: int, full: bool) -> None:
    made: list[Lane] = []

    def lane() -> Lane:
        if not made:
            buffers = [allocate(gpu, full=full) for gpu in opened([source, destination], LARGE + 4 * GUARD)]
            patterns = Patterns(salt_for(seed, source, destination), keep=not full)
            made.append(Lane(buffers[0], buffers[1], patterns, full))
        return made[0]

    if STAGED in paths:
        found = step("control", STAGED, source, destination, lambda: _test(lane(), STAGED))
        if found["result"] != "good":
            return
    for path in paths:
        if path != STAGED:
            step("pair", path, source, destination, lambda path=path: _direct(lane(), path))  # type: ignore[misc]


def _direct(lane: Lane, path: str) -> Json:
    """One direct path, with access in both directions where there is any, as a real user of it would have."""
    source, target = lane.source.gpu, lane.target.gpu
    ways = [(source, target), (target, source)]
    able = [one.can_reach(other) for one, other in ways]
    needed = path in PULLED
    if not able[needed]:
        one, other = ways[needed]
        detail = f"the driver says that {one.address} cannot reach the memory of {other.address}"
        return {"result": "unsupported", "detail": detail}
    for (one, other), can in zip(ways, able, strict=True):
        if can:
            one.reach(other)
    return _test(lane, path)


def _test(lane: Lane, name: str) -> Json:
    path = path_of(name, lane.source, lane.target)
    wrong = lane.check(path)
    return verdict(wrong, None if wrong else round(lane.speed(path), 2))


def all_at_once(pairs: Sequence[Sequence[str]], seed: int, full: bool) -> None:
    names = sorted({gpu for pair in pairs for gpu in pair})

    def work() -> Json:
        gpus = opened(names, 2 * len(names) * (LARGE + 4 * GUARD))
        by_name = {gpu.address: gpu for gpu in gpus}
        found = concurrent.run(by_name, [(a, b) for a, b in pairs], seed, full=full)
        for (a, b), (result, detail, gbps) in sorted(found.items()):
            speed = None if gbps is None else round(gbps, 2)
            say(
                step="end", what="concurrent", path="concurrent", source=a, destination=b,
                result=result, detail=detail, gbps=speed,
            )  # fmt: skip
        return {"result": "good"}

    step("concurrent", "concurrent", "", "", work)


MODES: dict[str, Callable[..., None]] = {"control": control, "pair": pair, "concurrent": all_at_once}


def main(text: str) -> None:
    request = json.loads(text)
    with contextlib.suppress(StepFailedError):
        MODES[request.pop("mode")](**request)
    sys.stdout.flush()
    # The library's own way out can hang on a GPU that is wedged; the kernel takes back everything anyway.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
