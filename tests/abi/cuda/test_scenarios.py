"""Every way in which peer-to-peer DMA is known to go wrong, and the verdict that the self-test comes to."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.core.p2p_speed import COLLAPSES, NOT_DIRECT, with_speeds
from agent.core.verdict import PairResult
from tests.abi.cuda.self_test import Wrong, details, not_good, self_test
from tests.abi.cuda.stub import ADDRESSES, GIB, CudaStub, Value, needs_compiler

pytestmark = needs_compiler
COPIES = ("copy-push", "copy-pull", "concurrent")
KERNELS = ("store", "load", "concurrent")
ALL = ("copy-push", "copy-pull", "store", "load", "concurrent")


def machine(folder: Path, count: int = 2, memory: int = 8 * GIB) -> CudaStub:
    stub = CudaStub(folder)
    for index in range(count):
        stub.add(index, ADDRESSES[index], memory)
    return stub


@dataclass(frozen=True)
class Scenario:
    """``wrong``: every path that is not good; ``says``: words of the details, which tell what to look for."""

    state: dict[str, Value]
    wrong: Wrong
    says: tuple[str, ...] = ()


def broken_alone(source: int, destination: int, *names: str) -> Wrong:
    """What cannot be done alone is not tried with the others, whose process it would end."""
    return paths(source, destination, *names, result="error") | paths(
        source, destination, "concurrent", result="not-run"
    )


def paths(source: int, destination: int, *names: str, result: PairResult = "corrupt") -> Wrong:
    return {(source, destination, name): result for name in names}


TABLE: dict[str, Scenario] = {
    "clean": Scenario({}, {}),
    "P4_the_driver_says_yes_both_ways": Scenario(
        {"peer.0.1": 1, "peer.1.0": 1, "fault.0.1.copy": "drop", "fault.1.0.copy": "drop"},
        paths(0, 1, *COPIES) | paths(1, 0, *COPIES),
        ("dropped write",),
    ),
    "P5_zeros_arrive": Scenario({"fault.0.1.copy": "zeros"}, paths(0, 1, *COPIES), ("zeros",)),
    "all_ones_arrive": Scenario({"fault.0.1.copy": "ones"}, paths(0, 1, *COPIES), ("all ones",)),
    "P6_a_write_is_dropped": Scenario({"fault.1.0.copy": "drop"}, paths(1, 0, *COPIES), ("dropped write",)),
    "only_large_copies": Scenario(
        {"fault.0.1.copy": "flip", "fault.0.1.copy.from": 3_000_000}, paths(0, 1, *COPIES), ("4 MiB",)
    ),
    "one_bit_in_each_megabyte": Scenario(
        {"fault.0.1.copy": "flip", "fault.0.1.copy.stride": 1 << 20}, paths(0, 1, *COPIES), ("flipped bits",)
    ),
    "a_wrong_address": Scenario(
        {"fault.0.1.copy": "shift", "fault.0.1.copy.from": 64}, paths(0, 1, *COPIES), ("shifted",)
    ),
    "pages_swapped": Scenario({"fault.0.1.copy": "swap"}, paths(0, 1, *COPIES), ("shifted",)),
    "kernels_only": Scenario({"fault.0.1.kernel": "drop"}, paths(0, 1, *KERNELS), ("dropped write",)),
    "kernels_one_way": Scenario({"fault.1.0.kernel": "zeros"}, paths(1, 0, *KERNELS), ("zeros",)),
    "stores_only": Scenario({"fault.0.1.store": "ones"}, paths(0, 1, "store", "concurrent")),
    "loads_only": Scenario({"fault.0.1.load": "ones"}, paths(0, 1, "load")),
    "pull_only": Scenario({"fault.1.0.pull": "flip"}, paths(1, 0, "copy-pull")),
    "a_private_mirror": Scenario(
        {"fault.0.1.kernel": "mirror"},
        paths(0, 1, "store", "concurrent") | paths(1, 0, "load"),
        ("dropped write",),
    ),
    "the_source_is_overwritten": Scenario(
        {"fault.0.1.push": "source"}, paths(0, 1, "copy-push", "concurrent"), ("source overwritten",)
    ),
    "bytes_behind_the_target_are_overwritten": Scenario(
        {"fault.0.1.pull": "guard"}, paths(0, 1, "copy-pull"), ("behind the target",)
    ),
    "all_pairs_at_once_only": Scenario({"fault.0.1.concurrent": "flip"}, paths(0, 1, "concurrent")),
    "no_peer_access": Scenario(
        {"peer.0.1": 0, "peer.1.0": 0},
        paths(0, 1, *ALL, result="unsupported") | paths(1, 0, *ALL, result="unsupported"),
        ("cannot reach",),
    ),
    "enabling_access_fails": Scenario(
        {"error.cuCtxEnablePeerAccess": 217},
        broken_alone(0, 1, *ALL[:4]) | broken_alone(1, 0, *ALL[:4]),
        ("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",),
    ),
    "a_copy_faults": Scenario(
        {"error.copy.0.1": 700}, broken_alone(0, 1, "copy-push", "copy-pull"), ("CUDA_ERROR_ILLEGAL_ADDRESS",)
    ),
    "a_kernel_faults": Scenario(
        {"error.kernel.1.0": 719}, broken_alone(1, 0, "store", "load"), ("CUDA_ERROR_LAUNCH_FAILED",)
    ),
    "the_kernel_ends_a_child": Scenario(
        {"kill.copy.0.1": 7}, broken_alone(0, 1, "copy-push", "copy-pull"), ("SIGBUS",)
    ),
}


@pytest.mark.parametrize("name", TABLE)
async def test_scenario(name: str, tmp_path: Path):
    scenario, stub = TABLE[name], machine(tmp_path)
    stub.set(scenario.state)
    result = await self_test(stub)
    assert not_good(result) == scenario.wrong
    assert result.controls_ok
    assert [word for word in scenario.says if word not in details(result)] == []


@pytest.mark.parametrize(
    ("speeds", "path", "says"),
    [
        ({"gbps.0.1": 11, "gbps.0.1.staged": 11}, "copy-push", NOT_DIRECT),
        ({"gbps.0.1": 11, "gbps.0.1.staged": 11}, "copy-pull", NOT_DIRECT),
        ({"gbps.0.1": 50, "gbps.0.1.concurrent": 3}, "concurrent", COLLAPSES),
    ],
    ids=["pushed_by_way_of_the_host", "pulled_by_way_of_the_host", "collapses_while_all_send"],
)
async def test_right_data_at_an_odd_speed_is_said(
    speeds: dict[str, Value], path: str, says: str, tmp_path: Path
):
    stub = machine(tmp_path)
    stub.set(speeds)
    result = await self_test(stub)
    assert not_good(result) == {}
    judged = with_speeds(result.paths, result.controls)
    odd = {(one.source, one.path) for one in judged if says in one.detail}
    assert (ADDRESSES[0], path) in odd
    assert {source for source, _ in odd} == {ADDRESSES[0]}
    assert [one.detail for one in judged if one.source == ADDRESSES[1]] == [""] * 5
