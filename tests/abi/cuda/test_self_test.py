"""How the self-test goes about it: its processes, its controls, what it asks of a machine, and what it does with a hang."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.host.p2p_child import MODULE, child_env, run_child
from agent.host.p2p_wire import PairRequest
from tests.abi.cuda.self_test import DEADLINES, SHORT, details, not_good, self_test
from tests.abi.cuda.stub import ADDRESSES, GIB, CudaStub, needs_compiler, needs_tracing

pytestmark = needs_compiler
DIRECT = ("copy-push", "copy-pull", "store", "load")
MIB = 1 << 20


def machine(folder: Path, count: int = 2, without: tuple[str, ...] = ()) -> CudaStub:
    stub = CudaStub(folder, without)
    for index in range(count):
        stub.add(index, ADDRESSES[index])
    return stub


async def test_P9_of_eight_gpus_exactly_the_one_bad_direction_is_found(tmp_path: Path):
    stub = machine(tmp_path, 8)
    stub.set({"fault.2.7.copy": "zeros"})
    result = await self_test(stub, ADDRESSES[:8])
    assert not_good(result) == dict.fromkeys(
        [(2, 7, "copy-push"), (2, 7, "copy-pull"), (2, 7, "concurrent")], "corrupt"
    )
    assert len(result.paths) == 8 * 7 * 5


async def test_of_sixteen_gpus_those_that_are_named_are_tested_and_no_others(tmp_path: Path):
    stub = machine(tmp_path, 16)
    stub.set({"fault.14.15.kernel": "ones"})
    result = await self_test(stub, (ADDRESSES[15], ADDRESSES[3], ADDRESSES[14]))
    assert not_good(result) == dict.fromkeys(
        [(14, 15, "store"), (14, 15, "load"), (14, 15, "concurrent")], "corrupt"
    )
    assert {call.split()[1] for call in stub.calls("cuDevicePrimaryCtxRetain")} == {"3", "14", "15"}


async def test_each_pair_has_a_process_and_its_staged_control_comes_first(tmp_path: Path):
    stub = machine(tmp_path, 3)
    await self_test(stub, ADDRESSES[:3])
    pairs: dict[str, list[str]] = {}
    for calls in stub.calls_by_process().values():
        moved = [call for call in calls if call.startswith(("copy ", "kernel "))]
        ways = {call.split()[1] for call in moved}
        if len(ways) == 1:
            (way,) = ways
            assert way not in pairs
            pairs[way] = moved
    assert sorted(pairs) == ["0>1", "0>2", "1>0", "1>2", "2>0", "2>1"]
    for moved in pairs.values():
        staged = [call.endswith("staged") for call in moved]
        assert staged == sorted(staged, reverse=True)
        assert staged[0]


async def test_every_buffer_is_written_and_read_by_its_owner_only(tmp_path: Path):
    stub = machine(tmp_path)
    await self_test(stub)
    by = [
        re.match(r"(\d+) by (\d+)", call.split(" ", 1)[1])
        for call in [*stub.calls("write"), *stub.calls("read")]
    ]
    assert by
    assert [one for one in by if one is None or one[1] != one[2]] == []


async def test_a_process_that_has_seen_an_error_does_no_more(tmp_path: Path):
    stub = machine(tmp_path)
    stub.set({"error.copy.0.1": 700})
    result = await self_test(stub)
    assert not_good(result)[0, 1, "copy-push"] == "error"
    failed = [calls for calls in stub.calls_by_process().values() if "copy 0>1 by 0: 4096 direct" in calls]
    assert failed
    for calls in failed:
        after = calls[calls.index("copy 0>1 by 0: 4096 direct") + 1 :]
        assert [
            call for call in after if not call.startswith(("cuCtxSetCurrent", "cuStreamSynchronize"))
        ] == []


async def test_the_same_seed_sends_the_same_bytes_again(tmp_path: Path):
    stub = machine(tmp_path)
    stub.set({"fault.0.1.push": "ones"})
    first, again = await self_test(stub), await self_test(stub)
    assert first.seed == 1
    assert "want" in details(first)
    assert first.paths == again.paths


async def test_a_failed_host_control_names_the_gpu_and_nothing_direct_is_tried_on_it(tmp_path: Path):
    stub = machine(tmp_path, 3)
    stub.set({"fault.1.host": "flip"})
    result = await self_test(stub, ADDRESSES[:3])
    assert not result.controls_ok
    assert ADDRESSES[1] in result.control_detail
    assert "flipped bits" in result.control_detail
    assert {place[:2] for place in not_good(result)} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert set(not_good(result).values()) == {"not-run"}
    assert [call for call in stub.calls("copy") if "1" in call.split()[1]] == []


async def test_a_failed_staged_control_leaves_that_pair_unjudged(tmp_path: Path):
    stub = machine(tmp_path)
    stub.set({"fault.0.1.staged": "zeros"})
    result = await self_test(stub)
    assert not result.controls_ok
    assert f"{ADDRESSES[0]} -> {ADDRESSES[1]}" in result.control_detail
    assert not_good(result) == {(0, 1, path): "not-run" for path in (*DIRECT, "concurrent")}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"error.cuInit": 803}, "803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ({"error.cuInit": 100}, "100 CUDA_ERROR_NO_DEVICE"),
        ({"error.cuDevicePrimaryCtxRetain.1": 46}, "46 CUDA_ERROR_DEVICE_UNAVAILABLE"),
        ({"gpu1.memory": MIB}, "memory"),
    ],
    ids=["library_and_driver_differ", "no_device", "device_unavailable", "no_memory_left"],
)
async def test_what_keeps_the_test_from_judging_is_told(state: dict[str, Any], says: str, tmp_path: Path):
    stub = machine(tmp_path)
    stub.set(state)
    result = await self_test(stub)
    assert not result.controls_ok
    assert says in result.control_detail
    assert set(not_good(result).values()) <= {"not-run"}


async def test_without_libcuda_the_host_lacks_it(tmp_path: Path):
    stub = machine(tmp_path)
    stub.env["LD_LIBRARY_PATH"] = str(tmp_path)
    result = await self_test(stub)
    assert (result.controls_ok, result.lacks) == (False, "libcuda")
    assert "libcuda.so.1" in result.control_detail


async def test_without_the_bindings_they_are_what_is_lacking(tmp_path: Path):
    hidden = tmp_path / "hidden" / "cuda"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('hidden')\n")
    stub = machine(tmp_path)
    stub.env["PYTHONPATH"] = f"{hidden.parent}:{child_env({})['PYTHONPATH']}"
    result = await self_test(stub)
    assert (result.controls_ok, result.lacks) == (False, "cuda-bindings")
    assert "cuda-bindings" in result.control_detail


@pytest.mark.parametrize(
    ("version", "without"), [(12040, ("cuEventElapsedTime_v2",)), (13000, ())], ids=["12.4", "13.0"]
)
async def test_drivers_of_cuda_12_4_and_13_both_do(version: int, without: tuple[str, ...], tmp_path: Path):
    stub = machine(tmp_path, without=without)
    stub.set({"version": version})
    result = await self_test(stub)
    assert result.controls_ok
    assert not_good(result) == {}


async def test_a_function_that_an_old_driver_lacks_is_named(tmp_path: Path):
    result = await self_test(machine(tmp_path, without=("cuMemcpyPeerAsync",)))
    assert not result.controls_ok
    assert "cuMemcpyPeerAsync" in details(result)
    assert "corrupt" not in not_good(result).values()


async def test_full_mode_finds_what_only_breaks_beyond_four_gibibytes(tmp_path: Path):
    stub = machine(tmp_path)
    stub.set({"fault.0.1.copy": "flip", "fault.0.1.copy.above": 4 * GIB})
    request = PairRequest(
        source=ADDRESSES[0], destination=ADDRESSES[1], paths=("staged", "copy-push"), seed=1, full=True
    )
    until = asyncio.get_running_loop().time() + 120
    ended = await run_child(request, stub.env, DEADLINES, until, lambda _begin: None)
    assert [(end.path, end.result) for end in ended.ends] == [("staged", "good"), ("copy-push", "corrupt")]
    assert "flipped bits" in ended.ends[1].detail


async def test_P2_after_a_hang_the_other_pairs_are_still_tested(tmp_path: Path):
    stub = machine(tmp_path, 3)
    stub.set({"hang.kernel.1.0": 60})
    result = await self_test(stub, ADDRESSES[:3], deadlines=SHORT)
    assert not_good(result) == {
        (1, 0, "store"): "hung",
        (1, 0, "load"): "not-run",
        (1, 0, "concurrent"): "not-run",
    }
    assert "state S" in details(result)


@pytest.mark.parametrize(
    ("state", "result"),
    [({"hang.concurrent.0.1": 60}, "hung"), ({"error.concurrent.0.1": 719}, "error")],
    ids=["hang", "error"],
)
async def test_what_only_befalls_a_pair_while_all_send_is_told_of_it(
    state: dict[str, Any], result: str, tmp_path: Path
):
    stub = machine(tmp_path)
    stub.set(state)
    found = not_good(await self_test(stub))
    assert found[0, 1, "concurrent"] == result
    assert {path for _, _, path in found} == {"concurrent"}


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)  # asyncio hears of it from a thread of its own


@needs_tracing
async def test_a_child_that_cannot_be_killed_is_named_left_behind_and_remembered(tmp_path: Path):
    stub = machine(tmp_path, 3)
    stub.set({"stuck.copy.0.1": 120})
    result = await self_test(stub, ADDRESSES[:3], deadlines=SHORT)
    named = re.search(r"pid (\d+) does not end after SIGKILL", details(result))
    assert named, details(result)
    try:
        assert not_good(result)[0, 1, "copy-push"] == "hung"
        assert "state D" in details(result)
        before = len(stub.calls_by_process())
        again = await self_test(stub, deadlines=SHORT)
        assert {one.result for one in again.paths if one.path != "concurrent"} == {"hung"}
        assert f"pid {named[1]}" in details(again)
        assert len(stub.calls_by_process()) == before
    finally:
        stub.set({"stuck.copy.0.1": None})
        await gone(int(named[1]))


# The kernel counts to a process what it was before its exec, and that is here a pytest of some size: so one in between.
MEASURE = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""


@pytest.mark.parametrize("count", [2, 8])
def test_a_child_needs_little_memory_of_the_host(count: int, tmp_path: Path):
    stub = machine(tmp_path, count)
    some = ADDRESSES[:count]
    paths = ["staged", *DIRECT]
    requests: list[dict[str, Any]] = [
        {"mode": "pair", "source": some[0], "destination": some[1], "paths": paths},
        {"mode": "concurrent", "pairs": [(a, b) for a in some for b in some if a != b]},
    ]
    for request in requests:
        stub.trace.unlink(missing_ok=True)
        text = json.dumps({**request, "seed": 1, "full": False})
        argv = [sys.executable, "-S", "-c", MEASURE, sys.executable, "-P", "-m", MODULE, text]
        done = subprocess.run(argv, env=child_env(stub.env), capture_output=True, text=True, check=True)
        used = int(done.stdout)
        # What stands for the GPUs' memory is in the same process.
        devices = sum(int(call.rsplit(" ", 1)[1]) for call in stub.calls("allocated"))
        assert used * 1024 - devices < 96 * MIB
