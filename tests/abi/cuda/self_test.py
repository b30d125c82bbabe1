"""The self-test of the agent, run against the stand-in."""

from collections.abc import Sequence
from pathlib import Path

from agent.core.verdict import PairResult
from agent.host.p2p_child import Deadlines
from agent.host.p2p_test import ChildP2PTest
from agent.ports import P2PTestResult
from tests.abi.cuda.stub import ADDRESSES, CudaStub

# Generous: only what hangs is waited for that long.
DEADLINES = Deadlines(first=30.0, later=30.0)
SHORT = Deadlines(first=20.0, later=3.0)
Wrong = dict[tuple[int, int, str], PairResult]


async def self_test(
    stub: CudaStub,
    gpus: Sequence[str] = ADDRESSES[:2],
    *,
    full: bool = False,
    deadlines: Deadlines = DEADLINES,
) -> P2PTestResult:
    test = ChildP2PTest(Path("/"), stub.env, deadlines)
    return await test.run(gpus, lambda _line: None, full=full, seed=1)


def not_good(result: P2PTestResult) -> Wrong:
    """By source, destination and path, with ordinals in place of addresses."""
    at = {address: index for index, address in enumerate(ADDRESSES)}
    return {
        (at[one.source], at[one.destination], one.path): one.result
        for one in result.paths
        if one.result != "good"
    }


def details(result: P2PTestResult) -> str:
    return " | ".join(filter(None, [result.control_detail, *(one.detail for one in result.paths)]))
