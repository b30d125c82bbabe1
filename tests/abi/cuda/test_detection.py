"""What each common test of peer-to-peer DMA misses, and that the self-test does not.

A row fails when the self-test is weakened by what the lazy test leaves out, and when the lazy test is no longer blind.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.abi.cuda.child import run
from tests.abi.cuda.lazy import LAZY
from tests.abi.cuda.self_test import SHORT, Wrong, not_good, self_test
from tests.abi.cuda.stub import ADDRESSES, CudaStub, Value, needs_compiler

pytestmark = needs_compiler
MIB = 1 << 20
PUSH, PULL, STORE, LOAD, ALL_AT_ONCE = "copy-push", "copy-pull", "store", "load", "concurrent"


def machine(folder: Path, count: int = 2) -> CudaStub:
    stub = CudaStub(folder)
    for index in range(count):
        stub.add(index, ADDRESSES[index])
    return stub


@dataclass(frozen=True)
class Row:
    """A fault that the lazy test calls fine, with the paths that the self-test finds corrupt."""

    lazy: str
    fault: dict[str, Value]
    corrupt: frozenset[tuple[int, int, str]]
    gpus: int = 2


def found(*places: tuple[int, int, str]) -> frozenset[tuple[int, int, str]]:
    return frozenset(places)


COPIES = found((0, 1, PUSH), (0, 1, PULL), (0, 1, ALL_AT_ONCE))
ROWS = [
    Row("constant_fill", {"fault.0.1.copy": "swap"}, COPIES),
    Row("constant_fill", {"fault.0.1.copy": "shift"}, COPIES),
    Row("few_bytes", {"fault.0.1.copy": "zeros", "fault.0.1.copy.from": 3 * MIB}, COPIES),
    Row(
        "copy_engine_only",
        {"fault.0.1.kernel": "zeros"},
        found((0, 1, STORE), (0, 1, LOAD), (0, 1, ALL_AT_ONCE)),
    ),
    Row(
        "read_through_the_window",
        {"fault.0.1.kernel": "mirror"},
        found((0, 1, STORE), (1, 0, LOAD), (0, 1, ALL_AT_ONCE)),
    ),
    Row("without_poison", {"fault.0.1.copy": "drop"}, COPIES),
    Row(
        "one_direction",
        {"fault.1.0.copy": "ones"},
        found((1, 0, PUSH), (1, 0, PULL), (1, 0, ALL_AT_ONCE)),
    ),
    Row(
        "first_pair",
        {"fault.2.0.copy": "ones"},
        found((2, 0, PUSH), (2, 0, PULL), (2, 0, ALL_AT_ONCE)),
        gpus=3,
    ),
    Row("repeating_pattern", {"fault.0.1.copy": "shift", "fault.0.1.copy.by": 2 * MIB}, COPIES),
    Row("target_only", {"fault.0.1.copy": "guard"}, COPIES),
    Row("target_only", {"fault.0.1.copy": "source"}, COPIES),
    Row("one_pair_at_a_time", {"fault.0.1.concurrent": "flip"}, found((0, 1, ALL_AT_ONCE))),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.lazy}-{next(iter(row.fault.values()))}")
async def test_what_a_lazy_test_misses_is_found(row: Row, tmp_path: Path):
    stub = machine(tmp_path, row.gpus)
    stub.set(row.fault)
    assert run(stub, "tests.abi.cuda.lazy", row.lazy).stdout == "fine\n"
    ours = not_good(await self_test(stub, ADDRESSES[: row.gpus]))
    assert ours == dict.fromkeys(row.corrupt, "corrupt")


async def test_P2_a_hang_is_named_where_a_test_without_deadline_says_nothing(tmp_path: Path):
    stub = machine(tmp_path)
    stub.set({"hang.copy.0.1": 60})
    with pytest.raises(subprocess.TimeoutExpired):
        run(stub, "tests.abi.cuda.lazy", "without_deadline", seconds=3)
    ours: Wrong = not_good(await self_test(stub, deadlines=SHORT))
    assert ours[0, 1, PUSH] == "hung"
    assert {place[:2] for place in ours} == {(0, 1)}


async def test_a_broken_way_to_the_host_is_not_blamed_on_peer_to_peer(tmp_path: Path):
    stub = machine(tmp_path)
    stub.set({"fault.1.host": "flip"})
    assert run(stub, "tests.abi.cuda.lazy", "without_controls").stdout == "fine\n"
    stub.set({"fault.1.host": None, "fault.1.readback": "flip"})
    assert run(stub, "tests.abi.cuda.lazy", "without_controls").stdout == "broken\n"
    result = await self_test(stub)
    assert not result.controls_ok
    assert "corrupt" not in not_good(result).values()
    assert ADDRESSES[1] in result.control_detail


@pytest.mark.parametrize("lazy", LAZY)
def test_a_lazy_test_is_a_test_all_the_same(lazy: str, tmp_path: Path):
    stub = machine(tmp_path)
    assert run(stub, "tests.abi.cuda.lazy", lazy).stdout == "fine\n"
    stub.set({"fault.0.1.copy": "zeros", "fault.0.1.kernel": "zeros"})
    assert run(stub, "tests.abi.cuda.lazy", lazy).stdout == "broken\n"
